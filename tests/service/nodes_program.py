"""What every rank of test_nodes.py runs; each call says which daemon each rank talks to."""

from __future__ import annotations

import datetime as dt
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from worlds import serve

RANK = int(os.environ["RANK"])
SHAPE = (1536, 8192)  # 48 MiB of int32


def whole(value: int) -> torch.Tensor:
    return (torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32) + value).reshape(SHAPE)


def group_of(world: int) -> Any:
    """The first `world` ranks; every rank has to ask."""
    if world not in _groups:
        _groups[world] = (dist.new_group(list(range(world))), DeviceMesh("cpu", list(range(world))))
    return _groups[world]


_groups: dict[int, Any] = {}


def save(addresses: list[str], id: str, value: int, dim: int = 0) -> float:
    """How long the save took on this rank, in seconds."""
    world = len(addresses)
    group, mesh = group_of(world)
    if world <= RANK:
        return 0.0
    state = {"w": distribute_tensor(whole(value), mesh, [Shard(dim)], src_data_rank=None), "value": value}
    began = time.monotonic()
    dcp.save(state, storage_writer=DaemonStorageWriter(id, address=addresses[RANK]), process_group=group)
    return time.monotonic() - began


def load(addresses: list[str], id: str, dim: int = 0) -> int:
    """The value that was loaded, after comparing this rank's shard bit by bit."""
    world = len(addresses)
    group, mesh = group_of(world)
    if world <= RANK:
        return -1
    state = {"w": distribute_tensor(torch.zeros(SHAPE, dtype=torch.int32), mesh, [Shard(dim)], src_data_rank=None), "value": -1}
    dcp.load(state, storage_reader=DaemonStorageReader(id, address=addresses[RANK]), process_group=group)
    expected = distribute_tensor(whole(state["value"]), mesh, [Shard(dim)], src_data_rank=None)
    assert torch.equal(state["w"].to_local(), expected.to_local())
    return int(state["value"])


def fails(addresses: list[str], id: str, value: int) -> tuple[float, str]:
    """How long a save took to fail on this rank, in seconds, and why."""
    began = time.monotonic()
    if len(addresses) <= RANK:
        group_of(len(addresses))
        return 0.0, ""
    try:
        save(addresses, id, value)
    except CheckpointException as failed:
        return time.monotonic() - began, "; ".join(str(why[0]) for why in failed.failures.values())
    raise AssertionError("it did not fail")


def save_beside_collectives(addresses: list[str], id: str, value: int) -> float:
    """A save, and collectives of those who save right after it in a group that waits for 5 s at most."""
    strict = dist.new_group(list(range(len(addresses))), timeout=dt.timedelta(seconds=5))
    took = save(addresses, id, value)
    for _ in range(3 if len(addresses) > RANK else 0):
        dist.all_reduce(torch.ones(1), group=strict)
    return took


def until_durable(addresses: list[str], id: str) -> None:
    if len(addresses) > RANK:
        wait(id, address=addresses[RANK], timeout=90)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    serve({"save": save, "load": load, "fails": fails, "save_beside_collectives": save_beside_collectives, "until_durable": until_durable})
