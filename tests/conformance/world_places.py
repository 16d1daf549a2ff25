"""What the functions of the conformance world share: groups, meshes, values, and the ways of one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from conformance.outcomes import Outcome, assert_like, outcome_of
from conformance.ways import Planner, no_planner, stocks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
#: What a target holds before it is loaded.
UNFILLED = -7
State = dict[str, Any]


@cache
def group(size: int) -> Any:
    """The first `size` ranks. Every rank has to ask for it at the same time."""
    return dist.new_group(list(range(size)))


@cache
def mesh(shape: tuple[int, ...], *, backwards: bool = False) -> DeviceMesh:
    """A mesh of the first ranks. Every rank has to ask for it at the same time."""
    ranks = torch.arange(torch.Size(shape).numel())
    names = ("replicas", "shards")[-len(shape) :]
    return DeviceMesh("cpu", (ranks.flip(0) if backwards else ranks).reshape(shape), mesh_dim_names=names)


def full(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(salt)).to(torch.int32)


def placed(on: DeviceMesh, value: torch.Tensor, *placements: Placement) -> DTensor:
    """This rank's part of a value that every rank has. Of a placement beyond a shape's dimensions the nearest that fits is taken."""
    beyond: Placement = Shard(0) if value.dim() else Replicate()
    fitting = [beyond if isinstance(place, Shard) and place.dim >= value.dim() else place for place in placements]
    return distribute_tensor(value, on, fitting, src_data_rank=None)


def unfilled(value: Any) -> Any:
    """The same structure, placed the same, with nothing of the values."""
    if isinstance(value, dict):
        return {key: unfilled(part) for key, part in value.items()}
    if isinstance(value, list):
        return [unfilled(part) for part in value]
    if isinstance(value, DTensor):
        return placed(value.device_mesh, torch.full(value.shape, UNFILLED, dtype=value.dtype), *value.placements)
    return torch.full_like(value, UNFILLED) if isinstance(value, torch.Tensor) else None


class Place:
    """Where a test's checkpoints are: a store with two daemons, which is a directory, or an S3 URL with `options` for stock."""

    def __init__(self, own: str, other: str, store: str, options: dict[str, Any] | None = None) -> None:
        self.own, self.other, self.store, self.options = own, other, store, options

    def reader(self, checkpoint_id: str) -> Any:
        """Stock's."""
        where = f"{self.store}/{checkpoint_id}"
        return dcp.FileSystemReader(where) if self.options is None else FsspecReader(where, **self.options)

    def writer(self, checkpoint_id: str) -> Any:
        """Stock's."""
        where = f"{self.store}/{checkpoint_id}"
        return dcp.FileSystemWriter(where) if self.options is None else FsspecWriter(where, **self.options)

    def save(
        self,
        checkpoint_id: str,
        state: Callable[[], State],
        *,
        planners: tuple[Planner, Planner] = (no_planner, no_planner),
        **options: Any,
    ) -> str:
        """By stock and through ckptd, which come to the same: the kind of error, or "". Without one it is durable then."""
        writers = (self.writer(stocks(checkpoint_id)), DaemonStorageWriter(checkpoint_id, address=self.own))
        stock, ours = (
            outcome_of(lambda writer=writer, planner=planner: dcp.save(state(), storage_writer=writer, planner=planner(), **options))
            for writer, planner in zip(writers, planners, strict=True)
        )
        assert ours.error == stock.error, (ours.said, stock.said)
        if not ours.error:
            wait(checkpoint_id, address=self.own, timeout=60)
        return ours.error

    def loads(
        self, checkpoint_id: str, template: Callable[[], State], *, planner: Planner = no_planner, **options: Any
    ) -> dict[str, Outcome]:
        """The checkpoint by every reader; the first is the measure: what stock reads of what stock wrote."""
        readers = {
            "stock's with stock": self.reader(stocks(checkpoint_id)),
            "stock's with ours": DaemonStorageReader(stocks(checkpoint_id), address=self.other),
            "ours from memory": DaemonStorageReader(checkpoint_id, address=self.own),
            "ours from the store": DaemonStorageReader(checkpoint_id, address=self.other),
            "ours with stock": self.reader(checkpoint_id),
        }

        def load(reader: Any) -> State:
            state = template()
            dcp.load(state, storage_reader=reader, planner=planner(), **options)
            return state

        return {way: outcome_of(lambda reader=reader: load(reader)) for way, reader in readers.items()}

    def assert_conforms(self, checkpoint_id: str, template: Callable[[], State], **options: Any) -> Outcome:
        """Every way comes to the same as stock's; returns what."""
        found = self.loads(checkpoint_id, template, **options)
        expected = found.pop("stock's with stock")
        for way, outcome in found.items():
            assert_like(outcome, expected, f"rank {RANK}, {checkpoint_id}, {way}")
        return expected
