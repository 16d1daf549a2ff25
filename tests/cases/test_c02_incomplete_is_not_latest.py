"""C02: a save that was cut off is never latest; what is complete is, and debris does not stop a later save."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import appeared


def save(daemon: DaemonProcess, step: int) -> None:
    dcp.save(
        {"t": torch.full((1000,), float(step))}, checkpoint_id=f"step-{step}", storage_writer=DaemonStorageWriter(address=daemon.address)
    )


def latest(daemon: DaemonProcess) -> float:
    loaded = {"t": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id="latest", storage_reader=DaemonStorageReader(address=daemon.address))
    assert bool((loaded["t"] == loaded["t"][0]).all())
    return float(loaded["t"][0])


@pytest.mark.parametrize("memory_survives", [True, False])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_after_a_kill_at_object_k_latest_is_whole(tmp_path: Path, k: int, memory_survives: bool) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        save(daemon, 10)
        wait("step-10", address=daemon.address, timeout=60)
        control.write_text(f'{{"hold_after": {3 + k}}}')
        save(daemon, 20)
        deadline = time.monotonic() + 30
        while len(appeared(store / "step-20")) < k:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if k < 3:
            time.sleep(0.3)
            assert not (store / "step-20" / ".metadata").exists()
        daemon.kill()
        control.unlink()
        if not memory_survives:
            shutil.rmtree(daemon.shm_dir)
        daemon.start()
        listed = daemon.list()
        assert listed["step-10"]["state"] == "durable"
        if memory_survives:
            assert latest(daemon) == 20.0
            wait("step-20", address=daemon.address, timeout=60)
        elif k == 3:
            assert listed["step-20"]["state"] == "durable"
            assert latest(daemon) == 20.0
        else:
            assert latest(daemon) == 10.0
            if k > 0:
                assert listed["step-20"]["state"] == "incomplete"
                assert listed["step-20"]["reason"]
            else:
                assert "step-20" not in listed
            save(daemon, 20)
            wait("step-20", address=daemon.address, timeout=60)
        assert latest(daemon) == 20.0
        assert daemon.list()["step-20"]["state"] == "durable"
