"""Two daemons on one store: what the first saved, the second can only have from the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess


@dataclass
class Pair:
    """A daemon that saves, and another on the same store whose memory never held a save."""

    store: Path
    saving: DaemonProcess
    other: DaemonProcess

    def save(self, checkpoint_id: str, state: dict[str, Any], **options: Any) -> None:
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=DaemonStorageWriter(address=self.saving.address, **options))

    def wait(self, checkpoint_id: str) -> None:
        wait(checkpoint_id, address=self.saving.address, timeout=60)

    def load_from_memory(self, checkpoint_id: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=self.saving.address), **options)
        return state

    def load_from_store(self, checkpoint_id: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=self.other.address), **options)
        return state

    def load_with_stock(self, checkpoint_id: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.store / checkpoint_id), **options)
        return state
