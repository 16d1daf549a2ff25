"""What every rank of test_world.py runs: ``world_program.py OWN_DAEMON OTHER_DAEMON STORE SCENARIO``.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment, as from torchrun.
Smaller worlds are subgroups of this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckptd.errors import InvalidRequest, NotFound, Unavailable
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait

SHAPES = [(6,), (1, 5), (5, 1), (3, 2), (7, 3), (128,), (1,), (0, 4), (33, 1025)]
OWN, OTHER, STORE, SCENARIO = sys.argv[1:]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Worlds:
    """The first 1, 2, … ranks, each as a group and as a mesh."""

    def __init__(self, sizes: list[int]) -> None:
        self.groups = {size: dist.new_group(list(range(size))) for size in sizes}
        self.meshes = {size: DeviceMesh("cpu", list(range(size))) for size in sizes}


def full(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(salt)).to(torch.int32)


def placed(mesh: DeviceMesh, value: torch.Tensor, placements: list[Placement]) -> DTensor:
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def state_of(mesh: DeviceMesh, salt: int, *, as_: Placement | None = None, empty: bool = False) -> dict[str, Any]:
    """Every shape in every placement; `as_` puts all of them into one placement instead, `empty` takes the values away."""
    state: dict[str, Any] = {}
    for number, shape in enumerate(SHAPES):
        for saved_as in (Shard(0), Shard(1), Replicate()):
            if isinstance(saved_as, Shard) and saved_as.dim >= len(shape):
                continue
            place = saved_as if as_ is None or (isinstance(as_, Shard) and as_.dim >= len(shape)) else as_
            value = full(shape, salt * 100 + number)
            state[f"{saved_as}.{shape}"] = placed(mesh, torch.zeros_like(value) if empty else value, [place])
    state["plain"] = torch.zeros(5) if empty else torch.arange(5.0) + salt
    state["object"] = None if empty else f"salt {salt}"
    return state


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, DTensor):
            assert torch.equal(found[key].to_local(), value.to_local()), (RANK, key, found[key].to_local(), value.to_local())
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), (RANK, key)
        else:
            assert found[key] == value, (RANK, key)


def save(checkpoint_id: str, state: dict[str, Any], *, group: Any = None, address: str = OWN, **options: Any) -> None:
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=DaemonStorageWriter(address=address), process_group=group, **options)


def load(checkpoint_id: str, state: dict[str, Any], *, group: Any = None, address: str = OWN) -> None:
    dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=address), process_group=group)


def failures(call: Callable[[], None]) -> dict[int, BaseException]:
    try:
        call()
    except CheckpointException as error:
        return {rank: failure for rank, (failure, _) in error.failures.items()}
    raise AssertionError("no error")


def reshard(saving: list[int], loading: list[int]) -> None:
    """Every world and placement into every other, from memory, from the store, and with stock DCP."""
    worlds = Worlds(sorted({*saving, *loading}))
    for size in saving:
        if size > RANK:
            save(f"{SCENARIO}-w{size}/step-1", state_of(worlds.meshes[size], size), group=worlds.groups[size])
    for size in saving:
        if size > RANK:
            wait(f"{SCENARIO}-w{size}/step-1", address=OWN, timeout=60)
    dist.barrier()
    for size in saving:
        for other in loading:
            if other <= RANK:
                continue
            mesh = worlds.meshes[other]
            for target in (None, Shard(0), Shard(1), Replicate()):
                for address in (OWN, OTHER) if target is None else (OWN,):
                    state = state_of(mesh, size, as_=target, empty=True)
                    load(f"{SCENARIO}-w{size}/step-1", state, group=worlds.groups[other], address=address)
                    assert_equal(state, state_of(mesh, size, as_=target))
                state = state_of(mesh, size, as_=target, empty=True)
                stock = dcp.FileSystemReader(f"{STORE}/{SCENARIO}-w{size}/step-1")
                dcp.load(state, storage_reader=stock, process_group=worlds.groups[other])
                assert_equal(state, state_of(mesh, size, as_=target))
    dist.barrier()


def meshes_of_two_dimensions() -> None:
    two = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    line = DeviceMesh("cpu", list(range(4)))
    values = {f"{shape}": full(shape, 7) for shape in SHAPES if len(shape) == 2}
    save("mesh/step-1", {key: placed(two, value, [Shard(0), Shard(1)]) for key, value in values.items()})
    save("mesh/step-2", {key: placed(two, value, [Replicate(), Shard(0)]) for key, value in values.items()})
    for step in (1, 2):
        for mesh, placements in ((line, [Shard(0)]), (line, [Shard(1)]), (two, [Shard(1), Shard(0)]), (two, [Shard(0), Replicate()])):
            state = {key: placed(mesh, torch.zeros_like(value), placements) for key, value in values.items()}
            load(f"mesh/step-{step}", state)
            assert_equal(state, {key: placed(mesh, value, placements) for key, value in values.items()})


def a_rank_without_anything() -> None:
    save("quiet/step-1", {} if RANK in (1, 3) else {f"rank{RANK}": torch.full((4,), float(RANK))})
    state = {"rank0": torch.zeros(4), "rank2": torch.zeros(4)}
    load("quiet/step-1", state)
    assert_equal(state, {"rank0": torch.zeros(4), "rank2": torch.full((4,), 2.0)})


def one_rank_fails() -> None:
    good = {f"rank{RANK}": torch.full((1000,), float(RANK))}
    found = failures(lambda: save("failing/step-1", {"hollow": torch.empty(3, device="meta")} if RANK == 2 else good))
    assert found.keys() == {2}, found
    assert isinstance(found[2], InvalidRequest), found
    assert "'hollow'" in str(found[2]), found

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if RANK == 1:
                raise OSError(28, "No space left on device")
            return super().resolve_data(write_item)

    found = failures(lambda: save("failing/step-1", good, planner=Planner()))
    assert found.keys() == {1}, found
    assert isinstance(found[1], OSError), found
    assert [type(error) for error in failures(lambda: load("failing/latest", dict(good))).values()] == [NotFound] * WORLD
    save("failing/step-1", good)
    state = {f"rank{RANK}": torch.zeros(1000)}
    load("failing/step-1", state)
    assert_equal(state, good)


def no_daemon() -> None:
    os.environ["CKPTD_CONNECT_TIMEOUT"] = "0.5"
    address = "unix:/nowhere/ckptd.sock"
    for call in (lambda: save("step-1", {"x": 1}, address=address), lambda: load("step-1", {"x": 1}, address=address)):
        found = failures(call)
        assert found.keys() == set(range(WORLD)), found
        assert all(isinstance(error, Unavailable) and "ckptd serve" in str(error) for error in found.values()), found
    del os.environ["CKPTD_CONNECT_TIMEOUT"]


def alone_in_a_world() -> None:
    if RANK == 0:
        save("alone/step-1", {"x": torch.ones(2)}, no_dist=True)
    else:
        found = failures(lambda: save("alone/step-1", {"x": torch.ones(2)}, no_dist=True))
        assert isinstance(found[0], InvalidRequest), found
        assert "process_group" in str(found[0]), found
    dist.barrier()


def saves_in_the_background() -> None:
    """C21: with a group of its own a background save and the trainer's collectives do not meet."""
    group = dist.new_group()
    writer = DaemonStorageWriter(address=OWN)
    pending = None
    weight = torch.zeros(1000)
    for step in range(6):
        weight.fill_(step * 10 + RANK)
        if pending is not None:
            pending.result()
        pending = dcp.async_save(
            {f"rank{RANK}": weight, "step": step}, checkpoint_id=f"background/step-{step}", storage_writer=writer, process_group=group
        )
        for _ in range(20):
            dist.all_reduce(torch.ones(1))
    assert pending is not None
    pending.result()
    dist.barrier()
    for step in range(6):
        state = {f"rank{RANK}": torch.zeros(1000), "step": None}
        load(f"background/step-{step}", state)
        assert_equal(state, {f"rank{RANK}": torch.full((1000,), float(step * 10 + RANK)), "step": step})


def save_in_a_process_of_its_own() -> None:
    weight = torch.full((1000,), 5.0)
    future = dcp.async_save(
        {f"rank{RANK}": weight},
        checkpoint_id="process/step-1",
        storage_writer=DaemonStorageWriter(address=OWN),
        async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
    )
    weight.fill_(-1)
    future.result()
    dist.barrier()
    state = {f"rank{RANK}": torch.zeros(1000)}
    load("process/step-1", state)
    assert_equal(state, {f"rank{RANK}": torch.full((1000,), 5.0)})


def main() -> None:
    dist.init_process_group("gloo")
    try:
        if SCENARIO == "all":
            reshard([1, 2, 3, 4], [1, 2, 3, 4])
            meshes_of_two_dimensions()
            a_rank_without_anything()
            one_rank_fails()
            no_daemon()
            alone_in_a_world()
            saves_in_the_background()
        elif SCENARIO == "eight":
            reshard([8], [1, 3, 8])
            reshard([3, 4], [5, 8])
        elif SCENARIO == "process":
            save_in_a_process_of_its_own()
    finally:
        dist.destroy_process_group()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
