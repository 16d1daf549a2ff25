"""The budget is never exceeded: tmpfs is looked at all the time, while trainers save, load, overwrite, are cut off and come back."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import ArenaFull, LeaseLost, NotFound, Unavailable, WrongPhase
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, channel
from daemons import DaemonProcess
from invariants import SEGMENT, assert_accounts_balance, assert_whole_or_absent, status

MiB = 1024 * 1024
TRAINERS = 3
#: Bytes of each checkpoint, by step.
SIZES = [size * MiB for size in (1, 3, 6, 10, 1, 6)]
#: A storm that is no storm by then is none.
PATIENCE_SECONDS = 90
#: What a storm may bring: no memory in time, a connection that was cut, an id that another trainer is at.
EXPECTED = (ArenaFull, LeaseLost, NotFound, Unavailable, WrongPhase)
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")


class Watch(threading.Thread):
    """Looks at a shm-dir without a pause, and keeps the most that it has held.

    No look is atomic: a file may go while the next one comes. So what counts is what two looks, one after the
    other, both saw of an inode, the smaller figure: all that was there in the moment between them.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.ended = threading.Event()
        self.looks = 0
        self.most = 0

    def run(self) -> None:
        before = self.look()
        while not self.ended.is_set():
            now = self.look()
            self.most = max(self.most, sum(min(nbytes, before.get(inode, 0)) for inode, nbytes in now.items()))
            before = now
            self.looks += 1

    def look(self) -> dict[int, int]:
        held = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if SEGMENT.fullmatch(entry.name):  # records are a few kilobytes, which the budget leaves out
                    held[found.st_ino] = found.st_blocks * 512
        return held


class Trainer(threading.Thread):
    """Saves and loads what it likes through an address of its own, which makes it a process of its own for the daemon."""

    def __init__(self, address: str, number: int) -> None:
        super().__init__()
        self.address = address
        self.chance = random.Random(number)
        self.ended = threading.Event()
        self.saved = 0
        self.loaded = 0
        self.unexpected: list[BaseException] = []

    def run(self) -> None:
        while not self.ended.is_set():
            step = self.chance.randrange(len(SIZES))
            try:
                if self.chance.random() < 0.4:
                    self.load(step)
                elif self.chance.random() < 0.8:
                    self.save(step)
                else:
                    self.save_cut_off(step)
            except EXPECTED:
                continue
            except CheckpointException as failed:
                cause = next(iter(failed.failures.values()))[0]
                if not isinstance(cause, EXPECTED):
                    self.unexpected.append(cause)

    def save(self, step: int) -> None:
        state = {"t": torch.full((SIZES[step] // 4,), self.chance.randrange(1000), dtype=torch.int32)}
        writer = DaemonStorageWriter(f"run/step-{step}", address=self.address, overwrite=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
        self.saved += 1

    def save_cut_off(self, step: int) -> None:
        """The lease ends under a save, as it does when its process is killed."""
        lease = channel.connect(self.address).lease()
        timer = threading.Timer(self.chance.uniform(0.0, 0.05), lease.close)
        timer.start()
        try:
            self.save(step)
        finally:
            timer.join()

    def load(self, step: int) -> None:
        found = {"t": torch.zeros(SIZES[step] // 4, dtype=torch.int32)}
        dcp.load(found, storage_reader=DaemonStorageReader(f"run/step-{step}", address=self.address), no_dist=True)
        assert bool((found["t"] == found["t"][0]).all())
        self.loaded += 1


@pytest.mark.parametrize("seconds", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_storm_of_saves_and_loads_never_takes_more_than_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    monkeypatch.setenv("CKPTD_SAVE_TIMEOUT", "2")
    homes = [tmp_path / f"{number}.sock" for number in range(TRAINERS)]
    listen = [part for home in homes for part in ("--listen", f"unix:{home}")]
    with DaemonProcess(str(tmp_path / "store"), *listen, memory="32MiB") as daemon:
        watch = Watch(daemon.shm_dir)
        trainers = [Trainer(f"unix:{home}", number) for number, home in enumerate(homes)]

        def counts() -> tuple[int, int]:
            return sum(trainer.saved for trainer in trainers), sum(trainer.loaded for trainer in trainers)

        began = time.monotonic()
        try:
            for thread in (watch, *trainers):
                thread.start()
            # On a machine that has other things to do it takes longer until so much has happened.
            while time.monotonic() < began + seconds or not (all(counts()) and watch.most > 16 * MiB):
                found = status(daemon)
                assert found.used <= found.memory
                assert time.monotonic() < began + PATIENCE_SECONDS, (counts(), watch.most)
                time.sleep(0.05)
        finally:
            for thread in (*trainers, watch):
                thread.ended.set()
                thread.join()
        saved, loaded = counts()
        print(f"{saved} saves, {loaded} loads, {watch.looks} looks, at most {watch.most / MiB:.1f} of 32 MiB")
        assert [trainer.unexpected for trainer in trainers] == [[]] * TRAINERS
        assert watch.most <= 32 * MiB
        for trainer in trainers:
            if (connection := channel._daemons.pop(trainer.address, None)) is not None:
                connection.close()
        assert_accounts_balance(daemon)
        daemon.terminate()
    assert_whole_or_absent(tmp_path / "store")
