"""What a training script touches: DCP's storage plugins for ckptd, `wait`, and `introduce`.

    import torch.distributed.checkpoint as dcp
    from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait

    dcp.save(state, checkpoint_id="run-a/step-100", storage_writer=DaemonStorageWriter())
    dcp.load(state, checkpoint_id="run-a/latest", storage_reader=DaemonStorageReader())
    wait("run-a/step-100")

Errors are the classes of ``ckptd.errors``; DCP wraps them in a CheckpointException that
every rank raises.
"""

from __future__ import annotations

import os

# grpc reads it when it is imported: without it a forked child (a DataLoader's worker) may hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

from ckptd.errors import ArenaFull, CkptdError, Corrupt, InvalidRequest, LeaseLost, NotFound, StoreError, Unavailable, WrongPhase
from ckptd_client.meeting import daemon_address, introduce
from ckptd_client.reader import DaemonStorageReader
from ckptd_client.waiting import wait
from ckptd_client.writer import DaemonStorageWriter

__all__ = [
    "ArenaFull",
    "CkptdError",
    "Corrupt",
    "DaemonStorageReader",
    "DaemonStorageWriter",
    "InvalidRequest",
    "LeaseLost",
    "NotFound",
    "StoreError",
    "Unavailable",
    "WrongPhase",
    "daemon_address",
    "introduce",
    "wait",
]
