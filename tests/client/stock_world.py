"""What every rank of test_stock.py's world runs; see `worlds.World`. Smaller worlds are subgroups of this one."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckptd_client import DaemonStorageReader
from worlds import serve

RANK = int(os.environ["RANK"])
SHAPES = [(6,), (1, 5), (5, 1), (3, 2), (7, 3), (1,), (0, 4), (33, 1025)]
_worlds: dict[int, tuple[Any, DeviceMesh]] = {}


def world(size: int) -> tuple[Any, DeviceMesh]:
    """The first `size` ranks, as a group and as a mesh; made once."""
    if size not in _worlds:
        _worlds[size] = dist.new_group(list(range(size))), DeviceMesh("cpu", list(range(size)))
    return _worlds[size]


def full(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(salt)).to(torch.int32)


def state_of(mesh: DeviceMesh, salt: int, as_: Placement | None = None, *, empty: bool = False) -> dict[str, Any]:
    """Every shape in every placement; `as_` puts all of them into one placement instead, `empty` takes the values away."""
    state: dict[str, Any] = {}
    for number, shape in enumerate(SHAPES):
        for saved_as in (Shard(0), Shard(1), Replicate()):
            if isinstance(saved_as, Shard) and saved_as.dim >= len(shape):
                continue
            place = saved_as if as_ is None or (isinstance(as_, Shard) and as_.dim >= len(shape)) else as_
            value = full(shape, salt * 100 + number)
            state[f"{saved_as}.{shape}"] = distribute_tensor(torch.zeros_like(value) if empty else value, mesh, [place], src_data_rank=None)
    state["plain"] = torch.zeros(5) if empty else torch.arange(5.0) + salt
    state["object"] = None if empty else f"salt {salt}"
    return state


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, DTensor):
            assert torch.equal(found[key].to_local(), value.to_local()), (RANK, key)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), (RANK, key)
        else:
            assert found[key] == value, (RANK, key)


def save(directory: str, size: int, salt: int, compressed: bool = False) -> None:
    """Stock saves at a world of `size`."""
    group, mesh = world(size)
    if size > RANK:
        writer = dcp.FileSystemWriter(directory, _extensions=[ZStandard()] if compressed else None)
        dcp.save(state_of(mesh, salt), storage_writer=writer, process_group=group)
    dist.barrier()


def load(address: str, checkpoint_id: str, size: int, salt: int) -> int:
    """A world of `size` loads it through the daemon, in every placement; the number of loads."""
    group, mesh = world(size)
    if size <= RANK:
        return 0
    placements = (None, Shard(0), Shard(1), Replicate())
    for as_ in placements:
        state = state_of(mesh, salt, as_, empty=True)
        dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=address), process_group=group)
        assert_equal(state, state_of(mesh, salt, as_))
    return len(placements)


def resolve_apart(address: str, directory: str, checkpoint_id: str) -> list[str]:
    """Rank 0 resolves, DCP saves again, the others resolve: what each rank hears."""

    class Reader(DaemonStorageReader):
        def read_metadata(self) -> Any:
            if RANK == 0:
                found = super().read_metadata()
            dist.barrier()
            if RANK == 1:
                dcp.save({"x": torch.ones(1000)}, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
            dist.barrier()
            return found if RANK == 0 else super().read_metadata()

    try:
        dcp.load({"x": torch.zeros(1000)}, storage_reader=Reader(checkpoint_id, address=address))
    except CheckpointException as error:
        return [f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values()]
    return []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve({function.__name__: function for function in (save, load, resolve_apart)})
