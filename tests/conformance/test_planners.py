"""Planners, stagers and objects of a user's own, with one process: what DCP's documentation shows works through ckptd as with stock."""

from __future__ import annotations

import dataclasses
import enum
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckptd.errors import InvalidRequest
from ckptd_client import DaemonStorageReader, DaemonStorageWriter
from conformance.outcomes import assert_like, assert_same, outcome_of
from conformance.ways import Planner, State, Ways, load, no_planner, stocks


def state() -> State:
    return {"x": torch.arange(6.0).reshape(3, 2) / 3, "y": torch.arange(4.0), "n": 5}


def template() -> State:
    return {"x": torch.zeros(3, 2), "y": torch.zeros(4), "n": 0}


class Renaming(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class RenamingBack(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict({f"foo_{key}": value for key, value in state_dict.items()})
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class Halving(dcp.DefaultSavePlanner):
    """Stores half precision."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)


class Annotating(dcp.DefaultSavePlanner):
    """Puts data of its own into the metadata."""

    def create_local_plan(self) -> Any:
        return dataclasses.replace(super().create_local_plan(), planner_data={"of": "a rank"})

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=[plan.planner_data for plan in plans])


class Materialising(dcp.DefaultLoadPlanner):
    """Makes the targets up, and keeps them only when they are committed."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = tensor


class Finishing(dcp.DefaultLoadPlanner):
    """Changes what has arrived."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.add_(1)


class Narrowing(dcp.DefaultLoadPlanner):
    """Reads the first row only."""

    def create_local_plan(self) -> Any:
        def narrow(item: Any) -> Any:
            return dataclasses.replace(item, lengths=torch.Size([1, *item.lengths[1:]])) if item.type == LoadItemType.TENSOR else item

        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[narrow(item) for item in plan.items])


class Repeating(dcp.DefaultLoadPlanner):
    """Asks for everything twice."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=plan.items + plan.items)


def unflattened_save() -> Any:
    return dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def unflattened_load() -> Any:
    return dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


PLANNERS: dict[str, tuple[Planner, Planner]] = {
    "renaming": (Renaming, RenamingBack),
    "renaming_one_way": (Renaming, no_planner),
    "halving": (Halving, no_planner),
    "annotating": (Annotating, unflattened_load),
    "materialising": (no_planner, Materialising),
    "finishing": (no_planner, Finishing),
    "narrowing": (no_planner, Narrowing),
    "repeating": (no_planner, Repeating),
    "unflattened": (unflattened_save, unflattened_load),
    "unflattened_save": (unflattened_save, no_planner),
    "unflattened_load": (no_planner, unflattened_load),
    "partial": (no_planner, lambda: dcp.DefaultLoadPlanner(allow_partial_load=True)),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_of_ones_own_works_as_with_stock(ways_of: Callable[[str], Ways], name: str) -> None:
    saving, loading = PLANNERS[name]
    ways_of("zstd:1").assert_conforms(f"planner/{name}-1", state, template, save_planner=saving, load_planner=loading)


class Name(str):
    """Text of a class of one's own."""

    __slots__ = ()


class Named(enum.StrEnum):
    WEIGHT = "weight"


@pytest.mark.parametrize("key", [Name("x"), np.str_("x"), Named.WEIGHT, "x"], ids=["subclass", "numpy", "enum", "text"])
def test_keys_that_are_text_of_another_class_are_that_text(
    ways_of: Callable[[str], Ways], key: str, request: pytest.FixtureRequest
) -> None:
    def made() -> State:
        return {key: torch.ones(2), "n": 1}

    def blank() -> State:
        return {key: torch.zeros(2), "n": 0}

    ways, name = ways_of("zstd:1"), request.node.callspec.id
    ways.assert_conforms(f"text/{name}-1", made, blank)
    # Unflattened, stock writes the class into its metadata, where only its own reader, which runs everything, has a use for it.
    checkpoint_id = f"text-unflattened/{name}-1"
    assert not ways.save_stock(checkpoint_id, made, planner=unflattened_save).error
    assert not ways.save(checkpoint_id, made, planner=unflattened_save).error
    found = ways.loads(checkpoint_id, blank, planner=unflattened_load)
    stocks_own = found.pop("stock's with ours")
    assert stocks_own.error == ("" if type(key) is str else "refused")
    assert type(key) is str or (type(key).__name__ if name != "numpy" else "numpy") in stocks_own.said
    for way, outcome in found.items():
        assert_like(outcome, ways.load_stock(checkpoint_id, blank, planner=unflattened_load), way)
        assert_same(outcome.value, made(), way)


@pytest.mark.parametrize("key", [0, (1, 2), None, b"x"], ids=str)
def test_keys_that_are_no_text_are_refused_if_the_planner_leaves_them_so(ways_of: Callable[[str], Ways], key: Any) -> None:
    writer = DaemonStorageWriter("no-text/step-1", address=ways_of("zstd:1").pair.saving.address)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({key: torch.ones(2)}, storage_writer=writer, planner=unflattened_save())
    error = caught.value.failures[0][0]
    assert isinstance(error, InvalidRequest)
    assert f"the key {key!r} is of type {type(key).__name__}" in str(error)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized")
@pytest.mark.parametrize(("name", "keys"), [("all", None), ("one", "m.a"), ("branch", {"m"}), ("two", {"m.b", "o"})])
def test_a_checkpoint_loads_without_a_template(ways_of: Callable[[str], Ways], name: str, keys: Any) -> None:
    ways, checkpoint_id = ways_of("zstd:1"), f"keys/{name}-1"

    def made() -> State:
        return {"m": {"a": torch.ones(3, dtype=torch.bfloat16), "b": 5}, "o": {"a": [torch.zeros(2), {"c": 1}]}}

    ways.save_stock(checkpoint_id, made)
    ways.save(checkpoint_id, made)
    expected = outcome_of(lambda: _load_state_dict_from_keys(keys, checkpoint_id=ways.pair.store / stocks(checkpoint_id)))
    pair = ways.pair
    for daemon, found in ((pair.saving, checkpoint_id), (pair.other, checkpoint_id), (pair.other, stocks(checkpoint_id))):
        reader = DaemonStorageReader(found, address=daemon.address)
        assert_like(outcome_of(lambda reader=reader: _load_state_dict_from_keys(keys, storage_reader=reader)), expected, found)


class Counting:
    """Has a state, as a user's own class does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loads = 0

    def state_dict(self) -> State:
        return {"count": self.count, "weight": torch.full((3,), float(self.count)), "parts": [{"x": torch.ones(2) * self.count}]}

    def load_state_dict(self, state_dict: State) -> None:
        assert float(state_dict["weight"][0]) == float(state_dict["parts"][0]["x"][0]) == state_dict["count"]
        self.count = state_dict["count"]
        self.loads += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counting) and (self.count, self.loads) == (other.count, other.loads)

    def __hash__(self) -> int:
        return hash((self.count, self.loads))


def test_stateful_objects_get_their_state_once(ways_of: Callable[[str], Ways]) -> None:
    outcome = ways_of("zstd:1").assert_conforms(
        "stateful/step-1", lambda: {"app": Counting(5), "n": 1}, lambda: {"app": Counting(0), "n": 0}
    )
    assert (outcome.value["app"].count, outcome.value["app"].loads) == (5, 1)


def test_modules_and_optimizers_are_stateful(ways_of: Callable[[str], Ways]) -> None:
    def made(seed: int) -> State:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def parts(found: State) -> State:
        return {name: part.state_dict() for name, part in found.items()}

    ways = ways_of("zstd:1")
    assert not ways.save("modules/step-1", lambda: made(1)).error
    for way, outcome in ways.loads("modules/step-1", lambda: made(2)).items():
        assert not outcome.error, outcome.said
        assert_same(parts(outcome.value), parts(made(1)), way)


STATES: list[State] = [
    {"x": torch.ones(3), "n": 1},
    {"x": torch.ones(3) * 2, "n": 2},
    {"x": torch.ones(3) * 3, "n": 3, "new": torch.ones(2)},
    {"x": torch.ones(3) * 4, "new": torch.ones(2)},
    {"x": torch.ones(4) * 5, "new": torch.ones(2)},
    {"x": torch.ones(4, dtype=torch.bfloat16) * 6, "new": torch.ones(2)},
    {"x": "an object now", "new": torch.ones(2)},
    {"x": torch.ones(4) * 8, "new": {"deep": [torch.ones(1)]}},
    {"x": torch.ones(4) * 8, "new": {"deep": [torch.ones(1)]}},
]


def test_dcps_plan_cache_follows_a_state_that_changes(ways_of: Callable[[str], Ways]) -> None:
    # The cache is one per planner class: each writer needs a class of its own, as it does with two writers of stock's.
    ours, stocks = (type(name, (dcp.DefaultSavePlanner,), {}) for name in ("Ours", "Stocks"))
    ways = ways_of("zstd:1")
    for step, made in enumerate(STATES):
        checkpoint_id = f"cached/step-{step}"
        assert not ways.save_stock(checkpoint_id, lambda made=made: dict(made), planner=lambda: stocks(enable_plan_caching=True)).error
        assert not ways.save(checkpoint_id, lambda made=made: dict(made), planner=lambda: ours(enable_plan_caching=True)).error
        for way, found in ways.loads(checkpoint_id, lambda made=made: emptied(made)).items():
            assert_like(found, ways.load_stock(checkpoint_id, lambda made=made: emptied(made)), f"{step} {way}")
            assert_same(found.value, made, f"{step} {way}")


def emptied(value: Any) -> Any:
    """The same structure and dtypes, other values."""
    if isinstance(value, dict):
        return {key: emptied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [emptied(part) for part in value]
    return torch.full_like(value, -1) if isinstance(value, torch.Tensor) else None


STAGERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "plain": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "in_the_background": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "shared_memory": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "blocking": BlockingAsyncStager,
}


@pytest.mark.parametrize("name", STAGERS)
def test_async_saves_keep_the_values_at_call_time_with_every_stager(ways_of: Callable[[str], Ways], name: str) -> None:
    pair, weight, stager = ways_of("zstd:1").pair, torch.zeros(1000), STAGERS[name]()
    for step in range(3):
        weight.fill_(step)
        writer = DaemonStorageWriter(f"async-{name}/step-{step}", address=pair.saving.address)
        saving = dcp.async_save({"w": weight, "step": step, "o": {"a": [1, 2]}}, storage_writer=writer, async_stager=stager)
        if not hasattr(saving, "result"):
            saving.staging_completion.result()
            saving = saving.upload_completion
        weight.fill_(-1)
        saving.result()
    if stager is not None:
        stager.close()
    for step in range(3):
        found = pair.load_from_memory(f"async-{name}/step-{step}", {"w": torch.zeros(1000), "step": None, "o": {"a": None}})
        assert_same(found, {"w": torch.full((1000,), float(step)), "step": step, "o": {"a": [1, 2]}}, name)


def test_a_torch_save_file_becomes_a_checkpoint_through_the_daemon(ways_of: Callable[[str], Ways]) -> None:
    ways = ways_of("zstd:1")
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "whole.pt"
        torch.save(state(), path)
        assert not ways.save("converted/step-1", lambda: torch.load(path, weights_only=True)).error
    for way, found in ways.loads("converted/step-1", template).items():
        assert_same(found.value, state(), way)
    assert_same(load(template(), DaemonStorageReader("converted/latest", address=ways.pair.saving.address)), state(), "latest")
