"""C09: whoever is told to end, trainer or daemon, once or twice: a checkpoint is committed whole or not at all, and nobody hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader

from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.stores import open_store
from ckptd.verify import is_whole
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import status
from worlds import World, serve

NUMEL = 100_000
ONCE, THRICE = [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGINT]


class Slow:
    """A daemon on a store that takes its time."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.store = home / "store"
        self.control = home / "control"
        self.daemon = DaemonProcess(f"faulty://{self.store}", *arguments, program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))

    def save(self, id: str) -> None:
        dcp.save({"t": torch.arange(NUMEL)}, storage_writer=DaemonStorageWriter(id, address=self.daemon.address))

    def tell_to_end(self, signals: list[signal.Signals]) -> None:
        assert self.daemon.process is not None
        for number in signals:
            self.daemon.process.send_signal(number)
            time.sleep(0.1)

    @property
    def is_running(self) -> bool:
        return self.daemon.process is not None and self.daemon.process.poll() is None

    def end(self, signals: list[signal.Signals], *, timeout: float = 60.0) -> int:
        """The exit status after these."""
        self.tell_to_end(signals)
        assert self.daemon.process is not None
        code = self.daemon.process.wait(timeout)
        self.daemon.kill()
        return code

    @property
    def durable(self) -> list[str]:
        """Ids of the checkpoints in the store, as the store alone tells it."""
        return [str(entry.id) for entry in Ledger(open_store(str(self.store))).entries()]

    def assert_whole(self, id: str) -> None:
        """Every byte in the store is as it should be, and stock DCP reads it."""
        store = open_store(str(self.store))
        assert is_whole(store, Ledger(store), Ledger(store).find(CheckpointId.parse(id))) == ()
        found = {"t": torch.zeros(NUMEL, dtype=torch.int64)}
        dcp.load(found, storage_reader=dcp.FileSystemReader(self.store / id))
        assert torch.equal(found["t"], torch.arange(NUMEL))


