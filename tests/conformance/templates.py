"""The table of targets that are not what was saved: other dtypes, layouts, shapes, containers, keys."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch

from conformance.states import Case, State


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Counts up from 1."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def one(name: str, saved: Any, target: Any, error: str = "") -> Case:
    """A row of one key; both are made by calls."""
    return Case(name, lambda: {"x": saved()}, lambda: {"x": target()}, error=error)


def without_gradients() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


def one_for_two() -> State:
    target = torch.zeros(3)
    return {"x": target, "y": target}


DTYPES: Final = [
    one("float64_into_float32", lambda: ramp(3, dtype=torch.float64) / 3, lambda: torch.zeros(3)),
    one("float_into_int", lambda: ramp(3) * 2.6, lambda: torch.zeros(3, dtype=torch.int32)),
    one("int_into_float8", lambda: ramp(3, dtype=torch.int64), lambda: torch.zeros(3, dtype=torch.float8_e5m2)),
    one("float8_into_float32", lambda: ramp(3).to(torch.float8_e4m3fn), lambda: torch.zeros(3)),
    one("uint16_into_bfloat16", lambda: ramp(3, dtype=torch.uint16), lambda: torch.zeros(3, dtype=torch.bfloat16)),
    one("nan_into_bool", lambda: torch.tensor([0.0, float("nan"), -0.0]), lambda: torch.zeros(3, dtype=torch.bool)),
    one("complex64_into_complex128", lambda: ramp(3, dtype=torch.complex64), lambda: torch.zeros(3, dtype=torch.complex128)),
    one("float4_into_float32", lambda: ramp(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), lambda: torch.zeros(3), "refused"),
]

LAYOUTS: Final = [
    one("into_channels_last", lambda: ramp(2, 3, 4, 5), lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    one("out_of_channels_last", lambda: ramp(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda: torch.zeros(2, 3, 4, 5)),
    one("into_a_slice", lambda: ramp(3), lambda: torch.zeros(5, 7)[1:4, 2]),
    one("into_a_conjugate", lambda: torch.complex(ramp(3), -ramp(3)), lambda: torch.zeros(3, dtype=torch.complex64).conj()),
    one("into_a_negative", lambda: ramp(3), lambda: torch._neg_view(torch.zeros(3))),
    one("into_a_conjugates_part", lambda: ramp(3), lambda: torch.zeros(3, dtype=torch.complex64).conj().imag),
    one("into_an_expanded_one", lambda: ramp(3), lambda: torch.zeros(1).expand(3), "refused"),
    one("into_a_leaf", lambda: ramp(3), lambda: torch.zeros(3, requires_grad=True)),
    one("into_a_view_of_a_leaf", lambda: ramp(3), lambda: torch.zeros(6, requires_grad=True)[:3]),
    one("into_a_result", lambda: ramp(3), lambda: torch.zeros(3, requires_grad=True) * 2),
    one("into_an_inference_tensor", lambda: ramp(3), without_gradients),
    Case("into_one_for_two", lambda: {"x": ramp(3), "y": ramp(3) + 5}, one_for_two),
    one("dense_into_sparse", lambda: ramp(3, 3), lambda: torch.eye(3).to_sparse(), "refused"),
    one("meta_without_a_world", lambda: ramp(3), lambda: torch.empty(3, device="meta"), "refused"),
]

KINDS: Final = [
    one("none_for_a_tensor", lambda: ramp(3), lambda: None, "refused"),
    one("an_int_for_a_tensor", lambda: ramp(3), lambda: 5, "refused"),
    one("a_dict_for_a_tensor", lambda: ramp(3), lambda: {"y": torch.zeros(3)}, "missing"),
    one("a_tensor_for_text", lambda: "text", lambda: torch.zeros(3)),
    one("a_tensor_for_a_dict", lambda: {"y": ramp(3)}, lambda: torch.zeros(3), "missing"),
    one("an_object_for_text", lambda: "text", object),
    one("an_empty_dict_for_text", lambda: "text", dict),
    one("a_tuple_with_a_tensor", lambda: (ramp(3), 1), lambda: (torch.zeros(3), 0)),
    one("none_for_a_tuple", lambda: (ramp(3), 1), lambda: None),
]

SHAPES: Final = [
    one("longer", lambda: ramp(3), lambda: torch.zeros(4), "shape"),
    one("another_dimension", lambda: ramp(3), lambda: torch.zeros(3, 1), "shape"),
    one("one_for_a_scalar", lambda: torch.tensor(1.0), lambda: torch.zeros(1), "shape"),
    one("a_scalar_for_one", lambda: torch.ones(1), lambda: torch.tensor(0.0), "shape"),
    one("empty_and_other", lambda: torch.ones(0, 4), lambda: torch.zeros(0, 5), "shape"),
]

KEYS: Final = [
    Case("a_key_too_many", lambda: {"x": ramp(3)}, lambda: {"x": torch.zeros(3), "y": 1}, "missing"),
    Case("a_key_too_few", lambda: {"x": ramp(3), "y": 1}, lambda: {"x": torch.zeros(3)}),
    Case("no_key", lambda: {"x": ramp(3), "y": 1}, dict),
    Case("a_part_of_the_tree", lambda: {"m": {"a": ramp(3), "b": 1}, "o": ramp(4)}, lambda: {"m": {"a": torch.zeros(3)}}),
    # C47: DCP makes every key text, and then it stands beside the one that is none.
    one("int_keys", lambda: {0: 1, 1: 2}, lambda: {0: 0, 1: 0}),
    one("int_keys_of_tensors", lambda: {0: ramp(3)}, lambda: {0: torch.zeros(3)}),
    one("bool_keys", lambda: {True: 1}, lambda: {True: 0}),
    one("none_keys", lambda: {None: 1}, lambda: {None: 0}),
    one("tuple_keys", lambda: {(1, 2): 1}, lambda: {(1, 2): 0}),
    one("counter", lambda: Counter({25: 1}), lambda: Counter({25: 0})),
    one("counter_of_text", lambda: Counter("aab"), lambda: Counter("ab")),
    one("an_empty_counter", lambda: Counter({25: 1}), Counter),
]

LISTS: Final = [
    # C48: a list of plain values is one object, a list with a dict or tensor in it is a container.
    one("an_empty_list_for_dicts", lambda: [{"a": ramp(3)}, {"a": ramp(3)}], list, "missing"),
    one("dicts_for_an_empty_list", list, lambda: [{"a": 1}]),
    one("a_longer_list", lambda: [ramp(3)], lambda: [torch.zeros(3), torch.zeros(3)], "missing"),
    one("a_shorter_list", lambda: [ramp(3), ramp(3) + 1], lambda: [torch.zeros(3)]),
    one("a_dict_for_a_list", lambda: [ramp(3), 5], lambda: {"0": torch.zeros(3), "1": 0}),
    one("a_list_for_a_dict", lambda: {"0": ramp(3), "1": 5}, lambda: [torch.zeros(3), 0]),
    one("an_empty_list_for_plain_values", lambda: [1, 2], list),
    one("plain_values_for_an_empty_list", list, lambda: [1, 2]),
    one("dicts_for_plain_values", lambda: [1, 2], lambda: [{"a": 1}]),
]

TEMPLATES: Final = [*DTYPES, *LAYOUTS, *KINDS, *SHAPES, *KEYS, *LISTS]
