"""What is in a checkpoint, and how checkpoints of a run stand to each other, for people.

Pure: takes item tables, or what `metadata.read` found in a stock checkpoint, and gives the lines
that `show` prints, whether a daemon or the CLI itself has read them. Tables are checked already
(`manifest.check_table`); what they and stock metadata claim beyond that is believed only as far as
it makes sense, and is Corrupt otherwise.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ckptd.errors import Corrupt
from ckptd.metadata import Contents, Tensor
from ckptd.model import CheckpointId, is_attempt
from ckptd.v1.daemon_pb2 import Checkpoint, ShowReply
from ckptd.v1.manifest_pb2 import Item, Table

#: What a size or a position is at most: torch counts in 64 bits, with a sign.
_MOST: Final = (1 << 63) - 1
#: A name of more bytes is damage: it would not fit into a reply.
_NAME_NBYTES: Final = 1024 * 1024
#: Bytes of a reply, about; gRPC takes 4 MiB.
_REPLY_NBYTES: Final = 1024 * 1024


class _Line:
    """What is known so far of one key of the state dict."""

    __slots__ = ("chunks", "dtype", "nbytes", "shape", "shard", "shards")

    def __init__(self, dtype: str, shape: tuple[int, ...], nbytes: int, shard: int) -> None:
        self.dtype = dtype
        self.shape = shape
        self.nbytes = nbytes
        self.shard = shard
        self.shards = 1
        self.chunks = 1


def lines(tables: Iterable[Table]) -> list[ShowReply.Tensor]:
    """Tensors and objects by key, from the item tables of all shards: a tensor is as large as its chunks reach. Raises Corrupt."""
    found: dict[bytes, _Line] = {}
    for shard, table in enumerate(tables):
        forms = [(form.dtype, tuple(form.shape)) for form in table.forms]
        for item in table.items:
            fqn = item.fqn
            dtype, shape = ("", ()) if item.kind == Item.OPAQUE_OBJECT else forms[item.form]
            if item.has_offset and dtype:
                shape = _reach(fqn, tuple(item.offset), shape)
            line = found.get(fqn)
            if line is None:
                found[fqn] = _Line(dtype, shape, item.nbytes, shard)
                continue
            if line.dtype != dtype or len(line.shape) != len(shape):
                raise Corrupt(f"the chunks of {fqn[:80]!r} are not of one tensor: {line.dtype} {line.shape[:8]} and {dtype} {shape[:8]}")
            line.shape = tuple(map(max, line.shape, shape))
            line.nbytes += item.nbytes
            line.chunks += 1
            line.shards += line.shard != shard
            line.shard = shard
    return [
        _shown(fqn, line.dtype, line.shape, line.nbytes, line.chunks if line.dtype else 0, line.shards)
        for fqn, line in sorted(found.items())
    ]


def stock_lines(found: Contents) -> list[ShowReply.Tensor]:
    """Tensors and objects by key of a checkpoint that stock DCP wrote: bytes follow from the dtype's name. Raises Corrupt."""
    files: dict[bytes, set[str]] = {}
    object_nbytes: dict[bytes, int] = {}
    for (fqn, offset), place in found.storage.items():
        files.setdefault(fqn, set()).add(place.file)
        if offset is None and not place.descriptors:
            object_nbytes[fqn] = place.length
    shown = []
    for fqn, dtype, shape, chunks in found.tensors:
        nbytes = expected_nbytes(dtype, [sizes for _, sizes in chunks])
        shown.append(_shown(fqn, dtype, shape, nbytes, len(chunks), len(files.get(fqn, ()))))
    shown += [_shown(fqn, "", (), object_nbytes.get(fqn, 0), 0, len(files.get(fqn, ()))) for fqn in found.objects]
    return sorted(shown, key=operator.attrgetter("fqn"))


def stock_files(found: Contents) -> list[str]:
    """Names of the data files that a stock ``.metadata`` leads to."""
    return sorted({place.file for place in found.storage.values()})


