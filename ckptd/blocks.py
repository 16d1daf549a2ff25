"""Blocks of stored shards: read from the store, checked, and put in their place in a segment.

Promises: what does not match its hash is never written; blocks that lie together are read in one
request. Knows nothing of readers, memory budgets or what else a segment holds. All calls block.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptd import errors
from ckptd.codec import Codec, block_hash
from ckptd.store import Store

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


def runs(blocks: Sequence[StoredBlock]) -> list[list[StoredBlock]]:
    """Groups blocks (in file order) that are worth one request."""
    grouped: list[list[StoredBlock]] = []
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


def write_block(fd: int, codec: Codec, stored: memoryview, block: StoredBlock, key: str) -> None:
    """Verifies one block and puts it in its place."""
    where = f"{key}: block {block.key[1]} of item {block.key[0]} (bytes {block.offset} to {block.offset + block.length})"
    try:
        plain = codec.decode(stored, block.nbytes)
    except errors.Corrupt as exc:
        raise errors.Corrupt(f"{where} is damaged: {exc}; load another checkpoint") from exc
    if len(plain) != block.nbytes or block_hash(plain) != block.digest:
        raise errors.Corrupt(f"{where} is damaged: its checksum does not match; load another checkpoint")
    view = memoryview(plain)
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
