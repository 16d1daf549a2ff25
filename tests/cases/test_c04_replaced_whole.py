"""C04: a checkpoint that is saved again is replaced whole or not at all, and nothing of the old one leaks into the new one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import Picture, appeared, assert_whole_or_absent, stock_state
from worlds import World, serve

ROWS, COLUMNS = 6, 2000
#: Objects of a checkpoint of three ranks: their shards, the manifest, `.metadata`.
OBJECTS = 5


class Replacing:
    """A daemon on a store that can be blocked, another one that has nothing but that store, and four ranks."""

    def __init__(self, home: Path, ranks: World) -> None:
        self.store = home / "store"
        self.control = home / "control"
        self.daemon = DaemonProcess(f"faulty://{self.store}", program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})
        self.other = DaemonProcess(str(self.store), memory="32MiB")
        self.ranks = ranks

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))

    def save(self, id: str, value: float, *, world: int = 3, trouble: str = "", durable: bool = True) -> list[Any]:
        """What each rank was told of a failure."""
        told = self.ranks.call("save", address=self.daemon.address, id=id, value=value, world=world, trouble=trouble)[:world]
        assert told == told[:1] * world
        if durable and told[0] == "":
            wait(id, address=self.daemon.address, timeout=60)
        return told

    def values(self, id: str) -> set[float]:
        """Of one checkpoint: from memory, from the store, and as stock reads it; each uniform."""
        return {loaded(id, self.daemon), loaded(id, self.other), stock(self.store / id)}


def uniform(found: dict[str, Any]) -> float:
    """What all elements are."""
    assert found["t"].shape == (ROWS, COLUMNS)
    values = found["t"].unique().tolist()
    assert len(values) == 1, values
    assert found["n"] == values[0]
    return float(values[0])


def loaded(id: str, daemon: DaemonProcess) -> float:
    found = {"t": torch.zeros(ROWS, COLUMNS), "n": -1.0}
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=daemon.address), no_dist=True)
    return uniform(found)


def stock(checkpoint: Path) -> float:
    return uniform(stock_state(checkpoint))


@pytest.fixture(scope="module")
def replacing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replacing]:
    with World(Path(__file__), 4) as ranks:
        made = Replacing(tmp_path_factory.mktemp("replacing"), ranks)
        with made.daemon, made.other:
            yield made


def test_a_rank_that_fails_leaves_all_of_the_old_one(replacing: Replacing) -> None:
    id = "fails/step-5"
    replacing.save(id, 1.0)
    before = Picture.of(replacing.store)
    for trouble in ("plan", "copy"):
        assert "[Errno 28]" in replacing.save(id, 2.0, trouble=trouble)[0]
        assert replacing.values(id) == {1.0}
    assert Picture.of(replacing.store) == before
    replacing.save(id, 3.0)
    assert replacing.values(id) == {3.0}


def test_a_daemon_killed_while_the_ranks_hand_over_leaves_all_of_the_old_one(replacing: Replacing) -> None:
    id = "killed/step-5"
    replacing.save(id, 1.0)
    before = Picture.of(replacing.store)
    assert replacing.save(id, 2.0, trouble=f"kill {replacing.daemon.pid}")[0]
    replacing.daemon.restart()
    assert replacing.values(id) == {1.0}
    assert Picture.of(replacing.store) == before
    replacing.save(id, 3.0)
    assert replacing.values(id) == {3.0}


@pytest.mark.parametrize("uploaded", [1, 4, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 2, 3, 5))])
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_daemon_killed_while_it_uploads_leaves_all_of_one(replacing: Replacing, uploaded: int, memory: str) -> None:
    id = f"uploads-{uploaded}-{memory}/step-5"
    replacing.save(id, 1.0)
    replacing.daemon.restart()  # counts objects anew
    names = set(appeared(replacing.store / id))
    inode = (replacing.store / id / ".metadata").stat().st_ino
    replacing.tell(hold_after=uploaded)
    replacing.save(id, 2.0, durable=False)

    def new() -> int:
        return len(set(appeared(replacing.store / id)) - names) + ((replacing.store / id / ".metadata").stat().st_ino != inode)

    until(lambda: new() >= uploaded)  # of shards that come at the same time more than one may slip through
    assert loaded(id, replacing.daemon) == 2.0  # it is accepted
    assert {loaded(id, replacing.other), stock(replacing.store / id)} == {2.0 if uploaded == OBJECTS else 1.0}
    replacing.daemon.kill()
    replacing.tell()
    if memory == "lost":
        shutil.rmtree(replacing.daemon.shm_dir)
    replacing.daemon.start()
    if memory == "kept":
        assert loaded(id, replacing.daemon) == 2.0
        wait(id, address=replacing.daemon.address, timeout=60)
        assert replacing.values(id) == {2.0}
    else:
        assert replacing.values(id) == {2.0 if uploaded == OBJECTS else 1.0}
        replacing.save(id, 3.0)
        assert replacing.values(id) == {3.0}


def test_of_more_ranks_nothing_is_left_once_fewer_have_replaced_them(replacing: Replacing) -> None:
    id = "fewer/step-5"
    replacing.save(id, 1.0, world=4)
    old = {path.name for path in (replacing.store / id).glob("*.distcp")}
    assert {name[:4] for name in old} == {"__0_", "__1_", "__2_", "__3_"}
    replacing.save(id, 2.0, world=2)
    assert replacing.values(id) == {2.0}
    for daemon in (replacing.daemon, replacing.other):
        done = daemon.cli("prune", "--run", "fewer", "--delete-grace", "0s")
        assert done.returncode == 0, done.stderr
    there = {path.name for path in (replacing.store / id).glob("*.distcp")}
    assert {name[:4] for name in there} == {"__0_", "__1_"}
    assert not there & old
    found = Picture.of(replacing.store)
    assert {key for key in found.files if key.startswith("fewer/")} == found.refers[id]
    assert replacing.values(id) == {2.0}
    assert replacing.daemon.list()[id]["world_size"] == 2


@pytest.mark.parametrize("saves", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_who_reads_while_it_is_replaced_sees_all_of_one(replacing: Replacing, saves: int) -> None:
    id = "read/step-5"
    replacing.save(id, 0.0)
    replacing.tell(delay_seconds=0.02)
    read: dict[str, list[float]] = {"memory": [], "store": [], "stock": []}

    def save_when_read(value: int) -> None:
        """However slow they are, each reader comes at least once in three saves."""
        until(lambda: all(3 * len(values) >= value - 1 for values in read.values()))
        replacing.save(id, float(value), world=2 + value % 3)

    def read_all() -> None:
        read["memory"].append(loaded(id, replacing.daemon))
        read["store"].append(loaded(id, replacing.other))
        read["stock"].append(stock(replacing.store / id))

    try:
        with ThreadPoolExecutor(1) as background:
            saving = background.submit(lambda: [save_when_read(value) for value in range(1, saves + 1)])
            while not saving.done():
                read_all()
            saving.result()
        read_all()
    finally:
        replacing.tell()
    assert replacing.values(id) == {float(saves)}
    for values in read.values():
        assert values == sorted(values)  # never back to an older one
        assert len(set(values)) > 1
    assert assert_whole_or_absent(replacing.store)[id]["n"] == float(saves)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- what each rank runs -------------------------------------------------------------------------------------------


class Failing(dcp.DefaultSavePlanner):
    """What befalls rank 1: `plan`, or in the middle of its copy `copy` or `kill PID`."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble
        self.seen: set[str] = set()

    def create_local_plan(self) -> Any:
        if self.trouble == "plan":
            raise OSError(28, "No space left on device")
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn in self.seen and self.trouble:  # the first time it is only looked at
            if self.trouble == "copy":
                raise OSError(28, "No space left on device")
            os.kill(int(self.trouble.split()[1]), signal.SIGKILL)
        self.seen.add(write_item.index.fqn)
        return super().resolve_data(write_item)


def save(address: str, id: str, value: float, world: int, trouble: str) -> str:
    """On the first `world` ranks; the first line of why it failed."""
    mesh, group = MESHES[world]
    if dist.get_rank() >= world:
        return ""
    tensor = distribute_tensor(torch.full((ROWS, COLUMNS), value), mesh, [Shard(0)], src_data_rank=None)
    planner = Failing(trouble) if trouble and dist.get_rank() == 1 else dcp.DefaultSavePlanner()
    writer = DaemonStorageWriter(id, address=address, overwrite=True)
    try:
        dcp.save({"t": tensor, "n": value}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as failed:
        return "; ".join(f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in sorted(failed.failures.items()))
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    MESHES = {}
    for size in (2, 3, 4):
        MESHES[size] = DeviceMesh("cpu", torch.arange(size)), dist.new_group(list(range(size)))
    serve({"save": save})
