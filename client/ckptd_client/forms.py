"""What ``torch.save`` would say about a plain CPU tensor, without having the tensor.

The ``data.pkl`` of a torch.save container depends only on dtype, shape and
strides, so a save makes it once per kind of tensor and sends it with the table
(see `ckptd.archive` for the container around it). No memory of the tensor's size
is ever allocated, and the bytes equal torch's own.

Never describes what is not plain: requires_grad is False, the storage is exactly
the tensor's bytes, and strides with holes or overlaps are refused.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ckptd.errors import InvalidRequest
from ckptd.v1 import manifest_pb2

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.lru_cache(maxsize=65536)
def form_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> manifest_pb2.Form:
    """Describes tensors of `dtype` and `shape` (elements) whose stored bytes have `strides` (elements) and no holes.

    The result is shared between calls: copy it, never change it. Raises
    InvalidRequest if the strides leave holes or overlap, or torch cannot save the dtype plainly.
    """
    if not is_dense(shape, strides):
        raise InvalidRequest(f"a tensor of shape {shape} and strides {strides} does not fill its storage exactly: copy it first")
    pkl = _pickled(dtype, shape, strides)
    return manifest_pb2.Form(pkl=pkl, dtype=str(dtype).removeprefix("torch."), shape=shape, strides=strides)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of this `shape` and these `strides` fill a storage of exactly ``prod(shape)`` elements, each once."""
    if len(shape) != len(strides) or min(shape, default=0) < 0:
        return False
    if 0 in shape:
        return min(strides, default=0) >= 0
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _StorageLike:
    """Takes the place of the storage while its tensor is described; never pickled itself."""

    def __init__(self, storage_type: type, numel: int) -> None:
        self.persistent_id = ("storage", storage_type, "0", "cpu", numel)


class _TensorLike:
    """Reduces to what a tensor would reduce to."""

    def __init__(self, rebuild: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.reduced = (rebuild, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        return obj.persistent_id if type(obj) is _StorageLike else None


@functools.lru_cache(maxsize=256)
def _recipe(dtype: torch.dtype) -> tuple[Callable[..., object], type, int, tuple[Any, ...]]:
    """How torch reduces tensors of `dtype`: (rebuild function, storage type, bytes per unit of its size, last arguments)."""
    try:
        # A real but empty tensor: torch decides between its two ways (storage typed by the dtype, or dtype as an argument).
        rebuild, arguments = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)[:2]  # type: ignore[no-untyped-call]
        storage = arguments[0]
        if isinstance(storage, torch.UntypedStorage):
            return rebuild, torch.UntypedStorage, 1, arguments[6:]
        return rebuild, getattr(torch, storage._pickle_storage_type()), dtype.itemsize, arguments[6:]  # noqa: SLF001 - torch.save's own way
    except (RuntimeError, NotImplementedError, KeyError, AttributeError, TypeError) as exc:
        raise InvalidRequest(f"torch cannot save tensors of {dtype} plainly: {exc}") from exc


def _pickled(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    rebuild, storage_type, unit_nbytes, rest = _recipe(dtype)
    storage = _StorageLike(storage_type, math.prod(shape) * dtype.itemsize // unit_nbytes)
    # Fresh tuples: the pickler refers back to objects that are the same, as torch's never are.
    arguments = (storage, 0, (*shape,), (*strides,), False, OrderedDict(), *rest)
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(_TensorLike(rebuild, arguments))
    return out.getvalue()
