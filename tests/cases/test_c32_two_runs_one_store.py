"""C32: runs that share a store never meet; two sessions that save one id at once never make one checkpoint of both."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import LeaseLost, NotFound, WrongPhase
from ckptd.v1.daemon_pb2 import ResolveRequest
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from ckptd_client.channel import connect
from daemons import DaemonProcess
from invariants import assert_whole_or_absent, stock_state

#: Each address is a process of its own for the daemon: two sessions of up to three ranks.
RANKS = 3


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    home = tmp_path_factory.mktemp("sockets")
    return [[f"unix:{home}/{session}{rank}.sock" for rank in range(RANKS)] for session in range(2)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, addresses: list[list[str]]) -> Iterator[DaemonProcess]:
    listen = [part for address in itertools.chain(*addresses) for part in ("--listen", address)]
    with DaemonProcess(str(tmp_path_factory.mktemp("c32") / "store"), *listen) as made:
        yield made


# --- runs ----------------------------------------------------------------------------------------------------------


def save(daemon: DaemonProcess, id: str, value: float, **options: Any) -> None:
    dcp.save({"t": torch.full((1000,), value)}, storage_writer=DaemonStorageWriter(id, address=daemon.address, **options), no_dist=True)
    wait(id, address=daemon.address, timeout=60)


def load(daemon: DaemonProcess, id: str) -> float:
    found = {"t": torch.zeros(1000)}
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=daemon.address), no_dist=True)
    assert bool((found["t"] == found["t"][0]).all())
    return float(found["t"][0])


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*") if path.is_file()
    }


def test_a_second_run_neither_resumes_nor_touches_the_first(daemon: DaemonProcess) -> None:
    store = Path(daemon.store)
    for step in (10, 20):
        save(daemon, f"run-a/step-{step}", float(step))
    before = digests(store / "run-a")
    for run in ("run-b", "run", "run-a2", ""):  # also one that begins alike, and none
        target = f"{run}/latest" if run else "latest"
        with pytest.raises(CheckpointException) as missing:
            load(daemon, target)
        assert {type(why[0]) for why in missing.value.failures.values()} == {NotFound}
        assert daemon.cli("show", target).returncode == 1
    save(daemon, "run-b/step-10", 11.0)
    save(daemon, "step-10", 12.0)
    save(daemon, "run-b/step-10", 13.0, overwrite=True)
    assert digests(store / "run-a") == before
    assert [load(daemon, id) for id in ("run-a/latest", "run-b/latest", "latest", "run-a/step-10")] == [20.0, 13.0, 12.0, 10.0]
    assert daemon.cli("prune", "--run", "run-b", "--keep-last", "1", "--delete-grace", "0s", "--orphan-age", "0s").returncode == 0
    assert daemon.cli("delete", "run-b/step-10").returncode == 0
    assert daemon.cli("delete", "step-10").returncode == 0
    assert daemon.cli("prune", "--run", "run-b", "--delete-grace", "0s", "--orphan-age", "0s").returncode == 0
    assert digests(store / "run-a") == before
    assert load(daemon, "run-a/latest") == 20.0


@pytest.mark.slow
def test_a_trainer_says_whether_it_starts_afresh_and_what_it_resumes(daemon: DaemonProcess) -> None:
    def train(run: str, steps: int) -> str:
        small = ["--width", "32", "--layers", "1", "--heads", "1", "--length", "16", "--batch-size", "2", "--save-every", "100"]
        command = [sys.executable, "-m", "ckptd_worker.train", "--run-name", run, "--steps", str(steps), *small]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, env={**os.environ, "CKPTD_ADDRESS": daemon.address}, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    save(daemon, "other/step-7", 7.0)
    assert "run trained has no checkpoint: starting afresh" in train("trained", 2)
    assert "resumed trained/step-2" in train("trained", 3)
    assert load(daemon, "other/latest") == 7.0


# --- sessions ------------------------------------------------------------------------------------------------------


class Session:
    """The ranks of one job, each a process of its own for the daemon, whose calls a test makes in the order that it likes.

    Rank r saves `rank<r>`, full of the session's value.
    """

    def __init__(self, addresses: list[str], id: str, value: float, world: int) -> None:
        self.id, self.value = id, value
        states = [{f"rank{rank}": torch.full((1000,), value)} for rank in range(world)]
        self.writers = [DaemonStorageWriter(id, address=addresses[rank], overwrite=True) for rank in range(world)]
        self.planners = [dcp.DefaultSavePlanner() for _ in range(world)]
        for rank, planner in enumerate(self.planners):
            planner.set_up_planner(states[rank], is_coordinator=rank == 0)
            self.writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        self.plans, self.metadata = self.planners[0].create_global_plan([planner.create_local_plan() for planner in self.planners])
        self.results: list[Any] = []
        self.refused = ""

    def steps(self) -> list[str]:
        """What `do` has to do one after another."""
        return [*map(str, range(len(self.plans))), "finish"]

    def do(self, step: str) -> None:
        """A rank hands over, or the coordinator finishes; nothing if the session was refused before."""
        if self.refused:
            return
        try:
            if step == "finish":
                self.writers[0].finish(self.metadata, self.results)
            else:
                rank = int(step)
                self.results.append(self.writers[rank].write_data(self.plans[rank], self.planners[rank]).wait())
        except (LeaseLost, WrongPhase) as refused:
            self.refused = str(refused)


def load_session(daemon: DaemonProcess, id: str, worlds: dict[float, int]) -> float:
    """Every rank's value in the checkpoint is the same, and there are as many ranks as that session has; returns the value."""
    world = connect(daemon.address).resolve(ResolveRequest(id=id)).summary.world_size
    found = {f"rank{rank}": torch.zeros(1000) for rank in range(world)}
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=daemon.address), no_dist=True)
    values = {float(value) for tensor in found.values() for value in tensor}
    assert len(values) == 1, values
    assert worlds[min(values)] == world
    return min(values)


