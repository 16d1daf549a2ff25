"""Reads a checkpoint with nothing but torch, and says what is in it: the proof that ckptd locks nobody in.

``python -m ckptd_worker.stock DIRECTORY`` loads every tensor and object through
``dcp.load`` with torch's own FileSystemReader and prints one JSON object, name to
SHA-256. This room imports no ckptd, and fails if anything else in its process did.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


def load_all(reader: StorageReader) -> dict[str, Any]:
    """Loads all that `reader` has, in this process alone; flat names to tensors and objects."""
    described = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in described.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp_load(state, storage_reader=reader)
    return state


def digests(state: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of each value: of dtype, shape and bytes for a tensor, of the repr for any other object."""
    found = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            sha = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
            sha.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            sha = hashlib.sha256(repr(value).encode())
        found[name] = sha.hexdigest()
    return found


def main() -> int:
    """Prints the digests of the checkpoint in the given directory; returns the exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m ckptd_worker.stock DIRECTORY", file=sys.stderr)
        return 2
    found = digests(load_all(FileSystemReader(sys.argv[1])))
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in ("ckptd", "ckptd_client"))
    if ours:
        print(f"not a stock load: {', '.join(ours)} is imported", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
