"""What a load asks the daemon for: boxes of stored tensors as byte ranges, in batches.

Pure: no tensors, no calls. A box is a part of an item's chunk, ``(offsets, lengths)`` in
elements per dimension. Its bytes are asked for as one span where rows lie close
together, and row by row where a row is at least a block long, so that a narrow slice of
a large tensor does not fetch the whole of it. Boxes larger than a batch are cut, so that
a tensor larger than the daemon's memory can be loaded through it.

Promises: every element of every box is covered once, in batches that need at most the
limit, counted in whole blocks as the daemon fetches them (an opaque item always goes
whole, whatever its size).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptd.model import BLOCK_NBYTES
from ckptd.v1 import daemon_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed.checkpoint.planner import ReadItem

    from ckptd.v1 import manifest_pb2

#: At most this many bytes are asked for at once.
BATCH_NBYTES: Final = 64 * 1024 * 1024
#: At most this many ranges are asked for at once: a request stays far below gRPC's 4 MiB.
_BATCH_RANGES: Final = 50_000
#: A block's first and last page are counted in full, also if it shares them with its neighbours.
_EDGES_NBYTES: Final = 2 * 4096

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one item is stored."""

    shard: int
    number: int
    item: manifest_pb2.Item


@dataclass(frozen=True, slots=True)
class Read:
    """A part of one ReadItem that one batch fetches."""

    request: ReadItem
    place: Place
    #: Within the stored chunk; None for an opaque item, which goes whole.
    box: Box | None
    ranges: list[tuple[int, int]]
    #: Whether this is the request's last part.
    last: bool


@dataclass(slots=True)
class Batch:
    """What one Want asks for; all of one shard."""

    shard: int
    reads: list[Read] = field(default_factory=list)
    nbytes: int = 0
    count: int = 0

    def want(self) -> daemon_pb2.LoadRequest.Want:
        """The request, ranges relative to each item's first raw byte."""
        want = daemon_pb2.LoadRequest.Want(shard=self.shard)
        for read in self.reads:
            if read.box is None and want.items and want.items[-1] == read.place.number:  # once is enough for an opaque item
                continue
            for start, end in read.ranges:
                want.items.append(read.place.number)
                want.starts.append(start)
                want.ends.append(end)
        return want


def batch_limit(memory_nbytes: int) -> int:
    """Bytes per batch under a daemon with this budget: eight ranks can load at once even through a small one."""
    return max(2 * BLOCK_NBYTES + _EDGES_NBYTES, min(BATCH_NBYTES, memory_nbytes // 8))


def fetched_nbytes(item: manifest_pb2.Item, ranges: list[tuple[int, int]]) -> int:
    """What the daemon may have to hold for these ranges, in bytes: whole blocks of the item's container, in whole pages."""
    head = item.raw_at - item.at
    blocks, seen = 0, -1
    for start, end in ranges:
        first, last = (head + start) // BLOCK_NBYTES, (head + end - 1) // BLOCK_NBYTES
        blocks += last - max(first, seen + 1) + 1
        seen = max(seen, last)
    return min(blocks * BLOCK_NBYTES, head + item.nbytes) + (_EDGES_NBYTES if blocks else 0)


def spans(box: Box, strides: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """The byte ranges that hold a box of a dense tensor, ascending; rows of a block or more one by one."""
    offsets, lengths = box
    if 0 in lengths:
        return []
    starts = [sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)) * itemsize]
    inner = 1
    for stride, length in sorted(zip(strides, lengths, strict=True), reverse=True):
        if stride * itemsize >= BLOCK_NBYTES:
            starts = [start + step * stride * itemsize for start in starts for step in range(length)]
        else:
            inner += (length - 1) * stride
    joined: list[tuple[int, int]] = []
    for start in starts:
        end = start + inner * itemsize
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def cut(
    item: manifest_pb2.Item, box: Box, strides: Sequence[int], itemsize: int, limit: int
) -> Iterator[tuple[Box, list[tuple[int, int]]]]:
    """The box in parts that need at most `limit` bytes each, cut along the outermost stored dimension."""
    ranges = spans(box, strides, itemsize)
    offsets, lengths = box
    nbytes = fetched_nbytes(item, ranges)
    if nbytes <= limit or max(lengths, default=1) <= 1:
        yield box, ranges
        return
    dim = max((d for d in range(len(lengths)) if lengths[d] > 1), key=lambda d: strides[d])
    step = max(1, lengths[dim] * limit // nbytes)
    for start in range(0, lengths[dim], step):
        part_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        part_lengths = (*lengths[:dim], min(step, lengths[dim] - start), *lengths[dim + 1 :])
        yield from cut(item, (part_offsets, part_lengths), strides, itemsize, limit)


def batches(reads: Iterable[Read], limit: int) -> Iterator[Batch]:
    """Joins reads, in the order they come, into batches of one shard and at most `limit` bytes."""
    batch: Batch | None = None
    for read in reads:
        again = batch is not None and batch.reads[-1].place is read.place and read.box is None
        nbytes, count = (0, 0) if again else (fetched_nbytes(read.place.item, read.ranges), len(read.ranges))
        if batch is None or batch.shard != read.place.shard or batch.nbytes + nbytes > limit or batch.count + count > _BATCH_RANGES:
            if batch is not None:
                yield batch
            batch = Batch(read.place.shard)
        batch.reads.append(read)
        batch.nbytes += nbytes
        batch.count += count
    if batch is not None:
        yield batch
