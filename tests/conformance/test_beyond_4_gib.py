"""A tensor past 4 GiB, where zip's 32-bit fields end: through memory, through the store, and through stock."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess

NUMEL = (4 * 1024**3 + 4096) // 4
STEP = 1 << 26


def is_right(tensor: torch.Tensor) -> bool:
    return all(
        torch.equal(tensor[start : start + STEP], torch.arange(start, min(start + STEP, NUMEL), dtype=torch.int32))
        for start in range(0, NUMEL, STEP)
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:ckptd. the shard of rank 0 takes:UserWarning")
def test_a_tensor_past_4_gib_round_trips(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store"), "--codec", "none", memory="5GiB") as daemon:
        state = {"t": torch.arange(NUMEL, dtype=torch.int32)}
        dcp.save(state, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        state["t"].zero_()
        dcp.load(state, checkpoint_id="step-1", storage_reader=DaemonStorageReader(address=daemon.address))
        assert is_right(state["t"])
        wait("step-1", address=daemon.address, timeout=200)
        daemon.terminate()
        shutil.rmtree(daemon.shm_dir)
        daemon.arguments[1] = "256MiB"
        daemon.start()
        state["t"].zero_()
        dcp.load(state, checkpoint_id="step-1", storage_reader=DaemonStorageReader(address=daemon.address))
        assert is_right(state["t"])
    state["t"].zero_()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "store" / "step-1"))
    assert is_right(state["t"])
    shutil.rmtree(tmp_path / "store")