def interleavings(one: list[str], other: list[str]) -> list[list[tuple[int, str]]]:
    """All orders of the calls of two sessions."""
    orders = []
    for places in itertools.combinations(range(len(one) + len(other)), len(one)):
        left = [iter(one), iter(other)]
        orders.append([(number, next(left[number])) for number in (0 if at in places else 1 for at in range(len(one) + len(other)))])
    return orders


@pytest.mark.parametrize("processes", ["of their own", "shared"])
@pytest.mark.parametrize("worlds", [(2, 2), (1, 2), pytest.param((3, 2), marks=pytest.mark.slow)])
def test_in_whatever_order_two_sessions_call_no_checkpoint_is_of_both(
    daemon: DaemonProcess, addresses: list[list[str]], worlds: tuple[int, int], processes: str
) -> None:
    run = f"order-{worlds[0]}-{worlds[1]}-{processes.partition(' ')[0]}"
    refused = 0
    finished = {}
    for number, order in enumerate(interleavings(*([*map(str, range(world)), "finish"] for world in worlds))):
        id = f"{run}/step-{number}"
        sessions = [Session(addresses[0 if processes == "shared" else one], id, float(one + 1), worlds[one]) for one in range(2)]
        for one, step in order:
            sessions[one].do(step)
        saved = [session.value for session in sessions if not session.refused]
        refused += 2 - len(saved)
        assert all("save again" in session.refused for session in sessions if session.refused)
        if not saved:  # then it is nobody's, and whoever tries again alone gets it
            with pytest.raises(NotFound):
                connect(daemon.address).resolve(ResolveRequest(id=id))
            again = Session(addresses[1], id, 2.0, worlds[1])
            for step in again.steps():
                again.do(step)
            assert again.refused == ""
            saved = [2.0]
        finished[id] = max(saved, key=lambda value: order.index((int(value) - 1, "finish")))
        assert load_session(daemon, id, {1.0: worlds[0], 2.0: worlds[1]}) == finished[id], order
    # Processes of their own do not even notice each other: the one that finishes last replaces the other whole.
    assert bool(refused) == (processes == "shared")
    for id in finished:
        wait(id, address=daemon.address, timeout=60)
    for id, value in finished.items():
        assert {float(one) for tensor in stock_state(Path(daemon.store) / id).values() for one in tensor} == {value}, id


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_two_sessions_that_save_one_id_at_once_end_with_one_of_them(daemon: DaemonProcess, addresses: list[list[str]], rounds: int) -> None:
    worlds = {1.0: 2, 2.0: 3}
    failed: list[BaseException] = []

    def run(number: int, start: threading.Barrier) -> None:
        try:
            session = Session(addresses[number], "at-once/step-1", float(number + 1), worlds[number + 1])
            start.wait(30)
            for step in session.steps():
                session.do(step)
            assert session.refused == ""
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    for _ in range(rounds):
        start = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(number, start)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        load_session(daemon, "at-once/step-1", worlds)
    wait("at-once/step-1", address=daemon.address, timeout=60)
    last = load_session(daemon, "at-once/step-1", worlds)
    stored = assert_whole_or_absent(Path(daemon.store))["at-once/step-1"]
    assert len(stored) == worlds[last]
    assert {float(one) for tensor in stored.values() for one in tensor} == {last}
