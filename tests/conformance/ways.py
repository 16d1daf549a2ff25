"""The ways from a state to a checkpoint and back in one process: stock's own, which is the measure, and ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd_client import DaemonStorageReader, DaemonStorageWriter
from client.pairs import Pair
from conformance.outcomes import Outcome, assert_like, outcome_of

State = dict[str, Any]
Planner = Callable[[], Any]

CODECS = ["none", "zstd:1", "zstd:3"]
#: The last one differs from the one before it in nothing but its level.
QUICK_AND_SLOW = [*CODECS[:2], pytest.param(CODECS[2], marks=pytest.mark.slow)]


def no_planner() -> None:
    """DCP's default."""


def stocks(checkpoint_id: str) -> str:
    """Where in the store stock writes the same."""
    return f"stock-{checkpoint_id}"


@dataclasses.dataclass(frozen=True)
class Ways:
    """All ways over one directory: two daemons, and stock itself."""

    pair: Pair

    def save_stock(self, checkpoint_id: str, state: Callable[[], State], *, planner: Planner = no_planner) -> Outcome:
        directory = self.pair.store / stocks(checkpoint_id)
        return outcome_of(lambda: dcp.save(state(), checkpoint_id=directory, planner=planner()))

    def load_stock(self, checkpoint_id: str, template: Callable[[], State], *, planner: Planner = no_planner) -> Outcome:
        """What stock reads of what stock wrote."""
        directory = self.pair.store / stocks(checkpoint_id)
        return outcome_of(lambda: load(template(), dcp.FileSystemReader(directory), planner))

    def save(self, checkpoint_id: str, state: Callable[[], State], *, planner: Planner = no_planner) -> Outcome:
        """Through ckptd; returns when it is durable."""
        writer = DaemonStorageWriter(checkpoint_id, address=self.pair.saving.address)
        outcome = outcome_of(lambda: dcp.save(state(), storage_writer=writer, planner=planner()))
        if not outcome.error:
            self.pair.wait(checkpoint_id)
        return outcome

    def loads(self, checkpoint_id: str, template: Callable[[], State], *, planner: Planner = no_planner) -> dict[str, Outcome]:
        """What each way of loading a durable checkpoint comes to; with stock's own, if that has been saved as well, by our reader."""
        readers: dict[str, Any] = {
            "ours from memory": DaemonStorageReader(checkpoint_id, address=self.pair.saving.address),
            "ours from the store": DaemonStorageReader(checkpoint_id, address=self.pair.other.address),
            "ours with stock": dcp.FileSystemReader(self.pair.store / checkpoint_id),
        }
        if (self.pair.store / stocks(checkpoint_id)).exists():
            readers["stock's with ours"] = DaemonStorageReader(stocks(checkpoint_id), address=self.pair.other.address)
        return {way: outcome_of(lambda reader=reader: load(template(), reader, planner)) for way, reader in readers.items()}

    def assert_conforms(
        self,
        checkpoint_id: str,
        state: Callable[[], State],
        template: Callable[[], State],
        *,
        save_planner: Planner = no_planner,
        load_planner: Planner = no_planner,
    ) -> Outcome:
        """Saved by both, every way back comes to the same as stock's; returns what."""
        stock = self.save_stock(checkpoint_id, state, planner=save_planner)
        ours = self.save(checkpoint_id, state, planner=save_planner)
        assert ours.error == stock.error, (ours.said, stock.said)
        if stock.error:
            return stock
        expected = self.load_stock(checkpoint_id, template, planner=load_planner)
        for way, found in self.loads(checkpoint_id, template, planner=load_planner).items():
            assert_like(found, expected, f"{checkpoint_id} {way}")
        return expected


def load(template: State, reader: Any, planner: Planner = no_planner) -> State:
    """The template, filled."""
    dcp.load(template, storage_reader=reader, planner=planner())
    return template


def as_torch_save(directory: Path, to: Path) -> Any:
    """The whole checkpoint, without a template, as DCP's converter makes it."""
    dcp_to_torch_save(directory, to)
    return torch.load(to, weights_only=False)