@contextmanager
def trainer(slow: Slow, function: str, *says: str) -> Iterator[subprocess.Popen[str]]:
    """This file as a trainer in a session of its own, when it has said all that."""
    command = [sys.executable, "-W", "error::UserWarning:ckptd_client", __file__, function]
    process = subprocess.Popen(
        command, env={**slow.daemon.env, "CKPTD_ADDRESS": slow.daemon.address}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        for text in says:
            assert process.stdout.readline() == f"{text}\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_trainer_that_is_terminated_and_then_killed_loses_nothing_that_it_has_handed_over(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    with slow.daemon:
        slow.tell(hold_after=0)
        with trainer(slow, "save_and_train_on", "saved") as process:
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(1.0)
            assert process.poll() is None  # it ends in its own time, which is not given to it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert slow.daemon.list()["step-1"]["state"] == "accepted"
        slow.tell()
        slow.daemon.until("step-1", "durable")
        slow.assert_whole("step-1")


@pytest.mark.parametrize("signals", [ONCE, pytest.param(THRICE, marks=pytest.mark.slow)], ids=len)
def test_a_daemon_that_ends_commits_what_it_can_within_the_grace(tmp_path: Path, signals: list[signal.Signals]) -> None:
    slow = Slow(tmp_path, "--grace", "30s")
    with slow.daemon:
        slow.tell(delay_seconds=1.0)  # of each of the three objects
        slow.save("step-1")
        assert slow.end(signals) == 0
        assert slow.durable == ["step-1"]
        slow.assert_whole("step-1")


@pytest.mark.parametrize("signals", [pytest.param(ONCE, marks=pytest.mark.slow), THRICE], ids=len)
def test_a_daemon_that_cannot_commit_in_time_ends_all_the_same_and_the_next_one_commits(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    (tmp_path / "patient").mkdir()
    slow, patient = Slow(tmp_path, "--grace", "1s"), Slow(tmp_path / "patient", "--grace", "10m")
    with slow.daemon, patient.daemon:
        for one in (slow, patient):
            one.tell(hold_after=0)
            one.save("step-1")
        patient.tell_to_end(signals)
        assert slow.end(signals) == 0
        # It was told first, and has more time: the other one ended because its own was over.
        assert patient.is_running
        assert slow.durable == patient.durable == []
        patient.tell()
        assert patient.end([]) == 0
        assert patient.durable == ["step-1"]
        assert not (slow.store / "step-1" / ".metadata").exists()
        slow.tell()
        slow.daemon.start()
        slow.daemon.until("step-1", "durable")
        slow.assert_whole("step-1")


def test_a_trainer_whose_workers_are_terminated_with_it_still_saves(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    with slow.daemon:
        with trainer(slow, "train_with_workers", "training") as process:
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(60) == 0
        slow.daemon.until("emergency/step-2", "durable")
        slow.assert_whole("emergency/step-2")


# --- two of four ranks have handed over ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with World(Path(__file__), 4) as four:
        yield four


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(str(tmp_path / "store"), "--open-timeout", "1s") as daemon:
        yield daemon


def until(daemon: DaemonProcess, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, status(daemon)
        time.sleep(0.05)


@contextmanager
def half_handed_over(daemon: DaemonProcess, ranks: World, go: Path) -> Iterator[Future[list[Any]]]:
    """Four ranks save: two have sealed, two stand in the middle of their copy until `go` is there. Their answers, when they come."""
    first = go.with_name("first")
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(ranks.call, "save_in_two_halves", address=daemon.address, id="step-1", first=str(first), go=str(go))
        try:
            # What is sealed is kept as long as others of the save write: they have begun before the first two end.
            until(daemon, lambda: answers.done() or status(daemon).open_shards == 4)
            first.touch()
            until(daemon, lambda: answers.done() or (status(daemon).open_shards, len(list(daemon.shm_dir.glob("*.sealed")))) == (2, 2))
            yield answers
        finally:
            first.touch()
            go.touch()


@pytest.mark.parametrize("is_back", [True, False], ids=["it_is_back_at_once", "it_stays_away"])
def test_a_daemon_that_ends_when_half_of_the_ranks_have_handed_over_commits_nothing(
    tmp_path: Path, ranks: World, plain: DaemonProcess, is_back: bool
) -> None:
    with half_handed_over(plain, ranks, tmp_path / "go") as answers:
        assert plain.terminate() == 0
        assert not [path for path in plain.shm_dir.iterdir() if path.suffix in (".sealed", ".record", ".open")]
        if is_back:
            plain.start()
    assert answers.result() == [["2: LeaseLost", "3: LeaseLost"]] * 4
    if not is_back:
        plain.start()
    assert plain.list() == {}
    assert not list((tmp_path / "store").rglob("*.distcp"))
    ranks.call("save_and_load", address=plain.address, id="step-1")
    plain.until("step-1", "durable")


def test_trainers_that_end_when_half_of_the_ranks_have_handed_over_leave_nothing(
    tmp_path: Path, ranks: World, plain: DaemonProcess
) -> None:
    with half_handed_over(plain, ranks, tmp_path / "go") as answers:
        for rank in ranks.ranks:
            rank.terminate()
        assert "ended" in str(answers.exception())
    until(plain, lambda: not list(plain.shm_dir.glob("*.sealed")) and status(plain).leases == 0)
    assert (status(plain).open_shards, status(plain).accepted) == (0, 0)
    assert plain.list() == {}


# --- what each rank runs -------------------------------------------------------------------------------------------


class Halting(dcp.DefaultSavePlanner):
    """Stops in the middle of the copy until a file is there."""

    def __init__(self, go: Path) -> None:
        super().__init__()
        self.go = go
        self.seen: set[str] = set()

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn in self.seen:  # the first time it is only looked at
            while not self.go.exists():
                time.sleep(0.02)
        self.seen.add(write_item.index.fqn)
        return super().resolve_data(write_item)


def state(*, empty: bool = False) -> dict[str, Any]:
    rank = dist.get_rank()
    return {f"rank{rank}": torch.zeros(NUMEL) if empty else torch.full((NUMEL,), float(rank + 1))}


def save_in_two_halves(address: str, id: str, first: str, go: str) -> list[str]:
    """All stop in the middle, ranks 2 and 3 for longer. Why it failed, by rank."""
    planner = Halting(Path(go if dist.get_rank() >= 2 else first))
    try:
        dcp.save(state(), storage_writer=DaemonStorageWriter(id, address=address), planner=planner)
    except CheckpointException as error:
        return [f"{rank}: {type(why).__name__}" for rank, (why, _) in sorted(error.failures.items())]
    return []


def save_and_load(address: str, id: str) -> None:
    dcp.save(state(), storage_writer=DaemonStorageWriter(id, address=address))
    found = state(empty=True)
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=address))
    assert all(torch.equal(found[key], value) for key, value in state().items())


# --- trainers of one rank ------------------------------------------------------------------------------------------


def save_and_train_on() -> None:
    """Does not end when it is told to."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    dcp.save({"t": torch.arange(NUMEL)}, storage_writer=DaemonStorageWriter("step-1"))
    print("saved", flush=True)
    time.sleep(600)


def train_with_workers() -> None:
    """Saves, trains, and saves once more when it is told to end; its workers are told as well and end at once."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    dcp.save({"t": torch.arange(NUMEL)}, storage_writer=DaemonStorageWriter("emergency/step-1"))
    batches = iter(DataLoader(range(10**8), batch_size=2, num_workers=2, multiprocessing_context="fork", collate_fn=list))  # type: ignore[arg-type]
    for _ in range(2):  # of each worker one: before it has come so far, it does with the signal what its parent does
        next(batches)
    saved = finished = False
    with suppress(RuntimeError):
        print("training", flush=True)
    while not finished:
        with suppress(Exception, CheckpointException):  # the end of a worker arrives in whatever this does
            if not told:
                next(batches)
            elif not saved:
                dcp.save({"t": torch.arange(NUMEL)}, storage_writer=DaemonStorageWriter("emergency/step-2", overwrite=True))
                saved = True
            finished = saved and not multiprocessing.active_children()
    wait("emergency/step-2", timeout=60)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if sys.argv[1:]:
        globals()[sys.argv[1]]()
    else:
        dist.init_process_group("gloo")
        serve({function.__name__: function for function in (save_in_two_halves, save_and_load)})
