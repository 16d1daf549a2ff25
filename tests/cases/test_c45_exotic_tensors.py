"""C45: bytes in are bytes out for every dtype and for a tensor of one's own class; nothing of a checkpoint runs that was not allowed.

Objects that are not tensors are another matter: DCP's planner unpickles them in full.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._python_dispatch import return_and_correct_aliasing

from ckptd.errors import InvalidRequest
from ckptd_client import DaemonStorageWriter
from client.pairs import Pair
from conformance.states import DTYPES
from daemons import DaemonProcess

aten = torch.ops.aten


@pytest.fixture(scope="module", params=["none", "zstd:1"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store), "--codec", request.param) as saving, DaemonProcess(str(store), memory="64MiB") as other:
        yield Pair(store, saving, other)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of a contiguous tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_of_every_dtype_comes_back(pair: Pair, dtype: torch.dtype) -> None:
    if dtype.itemsize == 1:
        patterns = torch.arange(2 if dtype is torch.bool else 256, dtype=torch.uint8)
    elif dtype.itemsize == 2:
        patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    else:
        patterns = torch.randint(0, 256, (4096 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    value = patterns.clone().view(dtype)
    checkpoint_id = f"bits/{str(dtype).removeprefix('torch.')}-1"
    pair.save(checkpoint_id, {"x": value})
    pair.wait(checkpoint_id)
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        target = patterns.clone().zero_().view(dtype)
        load(checkpoint_id, {"x": target})
        assert torch.equal(raw(target), patterns), load


def test_payloads_of_nan_and_negative_zero_survive(pair: Pair) -> None:
    words = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0, 0x00000001, 0xFF800000 - 2**32], dtype=torch.int64).to(torch.int32)
    state = {"f32": words.view(torch.float32), "bf16": words.view(torch.bfloat16), "f64": words[:6].clone().view(torch.float64)}
    state |= {"complex": words[:6].clone().view(torch.complex64), "parameter": torch.nn.Parameter(words.view(torch.float32))}
    pair.save("nan/step-1", state)
    pair.wait("nan/step-1")
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        targets = {key: torch.nn.Parameter(torch.zeros_like(value)) for key, value in state.items()}
        load("nan/step-1", targets)
        for key, value in state.items():
            assert torch.equal(raw(targets[key]), raw(value)), key


class Packed(torch.Tensor):
    """A quantised weight as libraries make them: two inner tensors and a flag behind one face."""

    codes: torch.Tensor
    scales: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
        self.codes, self.scales, self.signed = codes, scales, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[bool]]:
        return ["codes", "scales"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, attributes: Any, outer_size: Any, outer_stride: Any) -> Any:
        return cls(inner["codes"], inner["scales"], attributes[0])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed({self.codes}, {self.scales}, {self.signed})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packed = args[0]
        if func is aten.is_pinned.default:
            return False
        if func is aten.copy_.default:
            packed.codes.copy_(args[1].codes)
            packed.scales.copy_(args[1].scales)
            packed.signed = args[1].signed
            return packed
        if func is aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(packed.codes, packed.scales, packed.signed))
        if func in (aten.clone.default, aten._to_copy.default):
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(packed.codes.clone(), packed.scales.clone(), packed.signed))
        raise NotImplementedError(func)


def packed() -> Packed:
    return Packed(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor([0.5, float("nan")]), True)


def unpacked() -> Packed:
    return Packed(torch.zeros(2, 3, dtype=torch.int8), torch.zeros(2), False)


def failure_of(call: Any, *arguments: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call(*arguments)
    error: BaseException = caught.value.failures[0][0]
    return error


@pytest.mark.parametrize(
    "wrap", [lambda value: value, lambda value: torch.nn.Parameter(value, requires_grad=False)], ids=["bare", "parameter"]
)
def test_a_class_with_two_inner_tensors_and_a_flag_comes_back_whole_once_it_is_allowed(
    pair: Pair, wrap: Any, request: pytest.FixtureRequest
) -> None:
    checkpoint_id = f"packed/{request.node.callspec.id.split('-')[-1]}-1"
    pair.save(checkpoint_id, {"x": wrap(packed())})
    pair.wait(checkpoint_id)
    for load in (pair.load_from_memory, pair.load_from_store):
        error = failure_of(load, checkpoint_id, {"x": wrap(unpacked())})
        assert isinstance(error, InvalidRequest), error
        assert all(word in str(error) for word in ("'x'", "Packed", "add_safe_globals")), error
        with torch.serialization.safe_globals([Packed]):
            found = load(checkpoint_id, {"x": wrap(unpacked())})["x"]
        assert isinstance(found, Packed)
        assert torch.equal(found.codes, packed().codes)
        assert torch.equal(raw(found.scales), raw(packed().scales))
        assert found.signed
    with torch.serialization.safe_globals([Packed]):
        found = pair.load_with_stock(checkpoint_id, {"x": wrap(unpacked())})["x"]
    assert torch.equal(found.codes, packed().codes)


class Hostile(torch.Tensor):
    """Makes a directory where it is unpickled."""

    path = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return os.mkdir, (type(self).path,)


class HostileNote:
    """The same in the metadata."""

    path = ""

    def __reduce__(self) -> Any:
        return os.mkdir, (type(self).path,)


def test_a_hostile_tensor_is_refused_by_name_and_does_nothing(pair: Pair, tmp_path: Path) -> None:
    Hostile.path = str(tmp_path / "made")
    pair.save("hostile/step-1", {"x": torch.ones(3).as_subclass(Hostile), "good": torch.ones(2)})
    pair.wait("hostile/step-1")
    stored = b"".join(path.read_bytes() for path in (pair.store / "hostile" / "step-1").glob("*.distcp"))
    assert b"mkdir" in stored or pair.saving.arguments[-1] != "none"
    for load in (pair.load_from_memory, pair.load_from_store):
        error = failure_of(load, "hostile/step-1", {"x": torch.zeros(3)})
        assert isinstance(error, InvalidRequest), error
        assert "'x'" in str(error)
        assert "mkdir" in str(error)
    for daemon in (pair.saving, pair.other):
        for command in (("show", "hostile/step-1", "--json"), ("list",)):
            assert daemon.cli(*command).returncode == 0
    assert list(tmp_path.iterdir()) == []
    # The rest of it is not lost.
    assert torch.equal(pair.load_from_store("hostile/step-1", {"good": torch.zeros(2)})["good"], torch.ones(2))
    # And it would have: this is what is kept from happening.
    pickle.loads(pickle.dumps(torch.ones(3).as_subclass(Hostile)))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_hostile_metadata_is_refused_by_name_and_does_nothing(pair: Pair, tmp_path: Path) -> None:
    HostileNote.path = str(tmp_path / "made")

    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"note": HostileNote()}  # type: ignore[dict-item]
            return plans, metadata

    dcp.save({"x": torch.ones(3)}, storage_writer=DaemonStorageWriter("note/step-1", address=pair.saving.address), planner=Planner())
    pair.wait("note/step-1")
    for load in (pair.load_from_memory, pair.load_from_store):
        error = failure_of(load, "note/step-1", {"x": torch.zeros(3)})
        assert isinstance(error, InvalidRequest), error
        assert "mkdir" in str(error)
    for daemon in (pair.saving, pair.other):
        daemon.cli("show", "note/step-1")
        assert daemon.cli("list").returncode == 0
    assert list(tmp_path.iterdir()) == []


class Tagged(torch.Tensor):
    """A plain subclass."""


def test_a_class_that_cannot_be_found_any_more_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.save("gone/step-1", {"x": torch.ones(3).as_subclass(Tagged), "n": 1})
    monkeypatch.delitem(globals(), "Tagged")
    error = failure_of(pair.load_from_memory, "gone/step-1", {"x": torch.zeros(3), "n": 0})
    assert isinstance(error, InvalidRequest)
    assert "Tagged" in str(error)


def test_requires_grad_and_parameters_are_the_targets_own_affair(pair: Pair) -> None:
    pair.save("grad/step-1", {"x": torch.nn.Parameter(torch.ones(3)), "y": torch.ones(3)})
    pair.wait("grad/step-1")
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        state = {"x": torch.zeros(3), "y": torch.nn.Parameter(torch.zeros(3))}
        load("grad/step-1", state)
        assert (state["x"].requires_grad, state["y"].requires_grad) == (False, True)
        assert isinstance(state["y"], torch.nn.Parameter)
        assert torch.equal(state["y"].detach(), torch.ones(3))
