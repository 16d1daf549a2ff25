"""The table of state dicts: what DCP's users save, each with the template that it is loaded into.

A template has the structure and none of the values. Everything is made afresh on each call,
so that no load can look at what was saved.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import random
import threading
import uuid
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from client.states import blank

State = dict[str, Any]

#: Two blocks and a bit, so that a block ends inside of an item.
LARGE: Final = (9 * 1024 * 1024,)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: how the state and its template are made."""

    name: str
    make: Callable[[], State]
    template: Callable[[], State]
    #: The kind of error that stock comes to, here or while it saves.
    error: str = ""
    #: Why what was saved is the measure instead of what stock makes of it, if it is.
    better: str = ""
    #: Start of torch's own warning about such a state.
    warns: str = ""


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    """An object of a training script's own."""

    rate: float
    names: list[str]


Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - users have both kinds


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern: NaNs with payloads, -0.0, denormals."""
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=seeded(seed))
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


#: Those that stock itself saves and loads; tests/client checks that there are no others.
DTYPES: Final = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
]


def dtypes() -> State:
    shapes: list[tuple[int, ...]] = [(), (0,), (7,), (0, 4), (3, 5), (2, 3, 4)]
    return {str(dtype): {str(shape): random_bits(dtype, shape, seed) for seed, shape in enumerate(shapes)} for dtype in DTYPES}


def layouts() -> State:
    base = torch.randn(6, 8, generator=seeded(1))
    compound = torch.randn(4, 5, dtype=torch.complex64, generator=seeded(2))
    picture = torch.randn(2, 3, 4, 5, generator=seeded(3))
    return {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "row": base[1:3],
        "column": base[:, 2:3],
        "expanded": base[:, :1].expand(6, 7),
        "overlapping": base.flatten().as_strided((4, 3), (1, 1)),
        "permuted": picture[0].permute(2, 0, 1),
        "channels_last": picture.to(memory_format=torch.channels_last),
        "channels_last_3d": picture[:, :, None].to(memory_format=torch.channels_last_3d),
        "one_channel_last": picture[:, :1].to(memory_format=torch.channels_last),
        "conj": compound.conj(),
        "conj_strided": compound.t()[::2].conj(),
        "conj_of_real_part": compound.conj().imag,
        "neg": torch._neg_view(base),
        "float8_strided": random_bits(torch.float8_e8m0fnu, (4, 6))[:, ::2],
        "complex_strided": torch.randn(3, 4, dtype=torch.complex128, generator=seeded(4)).t(),
        "offset": base.flatten()[5:11].view(2, 3),
        "of_one": base[3, 3],
    }


def views_of_one_storage() -> State:
    base = torch.arange(24.0)
    return {
        "whole": base,
        "half": base[12:],
        "every_third": base[::3],
        "as_matrix": base.view(4, 6),
        "its_columns": base.view(4, 6)[:, 1:3],
    }


def views_of_one_target() -> State:
    base = torch.zeros(24)
    return {
        "whole": base,
        "half": base[12:],
        "every_third": base[::3],
        "as_matrix": base.view(4, 6),
        "its_columns": base.view(4, 6)[:, 1:3],
    }


def parameters(fill: float | None = None) -> State:
    made = [torch.randn(shape, generator=seeded(5)) if fill is None else torch.full(shape, fill) for shape in ((3, 4), (4,), (2, 2))]
    leaf = torch.nn.Parameter(made[0])
    return {
        "parameter": leaf,
        "frozen": torch.nn.Parameter(made[1], requires_grad=False),
        "leaf": made[2].clone().requires_grad_(),
        "buffer": torch.nn.Buffer(made[1].clone()),
        "tied": leaf,
        **({"computed": leaf * 2} if fill is None else {"computed": torch.zeros(3, 4)}),
    }


def objects() -> State:
    return {
        "int": 7,
        "big": 10**40,
        "negative": -1,
        "bool": True,
        "float": 0.1,
        "inf": math.inf,
        "complex": 1 + 2j,
        "text": "caf\u00e9 \U0001f511",
        "empty_text": "",
        "bytes": bytes(range(256)),
        "bytearray": bytearray(b"abc"),
        "none": None,
        "list": [1, 2.5, "c", None],
        "tuple": (1, (2, "x")),
        "set": {1, 2, 3},
        "frozenset": frozenset({"a"}),
        "range": range(3, 9, 2),
        "slice": slice(1, None, 2),
        "deque": deque([1, 2], maxlen=5),
        "enum": Colour.RED,
        "dataclass": Settings(0.5, ["a", "b"]),
        "namedtuple": Point(1, 2),
        "namespace": SimpleNamespace(a=1),
        "date": dt.datetime(2026, 1, 5, 10, 2, 11, tzinfo=dt.UTC),
        "decimal": decimal.Decimal("1.10"),
        "uuid": uuid.UUID(int=5),
        "path": PurePosixPath("/a/b"),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "layout": torch.strided,
        "function": math.sqrt,
        "class": Settings,
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "numpy_scalar": np.float64(2.5),
        "tuple_with_a_tensor": (torch.arange(3), 1),
        "set_of_tuples": {(1, 2)},
        "one_mebibyte": bytes(range(256)) * 4096,
    }


def rng_states() -> State:
    generator = np.random.default_rng(5)
    generator.random(3)
    own = random.Random(7)
    own.random()
    legacy = np.random.RandomState(3)
    return {
        "torch": seeded(11).get_state(),
        "python": own.getstate(),
        "numpy": generator.bit_generator.state,
        "numpy_legacy": legacy.get_state(legacy=True),
        "numpy_legacy_dict": legacy.get_state(legacy=False),
    }


def containers() -> State:
    tensor = torch.arange(4.0)
    return {
        "nested": {"deep": {"er": {"x": tensor, "n": 1}}},
        "list_of_tensors": [tensor, tensor + 1],
        "list_of_dicts": [{"x": tensor + 2, "n": 1}, {"x": tensor + 3, "n": 2}],
        "list_of_lists": [[1, 2], [tensor + 4], []],
        "mixed_list": [1, "a", {"b": tensor + 5}, None, tensor + 6],
        "ordered": OrderedDict([("z", tensor + 7), ("a", 2)]),
        "default": defaultdict(list, {"k": [tensor + 9]}),
        "dots.in.keys": {"a.b": tensor + 10},
        "slashes/and spaces": {"": tensor + 11, "%2e": 5},
        "empty_dict": {},
        "empty_list": [],
    }


def containers_template() -> State:
    zero = torch.zeros(4)
    return {
        "nested": {"deep": {"er": {"x": zero.clone(), "n": None}}},
        "list_of_tensors": [zero.clone(), zero.clone()],
        "list_of_dicts": [{"x": zero.clone(), "n": None}, {"x": zero.clone(), "n": None}],
        "list_of_lists": [[0, 0], [zero.clone()], []],
        "mixed_list": [0, "", {"b": zero.clone()}, 0, zero.clone()],
        "ordered": OrderedDict([("z", zero.clone()), ("a", None)]),
        "default": defaultdict(list, {"k": [zero.clone()]}),
        "dots.in.keys": {"a.b": zero.clone()},
        "slashes/and spaces": {"": zero.clone(), "%2e": None},
        "empty_dict": {},
        "empty_list": [],
    }


def many_keys(fill: int | None = None) -> State:
    state: State = {f"layer.{n}.weight": torch.full((n % 5, 2), n if fill is None else fill) for n in range(2000)}
    return state | {f"layer.{n}.step": n if fill is None else fill for n in range(1000)}


def large() -> State:
    return {"w": random_bits(torch.uint8, LARGE, 3), "exact": random_bits(torch.int32, (1024, 1024), 4), "n": 5}


def sparse(fill: float = 3.0) -> State:
    eye = torch.eye(4) * fill
    twice = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, fill], (2, 2), check_invariants=True)
    return {"coo": eye.to_sparse(), "uncoalesced": twice, "csr": eye.to_sparse_csr(), "csc": eye.to_sparse_csc()}


def quantised(fill: float | None = None) -> State:
    value = torch.randn(20, generator=seeded(6)) if fill is None else torch.full((20,), fill)
    state = {str(dtype): torch.quantize_per_tensor(value, 0.5, 0, dtype) for dtype in (torch.qint8, torch.quint8, torch.qint32)}
    state["view"] = state["torch.qint8"][5:9]
    scales = torch.tensor([0.1, 0.2], dtype=torch.float64)
    state["per_channel"] = torch.quantize_per_channel(value.view(2, 10), scales, torch.tensor([0, 1]), 0, torch.qint8)
    return state


def other_scales() -> State:
    return {"x": torch.quantize_per_tensor(torch.randn(20, generator=seeded(7)), 0.25, 3, torch.qint8)}


def other_scales_template() -> State:
    return {"x": torch.quantize_per_tensor(torch.zeros(20), 0.5, 0, torch.qint8)}


def nested_tensors() -> State:
    return {"nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])}


def jagged_tensors() -> State:
    return {"jagged": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)}


def of(make: Callable[[], State]) -> Callable[[], State]:
    """The template with nothing of the values, containers as they are."""
    return lambda: blank(make())


_QUANTISED: Final = "torch.quantize_per_tensor, torch.quantize_per_channel"

CASES: Final = [
    Case("dtypes", dtypes, of(dtypes), warns="ComplexHalf support is experimental"),
    Case("layouts", layouts, of(layouts)),
    Case("views_of_one_storage", views_of_one_storage, of(views_of_one_storage)),
    Case("views_of_one_target", views_of_one_storage, views_of_one_target),
    Case("parameters", parameters, lambda: parameters(0.0)),
    Case("objects", objects, of(objects)),
    Case("rng_states", rng_states, of(rng_states)),
    Case("containers", containers, containers_template),
    Case("a_list_of_nothing", lambda: {"list": [{}, []], "n": 1}, lambda: {"list": [{}, []], "n": 0}, error="missing"),
    Case("a_user_dict", lambda: {"d": UserDict({"k": 1})}, lambda: {"d": UserDict({"k": 0})}, error="missing"),
    Case("large", large, of(large)),
    Case("nothing", dict, dict),
    Case("sparse", sparse, lambda: sparse(1.0), better="stock cannot write sparse tensors", warns="Sparse CSR tensor support is in beta"),
    Case("quantised", quantised, lambda: quantised(0.0), warns=_QUANTISED),
    Case("other_scales", other_scales, other_scales_template, better="stock keeps the target's scale", warns=_QUANTISED),
    Case("nested_tensors", nested_tensors, nested_tensors, error="refused", warns="The PyTorch API of nested tensors"),
    Case("jagged_tensors", jagged_tensors, jagged_tensors, error="refused", warns="The PyTorch API of nested tensors"),
    Case("a_hollow_tensor", lambda: {"x": torch.empty(3, device="meta")}, lambda: {"x": torch.zeros(3)}, error="refused"),
    Case("a_lock", lambda: {"x": threading.Lock()}, lambda: {"x": None}, error="refused"),
    Case("a_local_function", lambda: {"x": lambda: 1}, lambda: {"x": None}, error="refused"),
    Case("names_that_clash", lambda: {"a": {"b": 1}, "a.b": 2}, lambda: {"a": {"b": 0}, "a.b": 0}, error="refused"),
]

#: Those that come through a save and a load whatever they are written to.
WHOLE: Final = ("dtypes", "layouts", "views_of_one_storage", "parameters", "objects", "rng_states", "containers", "large")


def everything() -> State:
    """All of them as one state."""
    return {case.name: case.make() for case in CASES if case.name in WHOLE}


def everything_template() -> State:
    return {case.name: case.template() for case in CASES if case.name in WHOLE}
