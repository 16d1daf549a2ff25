"""Tensors into a shard: what is written, where it lies, and the copy itself.

A plain strided tensor goes in as its raw bytes, in its own storage order when that has
no holes; everything else (quantised, nested, subclasses, sparse, objects) as the bytes
that ``torch.save`` makes of it. Bits in are bits out: a NaN's payload and -0.0 survive.

Promises: no copy of a raw tensor is held; what a planner makes up while it resolves an
item lives only while that item is copied. The bulk runs without the GIL. This is the
only room that knows devices. It never talks to the daemon.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from ckptd import archive
from ckptd.errors import InvalidRequest
from ckptd.v1 import manifest_pb2
from ckptd_client.forms import form_of, is_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from ckptd_client.mapping import Mapping

#: From this many bytes on two threads copy: one core does not saturate the memory bus.
_TWO_THREADS_NBYTES: Final = 64 * 1024 * 1024
#: What one thread copies before it takes the next piece.
_PIECE_NBYTES: Final = 16 * 1024 * 1024
#: An integer dtype of the same width: copying it moves bits, for every dtype, also those torch cannot copy.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Piece:
    """One item of a shard and where its bytes come from."""

    write_item: WriteItem
    item: manifest_pb2.Item
    #: Bytes to copy, the tensor to copy, or None: resolve it again when its turn comes.
    source: torch.Tensor | bytes | None


@dataclass(slots=True)
class Layout:
    """A shard that is planned and not yet copied."""

    table: manifest_pb2.Table = field(default_factory=manifest_pb2.Table)
    pieces: list[Piece] = field(default_factory=list)


def key_of(write_item: WriteItem) -> str:
    """How a message names an item."""
    name = write_item.index.fqn
    return repr(name if len(name) <= 120 else f"{name[:117]}...")


def fqn_bytes(fqn: str) -> bytes:
    """An fqn as the table has it; lone surrogates survive. Raises InvalidRequest for a key that is no text."""
    if not isinstance(fqn, str):  # DCP makes every key text, unless its planner is told to flatten nothing
        kind = type(fqn).__name__
        raise InvalidRequest(
            f"the key {fqn!r} is of type {kind}, not str: make it text, or let DCP's planner do it (flatten_state_dict=True)"
        )
    return fqn.encode("utf-8", "surrogatepass")


def lay_out(items: Sequence[WriteItem], planner: SavePlanner) -> Layout:
    """Plans the shard of `items`; opaque ones are serialised here, raw ones only looked at.

    Raises InvalidRequest, naming the key, for what cannot be saved.
    """
    shard = Layout()
    forms: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None], int] = {}
    # DCP's own planner looks tensors up; another may make them up, and then holding them all would be a copy of the state.
    looks_up = all(
        getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )
    at = 0
    for write_item in items:
        item = shard.table.items.add(fqn=fqn_bytes(write_item.index.fqn), at=at)
        if write_item.index.offset is not None:
            item.has_offset = True
            item.offset.extend(write_item.index.offset)
        if write_item.index.index is not None:
            item.index = write_item.index.index
        source = _resolve(write_item, planner)
        if isinstance(source, torch.Tensor):
            shape, strides = tuple(source.shape), _dense_strides(source)
            raw = (source.dtype, shape, strides)
            if raw not in forms:
                forms[raw] = len(forms)
                shard.table.forms.append(_form(write_item, *raw))
            item.kind = manifest_pb2.Item.RAW
            item.form = forms[raw]
            item.nbytes = source.numel() * source.element_size()
            item.raw_at, at = archive.layout(at, len(shard.table.forms[item.form].pkl), item.nbytes)
            shard.pieces.append(Piece(write_item, item, source if looks_up else None))
        else:
            if write_item.type == WriteItemType.BYTE_IO:
                item.kind = manifest_pb2.Item.OPAQUE_OBJECT
            else:
                opaque = (*_described(write_item), None)
                if opaque not in forms:
                    forms[opaque] = len(forms)
                    shard.table.forms.add(dtype=str(opaque[0]).removeprefix("torch."), shape=opaque[1])
                item.kind = manifest_pb2.Item.OPAQUE_TENSOR
                item.form = forms[opaque]
            item.nbytes = len(source)
            item.raw_at = at
            at += len(source)
            shard.pieces.append(Piece(write_item, item, source))
    shard.table.end = at
    return shard


def copy_in(shard: Layout, encoded_table: bytes, mapping: Mapping, planner: SavePlanner) -> None:
    """Copies all items and, behind them, the table into the mapped segment; returns when every byte is there."""
    moves: list[tuple[int, int | bytes, int]] = [(mapping.address + shard.table.end, encoded_table, len(encoded_table))]
    devices: set[torch.device] = set()
    for piece in shard.pieces:
        nbytes = piece.item.nbytes
        if nbytes == 0:
            continue
        to = mapping.address + piece.item.raw_at
        source = piece.source
        if isinstance(source, bytes):
            moves.append((to, source, nbytes))
            continue
        held = source is not None
        tensor = source if source is not None else _resolve_again(piece, shard, planner)
        if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg() and _fills_its_memory(tensor):
            if held:
                moves.append((to, tensor.data_ptr(), nbytes))
            else:
                move([(to, tensor.data_ptr(), nbytes)])
        else:
            form = shard.table.forms[piece.item.form]
            raw = torch.frombuffer(mapping.view(piece.item.raw_at, nbytes), dtype=torch.uint8)
            target = raw.view(tensor.dtype).as_strided(tuple(form.shape), tuple(form.strides))
            # A tensor that nobody holds must be copied before it is dropped.
            copy_bits(target, tensor, non_blocking=held and tensor.is_cuda)
            if held and tensor.is_cuda:
                devices.add(tensor.device)
    move(moves)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def copy_bits(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """``target.copy_(source)``; with equal dtypes the bits are moved as they are."""
    bits = _BITS.get(source.element_size())
    plain = bits is not None and is_plain(target) and is_plain(source) and target.dtype == source.dtype
    if plain and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()):
        target.view(cast("torch.dtype", bits)).copy_(source.view(cast("torch.dtype", bits)), non_blocking=non_blocking)
    else:
        target.copy_(source, non_blocking=non_blocking)


def move(moves: Sequence[tuple[int, int | bytes, int]]) -> None:
    """Does memmove for every ``(to, from, nbytes)``, by two threads if it is much; the GIL is free meanwhile."""
    if sum(nbytes for _, _, nbytes in moves) < _TWO_THREADS_NBYTES:
        for to, source, nbytes in moves:
            ctypes.memmove(to, source, nbytes)
        return
    pieces: deque[tuple[int, int | bytes, int]] = deque()
    for to, source, nbytes in moves:
        if isinstance(source, bytes) or nbytes <= _PIECE_NBYTES:
            pieces.append((to, source, nbytes))
        else:
            pieces.extend((to + start, source + start, min(_PIECE_NBYTES, nbytes - start)) for start in range(0, nbytes, _PIECE_NBYTES))

    def drain() -> None:
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            ctypes.memmove(*piece)

    second = threading.Thread(target=drain, name="ckptd-copy")
    second.start()
    try:
        drain()
    finally:
        # Nobody may write into the segment after this call has ended, however it ended.
        pieces.clear()
        second.join()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but its strided bytes."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's storage was freed or shortened, as FSDP does with ``resize_``: to touch it would end the process."""
    return _end_of(tensor) > tensor.untyped_storage().nbytes()


