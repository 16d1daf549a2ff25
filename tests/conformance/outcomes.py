"""What a save or a load came to: a state, or a kind of error. Two ways conform if they come to the same."""

from __future__ import annotations

import dataclasses
import math
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from client.states import bits


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`error` is "" or one of "missing", "shape", "refused"; `value` counts only without one."""

    value: Any = None
    error: str = ""
    said: str = ""


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Calls, and says what it came to."""
    try:
        return Outcome(call())
    except CheckpointException as caught:
        first = next(iter(caught.failures.values()))[0]
        return Outcome(error=kind_of(first), said=f"{type(first).__name__}: {first}")


def kind_of(error: BaseException) -> str:
    if "Missing key" in str(error):
        return "missing"
    if "Size mismatch" in str(error):
        return "shape"
    return "refused"


def assert_like(found: Outcome, expected: Outcome, way: str) -> None:
    """The same state, or the same kind of error."""
    assert found.error == expected.error, (way, found.said or "no error", expected.said or "no error")
    if not found.error:
        assert_same(found.value, expected.value, way)


def assert_same(found: Any, expected: Any, path: str) -> None:
    """Same types, structure and order, same tensors bit by bit with their strides, same objects."""
    assert type(found) is type(expected), (path, found, expected)
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(found, expected, path)
    elif isinstance(expected, Mapping | UserDict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key!r}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), (path, found, expected)
        for number, part in enumerate(expected):
            assert_same(found[number], part, f"{path}/{number}")
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.tobytes() == expected.tobytes(), path
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), path
    else:
        assert found == expected, (path, found, expected)


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    if isinstance(expected, DTensor):
        assert found.placements == expected.placements, path  # type: ignore[attr-defined]
        assert found.shape == expected.shape, path
        found, expected = found.to_local(), expected.to_local()  # type: ignore[attr-defined]
    assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout), path
    assert (found.requires_grad, found.is_leaf) == (expected.requires_grad, expected.is_leaf), path
    if expected.layout is torch.strided and not expected.is_nested:
        assert found.stride() == expected.stride(), path
        assert torch.equal(bits(found), bits(expected)), path
        if expected.is_quantized:
            assert found.qscheme() == expected.qscheme(), path
            assert torch.equal(found.dequantize(), expected.dequantize()), path
    else:
        assert torch.equal(found.to_dense(), expected.to_dense()), path
