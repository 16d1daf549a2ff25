"""C08: a background failure is never swallowed: wait, list and the next save tell it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.errors import WrongPhase
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess


def save(daemon: DaemonProcess, step: int) -> None:
    dcp.save(
        {"t": torch.full((1000,), float(step))}, checkpoint_id=f"step-{step}", storage_writer=DaemonStorageWriter(address=daemon.address)
    )


def test_a_denied_upload_is_told_to_wait_list_and_the_next_save(tmp_path: Path) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        save(daemon, 10)
        wait("step-10", address=daemon.address, timeout=60)
        control.write_text(json.dumps({"raise": "EACCES"}))
        save(daemon, 20)
        with pytest.raises(WrongPhase, match=r"step-20.*(denied|Permission)"):
            wait("step-20", address=daemon.address, timeout=60)
        line = daemon.list()["step-20"]
        assert line["state"] == "failed"
        assert "ermission" in line["reason"] or "denied" in line["reason"]
        waited = daemon.cli("wait", "step-20", "--timeout", "30s")
        assert waited.returncode == 1
        assert "step-20" in waited.stderr
        control.unlink()
        with pytest.warns(UserWarning, match="step-20"):
            save(daemon, 30)
        wait("step-30", address=daemon.address, timeout=60)
        listed = daemon.list()
        assert [listed[f"step-{step}"]["state"] for step in (10, 20, 30)] == ["durable", "failed", "durable"]
        # What failed is still in memory, so it can still be loaded and even be saved again.
        loaded = {"t": torch.zeros(1000)}
        dcp.load(loaded, checkpoint_id="step-20", storage_reader=DaemonStorageReader(address=daemon.address))
        assert float(loaded["t"][0]) == 20.0


def test_a_full_disk_is_retried_until_there_is_room(tmp_path: Path) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        control.write_text(json.dumps({"raise": "ENOSPC"}))
        save(daemon, 10)
        with pytest.raises(TimeoutError):
            wait("step-10", address=daemon.address, timeout=2)
        assert daemon.list()["step-10"]["state"] == "accepted"
        control.unlink()
        wait("step-10", address=daemon.address, timeout=60)
        assert daemon.list()["step-10"]["state"] == "durable"


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint run/step-1:UserWarning")
def test_a_failure_is_told_although_others_succeed_after_it(tmp_path: Path) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        store.mkdir(exist_ok=True)
        (store / "run").write_text("in the way")  # a file where the run's directory should be
        for id in ("run/step-1", "step-2"):
            dcp.save({"t": torch.ones(10)}, checkpoint_id=id, storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-2", address=daemon.address, timeout=60)
        daemon.until("run/step-1", "failed")
        save(daemon, 3)
        wait("step-3", address=daemon.address, timeout=60)
        told = json.loads(daemon.cli("status", "--json").stdout)["warning"]  # what every save is told
        assert "run/step-1 could not be made durable" in told


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint full/step-1:UserWarning")
def test_an_attempt_that_waits_to_be_tried_again_holds_up_no_other(tmp_path: Path) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        control.write_text(json.dumps({"raise": "ENOSPC", "only": "full/"}))
        for id in ("full/step-1", "ok/step-1"):
            dcp.save({"t": torch.ones(10)}, checkpoint_id=id, storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("ok/step-1", address=daemon.address, timeout=60)
        assert daemon.list()["full/step-1"]["state"] == "accepted"
        control.unlink()
        wait("full/step-1", address=daemon.address, timeout=60)


def test_the_trainer_ends_with_a_status_that_says_so(tmp_path: Path) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        control.write_text(json.dumps({"raise": "EACCES"}))
        command = [sys.executable, "-m", "ckptd_worker.train", "--steps", "2", "--save-every", "2", "--run-name", "job"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, env={**os.environ, "CKPTD_ADDRESS": daemon.address}, check=False
        )
        assert done.returncode == 1, done.stderr
        assert "job/step-2" in done.stdout + done.stderr
        assert "ermission" in done.stdout + done.stderr