def _resolve(write_item: WriteItem, planner: SavePlanner) -> torch.Tensor | bytes:
    """A plain tensor, or the bytes of what is opaque."""
    if write_item.type == WriteItemType.BYTE_IO:
        try:
            data = planner.resolve_data(write_item)
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
            raise InvalidRequest(f"the value of {key_of(write_item)} cannot be pickled: {error}") from error
        if not isinstance(data, io.BytesIO):
            raise InvalidRequest(f"the planner resolved the object {key_of(write_item)} to {_named(data)}, not to BytesIO")
        return data.getvalue()
    tensor = planner.resolve_data(write_item)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"the planner resolved the tensor {key_of(write_item)} to {_named(tensor)}")
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    tensor = tensor.detach()
    if tensor.device.type == "meta" or _is_fake(tensor):
        raise InvalidRequest(f"{key_of(write_item)} is a {_named(tensor)} on the meta device or fake: it has no values to save")
    if not is_plain(tensor):
        return _opaque(write_item, tensor)
    if is_hollow(tensor):
        raise InvalidRequest(
            f"{key_of(write_item)}: the tensor's storage was freed or shortened (as FSDP does with resize_): nothing to save"
        )
    return tensor


def _form(write_item: WriteItem, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> manifest_pb2.Form:
    try:
        return form_of(dtype, shape, strides)
    except InvalidRequest as error:
        raise InvalidRequest(f"{key_of(write_item)}: {error}") from error


def _described(write_item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a chunk as DCP's metadata has them: a nested tensor or a subclass may say otherwise, or nothing."""
    data = write_item.tensor_data
    if data is None:
        raise InvalidRequest(f"the planner plans the tensor {key_of(write_item)} without its dtype and shape")
    return data.properties.dtype, tuple(data.chunk.sizes)


def _opaque(write_item: WriteItem, tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    try:
        tensor = tensor.cpu()
        if tensor.is_quantized and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
            tensor = tensor.clone()  # a view: torch.save would write all of its base
        torch.save(tensor, stream)
    except Exception as error:
        raise InvalidRequest(f"{key_of(write_item)}: torch.save cannot write a {_named(tensor)}: {error}") from error
    return stream.getvalue()


def _resolve_again(piece: Piece, shard: Layout, planner: SavePlanner) -> torch.Tensor:
    tensor = _resolve(piece.write_item, planner)
    form = shard.table.forms[piece.item.form]
    if not isinstance(tensor, torch.Tensor) or [f"torch.{form.dtype}", *form.shape] != [str(tensor.dtype), *tensor.shape]:
        raise InvalidRequest(f"the planner resolved {key_of(piece.write_item)} to two different things within one save")
    return tensor


def _named(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not isinstance(value, torch.Tensor):
        return kind
    return f"{kind} ({value.layout})" if value.layout is not torch.strided else kind


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor" and type(tensor).__module__.startswith("torch.")


def _end_of(tensor: torch.Tensor) -> int:
    """Bytes of storage that the tensor needs."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or is_dense(tuple(tensor.shape), tensor.stride())


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides to store a tensor with, in elements: its own if it is dense, else the contiguous ones."""
    if not tensor.is_contiguous() and is_dense(tuple(tensor.shape), tensor.stride()):
        return tensor.stride()
    strides: list[int] = []
    expected = 1
    for size in reversed(tensor.shape):
        strides.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(strides))
