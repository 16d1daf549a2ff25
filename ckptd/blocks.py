"""Blocks of shards: which lie under what is wanted; those in the store are read, checked, and put in their place in a segment.

Promises: what does not match its hash is never written; blocks that lie together are read in one
request. A block has the same key and the same place whether it is in the store or only in memory.
Knows nothing of readers, memory budgets or what else a segment holds. All calls block.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckptd import errors, manifest
from ckptd.codec import Codec, block_hash
from ckptd.model import BLOCK_NBYTES
from ckptd.store import Store
from ckptd.v1.manifest_pb2 import StoredShard, Table

#: Stored bytes per request to the store, at most; runs of blocks are read in one request.
REQUEST_NBYTES = 16 * 1024 * 1024
#: Stored bytes between two wanted blocks that are cheaper to read than to skip.
GAP_NBYTES = 128 * 1024
PAGE = os.sysconf("SC_PAGE_SIZE")
#: Item number in its table, block number in its item.
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block: where its uncompressed bytes go in the segment, and where it lies in the file."""

    key: Key
    at: int
    nbytes: int
    offset: int
    length: int
    digest: bytes

    @property
    def span(self) -> tuple[int, int]:
        """Where its bytes are in the segment."""
        return self.at, self.at + self.nbytes


B = TypeVar("B", bound=StoredBlock)


