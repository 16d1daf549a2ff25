"""C30: steps are numbers: 1000 comes after 900, and strange names are no checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess

STEPS = (0, 9, 10, 99, 100, 900, 1000, 10**20)


def test_list_and_latest_are_numeric_and_ignore_strange_names(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store)) as daemon:
        for step in STEPS:
            dcp.save(
                {"t": torch.tensor([float(step)], dtype=torch.float64)},
                checkpoint_id=f"step-{step}",
                storage_writer=DaemonStorageWriter(address=daemon.address),
            )
        wait(f"step-{STEPS[-1]}", address=daemon.address, timeout=60)
        for name in ("step-abc", "step-10.bak", "step_10", "step--5"):
            (store / name).mkdir()
            (store / name / "left.over").write_text("x")
        (store / "latest").write_text("step-9")
        listed = daemon.list()
        assert list(listed) == [f"step-{step}" for step in STEPS]
        assert [line["step"] for line in listed.values()] == list(STEPS)
        loaded = {"t": torch.zeros(1, dtype=torch.float64)}
        dcp.load(loaded, checkpoint_id="latest", storage_reader=DaemonStorageReader(address=daemon.address))
        assert float(loaded["t"]) == float(STEPS[-1])
        daemon.terminate()
        daemon.start()
        assert list(daemon.list()) == [f"step-{step}" for step in STEPS]
        direct = daemon.cli("status")
        assert direct.returncode == 0
