"""SIGKILL of a trainer: what it had accepted becomes durable, what it was writing is given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ckptd.v1.daemon_pb2 import StatusReply
from ckptd_client import DaemonStorageReader, wait
from daemons import DaemonProcess
from invariants import on_tmpfs, status

SCRIPT = Path(__file__).with_name("crashing_trainer.py")


@contextmanager
def trainer(daemon: DaemonProcess, when: str) -> Iterator[subprocess.Popen[str]]:
    child = None
    process = subprocess.Popen([sys.executable, str(SCRIPT), daemon.address, when], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[0] == when
        child = int(said[1]) if len(said) > 1 else None
        yield process
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def settles(daemon: DaemonProcess) -> StatusReply:
    """The status once no lease is left."""
    deadline = time.monotonic() + 20
    while (found := status(daemon)).leases:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def kill_while_it_copies(daemon: DaemonProcess, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        seen = status(daemon)
        if not seen.open_shards or not seen.accepted:
            continue
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        if status(daemon).open_shards:  # it stands in the middle of a copy
            break
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.wait()


def test_a_trainer_killed_while_it_copies_leaves_no_open_memory(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store"), memory="1GiB") as daemon:
        with trainer(daemon, "copying") as process:
            kill_while_it_copies(daemon, process)
        found = settles(daemon)
        assert found.open_shards == 0
        deadline = time.monotonic() + 20
        while on_tmpfs(daemon.shm_dir) != status(daemon).used:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not list(daemon.shm_dir.glob("*.open"))
        kept = [line for line in daemon.list().values() if line["state"] == "accepted"]
        assert kept, "the last whole save stays restorable"
        newest = max(kept, key=lambda line: line["step"])
        loaded = {f"t{number}": torch.zeros(1024, 1024) for number in range(64)}
        dcp.load(loaded, checkpoint_id=newest["id"], storage_reader=DaemonStorageReader(address=daemon.address))
        assert all(bool((tensor == float(name[1:])).all()) for name, tensor in loaded.items())


def test_a_trainer_killed_right_after_save_returned_loses_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store), memory="1GiB") as daemon:
        with trainer(daemon, "saved") as process:
            process.kill()
            process.wait()
            wait("saved/step-1", address=daemon.address, timeout=60)
        assert settles(daemon).open_shards == 0
    loaded = {f"t{number}": torch.zeros(1024, 1024) for number in range(64)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(store / "saved" / "step-1"))
    assert all(bool((tensor == float(name[1:])).all()) for name, tensor in loaded.items())


def test_a_forked_child_that_lives_on_does_not_keep_the_memory_of_a_killed_trainer(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store"), memory="1GiB") as daemon, trainer(daemon, "forked") as process:
        kill_while_it_copies(daemon, process)
        deadline = time.monotonic() + 40  # the child holds the lease's socket, and lives on
        while status(daemon).open_shards:
            assert time.monotonic() < deadline
            time.sleep(0.2)