@dataclass(frozen=True, slots=True)
class BlockShard:
    """A shard of ckptd's own, in the store."""

    shard: StoredShard
    key: str
    codec: Codec
    block_nbytes: int

    @property
    def table(self) -> Table:
        """Its item table."""
        return self.shard.table

    def find(self, items: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[StoredBlock]:
        """The blocks under byte ranges of items (relative to each item's first raw byte), in file order."""
        table = self.shard.table
        found: dict[Key, StoredBlock] = {}
        for number, start, end in zip(items, starts, ends, strict=True):
            check_range(table, number, start, end)
            if start == end:
                continue
            item, stored = table.items[number], self.shard.stored[number]
            item_end = table.items[number + 1].at if number + 1 < len(table.items) else table.end
            lead = item.raw_at - item.at
            first, last = (lead + start) // self.block_nbytes, (lead + end - 1) // self.block_nbytes
            offset = stored.offset + sum(stored.lengths[:first])
            spans = manifest.block_spans(item.at, item_end, self.block_nbytes)
            for block in range(first, last + 1):
                at, stop = spans[block]
                digest = stored.hashes[16 * block : 16 * block + 16]
                length = stored.lengths[block]
                found[number, block] = StoredBlock((number, block), item.at + at, stop - at, offset, length, digest)
                offset += length
        return sorted(found.values(), key=lambda block: block.offset)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard that only memory has: cut into the blocks that its data file will have, whose hashes nobody knows yet."""

    table: Table

    def find(self, items: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[StoredBlock]:
        """The blocks under byte ranges of items, in the order of the segment; where they lie in a file is not known."""
        table = self.table
        found: dict[Key, StoredBlock] = {}
        for number, start, end in zip(items, starts, ends, strict=True):
            check_range(table, number, start, end)
            if start == end:
                continue
            item = table.items[number]
            item_end = table.items[number + 1].at if number + 1 < len(table.items) else table.end
            lead = item.raw_at - item.at
            for block in range((lead + start) // BLOCK_NBYTES, (lead + end - 1) // BLOCK_NBYTES + 1):
                at = item.at + block * BLOCK_NBYTES
                nbytes = min(at + BLOCK_NBYTES, item_end) - at
                found[number, block] = StoredBlock((number, block), at, nbytes, at, nbytes, b"")
        return sorted(found.values(), key=lambda block: block.at)


def check_range(table: Table, number: int, start: int, end: int) -> None:
    """Raises InvalidRequest unless these are bytes of that item."""
    if number >= len(table.items) or not 0 <= start <= end <= table.items[number].nbytes:
        raise errors.InvalidRequest(f"bytes {start} to {end} of item {number} are not in the shard")


def raw_ranges(table: Table, keys: Sequence[Key], block_nbytes: int) -> tuple[list[int], list[int], list[int]]:
    """Items, starts and ends under which `find` finds just these blocks. Raises InvalidRequest if there is no such block."""
    starts, ends = [], []
    for number, block in keys:
        check_range(table, number, 0, 0)
        item = table.items[number]
        lead = item.raw_at - item.at
        starts.append(max(0, block * block_nbytes - lead))
        ends.append(min(item.nbytes, (block + 1) * block_nbytes - lead))
        if starts[-1] >= ends[-1]:
            raise errors.InvalidRequest(f"item {number} has no block {block} with data in it")
    return [number for number, _ in keys], starts, ends


def spans(blocks: Sequence[StoredBlock]) -> list[tuple[int, int]]:
    """Where they lie in the segment; neighbours as one."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block.at:
            found[-1] = (found[-1][0], block.at + block.nbytes)
        else:
            found.append(block.span)
    return found


def cut(blocks: Sequence[B], nbytes: int) -> list[list[B]]:
    """The same blocks in groups of about so many bytes, in their order."""
    groups: list[list[B]] = []
    room = 0
    for block in blocks:
        if room <= 0:
            groups.append([])
            room = nbytes
        groups[-1].append(block)
        room -= block.nbytes
    return groups


def runs(blocks: Sequence[B]) -> list[list[B]]:
    """Groups blocks (in file order) that are worth one request."""
    grouped: list[list[B]] = []
    for block in blocks:
        if grouped:
            run = grouped[-1]
            end = run[-1].offset + run[-1].length
            if block.offset - end <= GAP_NBYTES and block.offset + block.length - run[0].offset <= REQUEST_NBYTES:
                run.append(block)
                continue
        grouped.append([block])
    return grouped


def read_run(store: Store, key: str, codec: Codec, path: Path, run: Sequence[StoredBlock]) -> int:
    """Reads, decodes, checks and writes one run of blocks; returns stored bytes read. Bad bytes are read twice."""
    start, end = run[0].offset, run[-1].offset + run[-1].length
    total = 0
    for last_try in (False, True):
        try:
            data = memoryview(store.get(key, start, end))
            total += len(data)
            with open(path, "r+b", buffering=0) as segment:
                for block in run:
                    stored = data[block.offset - start : block.offset - start + block.length]
                    write_block(segment.fileno(), codec, stored, block, key)
            return total
        except errors.NotFound as exc:
            raise errors.Corrupt(f"{key} is missing from the store, although the checkpoint's manifest names it") from exc
        except errors.Corrupt:
            if last_try:
                raise
    return total


def named(block: StoredBlock, key: str) -> str:
    """The block of the object `key`, for people."""
    return f"{key}: block {block.key[1]} of item {block.key[0]} (bytes {block.offset} to {block.offset + block.length})"


def plain_block(codec: Codec, stored: memoryview, block: StoredBlock, key: str) -> bytes:
    """The block's uncompressed bytes. Raises Corrupt that names it if they are not those that were stored."""
    where = named(block, key)
    try:
        plain = codec.decode(stored, block.nbytes)
    except errors.Corrupt as exc:
        raise errors.Corrupt(f"{where} is damaged: {exc}; load another checkpoint, as fallback=True does") from exc
    if len(plain) != block.nbytes or block_hash(plain) != block.digest:
        raise errors.Corrupt(f"{where} is damaged: its checksum does not match; load another checkpoint, as fallback=True does")
    return plain


def write_block(fd: int, codec: Codec, stored: memoryview, block: StoredBlock, key: str) -> None:
    """Verifies one block and puts it in its place."""
    view = memoryview(plain_block(codec, stored, block, key))
    written = 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], block.at + written)


def pages_nbytes(spans: Sequence[tuple[int, int]]) -> int:
    """Bytes of all pages that the spans touch; neighbours share a page."""
    total, counted_to = 0, 0
    for start, end in sorted(spans):
        total += max(0, page_up(end) - max(page_down(start), counted_to))
        counted_to = max(counted_to, page_up(end))
    return total


def page_down(at: int) -> int:
    """Where the page of this byte begins."""
    return at // PAGE * PAGE


def page_up(at: int) -> int:
    """Where the page of the byte before this one ends."""
    return -(-at // PAGE) * PAGE


def allocated(path: Path) -> int:
    """Bytes of tmpfs that the file holds."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


_LIBC = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def punch(path: Path, start: int, end: int) -> None:
    """Gives the whole pages inside the range back; neighbours on shared pages keep their bytes. No file is fine."""
    start, end = page_up(start), page_down(end)
    if start < end and path.exists():
        with open(path, "r+b", buffering=0) as segment:
            offset, length = ctypes.c_int64(start), ctypes.c_int64(end - start)
            if _LIBC.fallocate(segment.fileno(), _PUNCH_HOLE_KEEP_SIZE, offset, length) != 0:
                raise OSError(ctypes.get_errno(), f"cannot free memory of {path}")