def replies(checkpoint: Checkpoint, tensors: Iterable[ShowReply.Tensor], files: Iterable[str]) -> Iterator[ShowReply]:
    """The answer to `show`, in messages of about 1 MiB; the first one has the checkpoint."""
    reply, nbytes = ShowReply(checkpoint=checkpoint), 0
    for file in files:
        reply.files.append(file)
        nbytes += len(file)
        if nbytes > _REPLY_NBYTES:
            yield reply
            reply, nbytes = ShowReply(), 0
    for tensor in tensors:
        reply.tensors.append(tensor)
        nbytes += tensor.ByteSize()
        if nbytes > _REPLY_NBYTES:
            yield reply
            reply, nbytes = ShowReply(), 0
    yield reply


def is_covered(tensor: Tensor) -> bool:
    """Whether the chunks of a tensor lie inside it and have as many elements as it has: a load would leave the rest as it was."""
    inside = all(
        len(offsets) == len(sizes) == len(tensor.shape)
        and all(offset + size <= whole for offset, size, whole in zip(offsets, sizes, tensor.shape, strict=True))
        for offsets, sizes in tensor.chunks
    )
    return inside and sum(math.prod(sizes) for _, sizes in tensor.chunks) == math.prod(tensor.shape)


def expected_nbytes(dtype: str, chunks: Sequence[Sequence[int]]) -> int:
    """Bytes of chunks of these shapes: elements times the width that the dtype's name says (one byte if it says none).

    At most 2^63 - 1 of each chunk, however large its sizes claim to be.
    """
    width = _width(dtype)
    return sum([min(width * _elements(sizes), _MOST) for sizes in chunks])


@functools.lru_cache(maxsize=256)
def _width(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def _elements(sizes: Sequence[int]) -> int:
    if len(sizes) <= 8 or 0 in sizes:
        return math.prod(sizes) if len(sizes) <= 8 else 0
    elements = 1
    for size in sizes:
        elements *= size
        if elements > _MOST:  # a product of very many sizes takes for ever
            break
    return elements


def _reach(fqn: bytes, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where a chunk of `shape` at `offset` ends, in elements of the full tensor."""
    if len(offset) != len(shape) or min(offset, default=0) < 0:
        raise Corrupt(f"a chunk of {fqn[:80]!r} of shape {shape[:8]} cannot be at {offset[:8]}")
    return tuple(map(operator.add, offset, shape))


def _shown(fqn: bytes, dtype: str, shape: tuple[int, ...], nbytes: int, chunks: int, shards: int) -> ShowReply.Tensor:
    if len(fqn) > _NAME_NBYTES or nbytes > _MOST or max(shape, default=0) > _MOST:
        raise Corrupt(f"what {fqn[:80]!r} names is larger than anything can be: shape {shape[:8]}, {nbytes} bytes")
    try:
        fqn.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as exc:
        raise Corrupt(f"the name {fqn[:80]!r} is not UTF-8") from exc
    return ShowReply.Tensor(fqn=fqn, dtype=dtype, shape=shape, raw_bytes=nbytes, chunks=chunks, shards=shards)


def mark_abandoned(lines: Sequence[Checkpoint]) -> None:
    """Marks checkpoints of a branch that a rollback left: one of the run with no higher step was accepted later."""
    stepped = []
    for line in lines:
        checkpoint = CheckpointId.parse(line.summary.id)
        step = line.summary.step if line.summary.HasField("step") else checkpoint.step
        if step is not None and is_attempt(line.summary.attempt):  # of a time that no clock tells, nobody knows what it was before
            stepped.append((checkpoint.run, step, line.summary.attempt, line))
    newest = ("", "")  # run, and the newest attempt at lower steps of it
    for run, _, attempt, line in sorted(stepped, key=lambda found: found[:3]):
        before = newest[1] if newest[0] == run else ""
        line.abandoned = before > attempt
        newest = run, max(before, attempt)
