"""C21: whatever happens to one rank, all ranks get the same error soon and the next save works; background saves meet no collective."""

from __future__ import annotations

import datetime as dt
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from worlds import World, serve

#: For all ranks to raise, and to save and load afterwards.
SECONDS = 30.0
#: What befalls a rank, and what all ranks are told of it.
TROUBLES = {
    "its planner fails to plan": (1, "ValueError: told by a test"),
    "it reaches no daemon": (1, "Unavailable: no ckptd daemon answers at unix:/nowhere.sock"),
    "it has another idea of ids": (1, "InvalidRequest: "),
    "its planner fails to make the global plan": (0, "ValueError: told by a test"),
    "its planner fails to finish the plan": (1, "ValueError: told by a test"),
    "its planner fails to hand over": (1, "OSError: [Errno 28] told by a test"),
    "it has nothing to hand over": (1, "InvalidRequest: 'rank1' is a torch.Tensor"),
    "it saves under another id": (0, "InvalidRequest: the shard of rank 1 was saved as other/step-1, the save is of"),
    "its writer fails to finish": (0, "OSError: [Errno 28] told by a test"),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(str(tmp_path_factory.mktemp("store"))) as made:
        yield made


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with World(Path(__file__), 3) as three:
        three.call("ready")
        yield three


@pytest.mark.parametrize("trouble", TROUBLES)
def test_all_ranks_are_told_what_made_one_fail_and_the_next_save_works(daemon: DaemonProcess, ranks: World, trouble: str) -> None:
    rank, told = TROUBLES[trouble]
    id = f"{trouble.replace(' ', '-')}/step-1"
    errors = ranks.call("save_in_trouble", seconds=SECONDS, address=daemon.address, id=id, trouble=trouble)
    assert errors[0] == errors[1] == errors[2]
    assert [number for number, _ in errors[0]] == [rank]
    assert errors[0][0][1].startswith(told)
    assert id not in daemon.list()
    ranks.call("save_and_load", seconds=SECONDS, address=daemon.address, id=id)
    daemon.until(id, "durable")


@pytest.mark.parametrize("trouble", ["it reaches no daemon", "it loads another checkpoint"])
def test_all_ranks_are_told_what_made_a_load_fail_and_the_next_load_works(daemon: DaemonProcess, ranks: World, trouble: str) -> None:
    run = f"load-{trouble.replace(' ', '-')}"
    for step in (1, 2):
        ranks.call("save_and_load", address=daemon.address, id=f"{run}/step-{step}")
    id = f"{run}/step-2"
    errors = ranks.call("load_in_trouble", seconds=SECONDS, address=daemon.address, id=id, trouble=trouble)
    assert errors[0] == errors[1] == errors[2]
    told = (1, "Unavailable: no ckptd daemon") if trouble == "it reaches no daemon" else (0, "WrongPhase: the ranks resolved")
    assert [(number, said[: len(told[1])]) for number, said in errors[0]] == [told]
    ranks.call("load", seconds=SECONDS, address=daemon.address, id=id)


def test_all_ranks_raise_when_the_daemon_is_killed_while_they_hand_over(daemon: DaemonProcess, ranks: World) -> None:
    errors = ranks.call("save_in_trouble", seconds=SECONDS, address=daemon.address, id="killed/step-1", trouble=f"kills {daemon.pid}")
    assert errors[0] == errors[1] == errors[2]
    assert 1 in [number for number, _ in errors[0]]
    assert {said.partition(":")[0] for _, said in errors[0]} <= {"LeaseLost", "Unavailable"}
    daemon.restart()
    assert "killed/step-1" not in daemon.list()
    ranks.call("save_and_load", seconds=SECONDS, address=daemon.address, id="killed/step-1")
    daemon.until("killed/step-1", "durable")


@pytest.mark.timeout(150)
def test_fifty_background_saves_beside_the_trainers_own_collectives(daemon: DaemonProcess, ranks: World) -> None:
    assert ranks.call("save_in_the_background", address=daemon.address, rounds=50) == [50, 50, 50]
    daemon.until("background/step-49", "durable")


def test_those_that_survive_a_killed_rank_raise_and_save_in_a_world_of_their_own(
    daemon: DaemonProcess, ranks: World, tmp_path: Path
) -> None:
    # In the time that the others have from its end on, they notice, meet, save and load.
    arguments = {"address": daemon.address, "id": "survivors/step-1", "rendezvous": str(tmp_path / "new")}
    first, killed, last = ranks.answers("save_and_go_on_without_rank_1", grace_seconds=100.0, **arguments)
    assert "ended" in killed["error"]
    assert first.get("value") == last.get("value") == "saved", (first, last)
    daemon.until("survivors/step-1", "durable")
    assert daemon.list()["survivors/step-1"]["world_size"] == 2


# --- what each rank runs -------------------------------------------------------------------------------------------


class Troubled(dcp.DefaultSavePlanner):
    """Fails where it is told to; `in_copy` is called in the middle of the copy."""

    def __init__(self, trouble: str, in_copy: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.trouble = trouble
        self.in_copy = in_copy
        self.seen: set[str] = set()

    def fail(self, what: str) -> None:
        if self.trouble == f"its planner fails to {what}":
            raise OSError(28, "told by a test") if what == "hand over" else ValueError("told by a test")

    def create_local_plan(self) -> Any:
        self.fail("plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.fail("make the global plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self.fail("finish the plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn in self.seen:  # the first time it is only looked at
            self.fail("hand over")
            self.in_copy()
        self.seen.add(write_item.index.fqn)
        return super().resolve_data(write_item)


class Unfinished(DaemonStorageWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        raise OSError(28, "told by a test")


def ready() -> None:
    dist.barrier()


def state(*, empty: bool = False) -> dict[str, Any]:
    """A tensor of each rank, and one that is the same on all."""
    rank = dist.get_rank()
    mine, common = torch.full((100_000,), float(rank + 1)), torch.arange(1000)
    return {f"rank{rank}": mine * 0 if empty else mine, "common": common * 0 if empty else common}


def failures(call: Callable[[], object]) -> list[tuple[int, str]]:
    """Why it failed, by rank, as this rank is told."""
    try:
        call()
    except CheckpointException as error:
        return [(rank, f"{type(why).__name__}: {why}") for rank, (why, _) in sorted(error.failures.items())]
    return []


def save_in_trouble(address: str, id: str, trouble: str) -> list[tuple[int, str]]:
    """One rank is in trouble: the coordinator where only that one does the work, else rank 1."""
    found, kind, planner = state(), DaemonStorageWriter, dcp.DefaultSavePlanner()
    if dist.get_rank() == (TROUBLES[trouble][0] if trouble in TROUBLES else 1):
        planner = Troubled(trouble)
        if trouble.startswith("kills "):
            planner = Troubled(trouble, lambda: os.kill(int(trouble.split()[1]), signal.SIGKILL))
        elif trouble == "it reaches no daemon":
            address, os.environ["CKPTD_CONNECT_TIMEOUT"] = "unix:/nowhere.sock", "0.5"
        elif trouble == "it has another idea of ids":
            id = "../step-1"
        elif trouble == "it has nothing to hand over":
            found["rank1"] = torch.empty(10, device="meta")
        elif trouble == "its writer fails to finish":
            kind = Unfinished
    if trouble == "it saves under another id" and dist.get_rank() == 1:
        id = "other/step-1"
    try:
        return failures(lambda: dcp.save(found, storage_writer=kind(id, address=address), planner=planner))
    finally:
        os.environ.pop("CKPTD_CONNECT_TIMEOUT", None)


def load_in_trouble(address: str, id: str, trouble: str) -> list[tuple[int, str]]:
    if dist.get_rank() == 1:
        if trouble == "it reaches no daemon":
            address, os.environ["CKPTD_CONNECT_TIMEOUT"] = "unix:/nowhere.sock", "0.5"
        else:
            id = id.replace("step-2", "step-1")
    try:
        return failures(lambda: dcp.load(state(empty=True), storage_reader=DaemonStorageReader(id, address=address)))
    finally:
        os.environ.pop("CKPTD_CONNECT_TIMEOUT", None)


def save_and_load(address: str, id: str) -> None:
    """On a fresh group, whatever was left in the old one."""
    group = dist.new_group()
    dcp.save(state(), storage_writer=DaemonStorageWriter(id, address=address), process_group=group)
    load(address, id, group)


def load(address: str, id: str, group: Any = None) -> None:
    found = state(empty=True)
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=address), process_group=group)
    assert all(torch.equal(found[key], value) for key, value in state().items())


def save_in_the_background(address: str, rounds: int) -> int:
    """Saves one after another in a group of their own, and all the time collectives in the default group; the rounds that ended."""
    group = dist.new_group()
    writer = DaemonStorageWriter(address=address)
    values = state()
    done = 0
    for step in range(rounds):
        values["step"] = step
        saving: Any = dcp.async_save(values, checkpoint_id=f"background/step-{step}", storage_writer=writer, process_group=group)
        running = torch.ones(1)
        while running:
            running.fill_(not saving.done())
            dist.all_reduce(running, dist.ReduceOp.MAX)
        saving.result()
        done += 1
    for step in (0, rounds - 1):
        found = {**state(empty=True), "step": -1}
        dcp.load(found, storage_reader=DaemonStorageReader(f"background/step-{step}", address=address))
        assert found["step"] == step
        assert all(torch.equal(found[key], value) for key, value in state().items())
    return done


def save_and_go_on_without_rank_1(address: str, id: str, rendezvous: str) -> str:
    """Rank 1 is killed in the middle of its copy; the others raise, meet in a new world, and save there."""
    group = dist.new_group(timeout=dt.timedelta(seconds=5))  # whoever does not wait for rank 1 itself is let down by who does
    planner = Troubled("", lambda: os.kill(os.getpid(), signal.SIGKILL)) if dist.get_rank() == 1 else dcp.DefaultSavePlanner()
    try:
        dcp.save(state(), storage_writer=DaemonStorageWriter(id, address=address), planner=planner, process_group=group)
    except (RuntimeError, CheckpointException):
        pass
    else:
        raise AssertionError("no error")
    rank = dist.get_rank() // 2
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    save_and_load(address, id)
    wait(id, address=address, timeout=60)
    return "saved"


FUNCTIONS = (ready, save_in_trouble, load_in_trouble, save_and_load, load, save_in_the_background, save_and_go_on_without_rank_1)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    serve({function.__name__: function for function in FUNCTIONS})
