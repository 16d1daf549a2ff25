"""C03: what was accepted may be latest, but only what is durable makes an older checkpoint go: one that can be loaded is always left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.errors import WrongPhase
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import Picture, appeared, assert_prune_was_humble, assert_whole_or_absent

pytestmark = pytest.mark.filterwarnings("ignore:ckptd. checkpoint step-20:UserWarning")
#: Objects of each checkpoint: one shard, the manifest, `.metadata`.
OBJECTS = 3


class Keeping:
    """A daemon that keeps the last checkpoint alone, on a store that can be blocked."""

    def __init__(self, home: Path) -> None:
        self.store = home / "store"
        self.control = home / "control"
        rules = ("--keep-last", "1", "--delete-grace", "0s")
        self.daemon = DaemonProcess(f"faulty://{self.store}", *rules, program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))

    def save(self, step: int, *, durable: bool = True) -> None:
        writer = DaemonStorageWriter(f"step-{step}", address=self.daemon.address)
        dcp.save({"t": torch.full((1000,), float(step))}, storage_writer=writer)
        if durable:
            wait(f"step-{step}", address=self.daemon.address, timeout=60)

    def load(self, id: str) -> float:
        found = {"t": torch.zeros(1000)}
        dcp.load(found, storage_reader=DaemonStorageReader(id, address=self.daemon.address))
        assert bool((found["t"] == found["t"][0]).all())
        return float(found["t"][0])

    def states(self) -> dict[str, str]:
        return {id: line["state"] for id, line in self.daemon.list().items()}

    def latest_in_store(self) -> str:
        """Of the store itself, without the daemon."""
        return str(json.loads(self.cli_in_store("show", "latest", "--json"))["id"])

    def cli_in_store(self, *arguments: str) -> str:
        """What `ckptd … --store` prints."""
        command = [sys.executable, "-m", "ckptd", *arguments, "--store", str(self.store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def prune(self) -> None:
        """On request, by the daemon and in the store."""
        done = self.daemon.cli("prune", "--keep-last", "1", "--delete-grace", "0s")
        assert done.returncode == 0, done.stderr
        self.cli_in_store("prune", "--keep-last", "1", "--delete-grace", "0s")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.daemon.log.read_text()[-3000:]
            time.sleep(0.05)

    def until_appeared(self, step: int, count: int) -> None:
        """Until so many objects of the step are there."""
        self.until(lambda: len(appeared(self.store / f"step-{step}")) == count)


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Keeping]:
    made = Keeping(tmp_path)
    with made.daemon:
        made.save(10)
        yield made


@pytest.mark.parametrize("uploaded", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_while_the_upload_is_blocked_nothing_goes_and_afterwards_the_older_one_does(keeping: Keeping, uploaded: int) -> None:
    before = Picture.of(keeping.store)
    keeping.tell(hold_after=OBJECTS + uploaded)
    keeping.save(20, durable=False)
    keeping.until_appeared(20, uploaded)
    assert keeping.states() == {"step-10": "durable", "step-20": "accepted"}
    assert keeping.load("latest") == 20.0
    assert keeping.latest_in_store() == "step-10"
    keeping.prune()
    assert keeping.load("step-10") == 10.0
    assert_prune_was_humble(before, Picture.of(keeping.store), keeping=["step-10"])
    assert assert_whole_or_absent(keeping.store).keys() == {"step-10"}
    keeping.tell()
    wait("step-20", address=keeping.daemon.address, timeout=60)
    keeping.until_appeared(10, 0)
    assert keeping.states() == {"step-20": "durable"}
    assert keeping.latest_in_store() == "step-20"
    assert keeping.load("latest") == 20.0


@pytest.mark.parametrize("uploaded", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_a_reboot_while_the_upload_is_blocked_leaves_the_older_one(keeping: Keeping, uploaded: int) -> None:
    keeping.tell(hold_after=OBJECTS + uploaded)
    keeping.save(20, durable=False)
    keeping.until_appeared(20, uploaded)
    keeping.daemon.kill()
    shutil.rmtree(keeping.daemon.shm_dir)
    keeping.tell()
    keeping.daemon.start()
    keeping.prune()
    assert keeping.states()["step-10"] == "durable"
    assert keeping.load("latest") == 10.0
    assert keeping.latest_in_store() == "step-10"
    keeping.save(20)
    keeping.until(lambda: keeping.states() == {"step-20": "durable"})
    assert keeping.load("latest") == 20.0


def test_what_can_never_become_durable_makes_nothing_go(keeping: Keeping) -> None:
    before = Picture.of(keeping.store)
    keeping.tell(only="step-20", **{"raise": "EACCES"})
    keeping.save(20, durable=False)
    with pytest.raises(WrongPhase, match="step-20"):
        wait("step-20", address=keeping.daemon.address, timeout=60)
    keeping.prune()
    assert keeping.states() == {"step-10": "durable", "step-20": "failed"}
    assert_prune_was_humble(before, Picture.of(keeping.store), keeping=["step-10"])
    assert keeping.load("step-10") == 10.0
    assert keeping.latest_in_store() == "step-10"
    # The failed one is in nobody's way: the next one replaces the older one.
    keeping.save(30)
    keeping.until_appeared(10, 0)
    assert keeping.load("latest") == 30.0
    assert keeping.latest_in_store() == "step-30"


def test_at_no_moment_is_there_none(keeping: Keeping) -> None:
    """Seen from outside, in ascending order: a checkpoint that is gone has a newer one that is there."""
    steps = range(10, 21)
    empty = []
    ended = threading.Event()
    looks = 0

    def look() -> None:
        nonlocal looks
        while not ended.is_set():
            looks += 1
            if not any((keeping.store / f"step-{step}" / ".metadata").exists() for step in steps):
                empty.append(looks)

    keeping.tell(delay_seconds=0.02)
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for step in steps[1:]:
            keeping.save(step, durable=step % 2 == 0)
        keeping.until(lambda: keeping.states() == {"step-20": "durable"})
    finally:
        ended.set()
        watcher.join()
    assert looks > len(steps)
    assert empty == []
    assert assert_whole_or_absent(keeping.store).keys() == {"step-20"}
