"""Store -> memory: makes the blocks that readers ask for present, once for all of them.

A shard that is not in memory gets a sparse segment, laid out like the sealed one; blocks
are fetched, decoded, checked against their hash and written where they belong. Promises:
one fetch per block however many readers ask (single-flight), only verified bytes are ever
in a segment under a `present` answer, memory is reserved before it is touched, and a
block that somebody reads is not given up. Never reads more of a file than blocks need.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from ckptd import errors, manifest
from ckptd.arena import Arena
from ckptd.codec import Codec, block_hash, parse
from ckptd.ledger import data_key
from ckptd.model import CheckpointId
from ckptd.segment import Segment
from ckptd.store import Store
from ckptd.v1.manifest_pb2 import Manifest, StoredShard

#: Stored bytes per request to the store, at most; runs of blocks are read in one request.
REQUEST_NBYTES = 16 * 1024 * 1024
#: Stored bytes between two wanted blocks that are cheaper to read than to skip.
GAP_NBYTES = 128 * 1024
PAGE = os.sysconf("SC_PAGE_SIZE")
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


@dataclass(slots=True)
class Cached:
    """The sparse segment of one stored shard, and which of its blocks are there or on their way."""

    shard: StoredShard
    object_key: str
    codec: Codec
    block_nbytes: int
    segment: Segment
    reserved: int = 0
    blocks: dict[Key, asyncio.Future[None]] = field(default_factory=dict)
    places: dict[Key, StoredBlock] = field(default_factory=dict)
    pins: Counter[Key] = field(default_factory=Counter)

    def find(self, items: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[StoredBlock]:
        """The blocks under byte ranges of items (relative to each item's first raw byte), in file order."""
        table = self.shard.table
        found: dict[Key, StoredBlock] = {}
        for number, start, end in zip(items, starts, ends, strict=True):
            if number >= len(table.items) or not 0 <= start <= end <= table.items[number].nbytes:
                raise errors.InvalidRequest(f"bytes {start} to {end} of item {number} are not in the shard")
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


class Fetcher:
    """The sparse segments of this node. Lives on the loop; reads and decodes in `threads`."""

    def __init__(self, store: Store, arena: Arena, threads: Executor) -> None:
        self.store = store
        self.arena = arena
        self.threads = threads
        self.cached: dict[tuple[str, int], Cached] = {}
        self.bytes_from_store = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def victims(self) -> list[str]:
        """Segments of which nobody reads a block, least recently asked for first."""
        return [cached.segment.token for cached in self.cached.values() if not cached.pins]

    def evicted(self, token: str) -> None:
        for key, cached in list(self.cached.items()):
            if cached.segment.token == token:
                del self.cached[key]

    def open(self, contents: Manifest, shard: int) -> Cached:
        """The sparse segment for one shard of a durable checkpoint (made if there is none)."""
        key = (contents.summary.attempt, shard)
        cached = self.cached.pop(key, None)
        if cached is None:
            stored = contents.shards[shard]
            cached = Cached(
                shard=stored,
                object_key=data_key(CheckpointId.parse(contents.summary.id), stored.file),
                codec=parse(contents.summary.codec),
                block_nbytes=contents.block_nbytes,
                segment=self.arena.create_cache(stored.table.end),
            )
        self.cached[key] = cached  # the last one is the most recently used
        return cached

    async def present(self, cached: Cached, blocks: Sequence[StoredBlock], deadline: float | None) -> None:
        """Pins the blocks and returns when all are there; the caller unpins them with `release`.

        Raises Corrupt if a block is not what was stored, ArenaFull if there is no memory for it, and
        what the store raises; then nothing stays pinned.
        """
        cached.pins.update(block.key for block in blocks)
        try:
            missing = [block for block in blocks if block.key not in cached.blocks]
            if missing:
                loop = asyncio.get_running_loop()
                for block in missing:
                    cached.blocks[block.key] = loop.create_future()
                    cached.places[block.key] = block
                # A task of its own: a reader that is cancelled must not fail those who wait for the same blocks.
                cached.pins.update(block.key for block in missing)
                task = asyncio.create_task(self._fetch(cached, missing, deadline))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            for block in blocks:
                await asyncio.shield(cached.blocks[block.key])
        except BaseException:
            self.release(cached, blocks)
            raise

    def release(self, cached: Cached, blocks: Sequence[StoredBlock]) -> None:
        for block in blocks:
            cached.pins[block.key] -= 1
            if cached.pins[block.key] <= 0:
                del cached.pins[block.key]
        if self.arena.waiting:
            self._give_up_unread()
        self.arena.poke()

    async def _fetch(self, cached: Cached, missing: list[StoredBlock], deadline: float | None) -> None:
        """Fetches the blocks and tells all who wait for them; raises nothing."""
        failure: Exception | None = None
        try:
            await self._read(cached, missing, deadline)
        except asyncio.CancelledError:
            failure = errors.Unavailable("the daemon is shutting down")
        except Exception as exc:  # noqa: BLE001 - whoever waits raises it
            failure = exc
        for block in missing:
            if failure is None:
                cached.blocks[block.key].set_result(None)
            else:
                waiting = cached.blocks.pop(block.key)
                waiting.set_exception(failure)
                waiting.exception()  # all who waited may be gone
        self.release(cached, missing)

    async def _read(self, cached: Cached, missing: list[StoredBlock], deadline: float | None) -> None:
        needed = sum(page_up(block.at + block.nbytes) - page_down(block.at) for block in missing)
        reserving = asyncio.create_task(self.arena.reserve(cached.segment.token, needed, deadline))
        await asyncio.sleep(0)
        if not reserving.done():
            self._give_up_unread()
        await reserving
        cached.reserved += needed
        loop = asyncio.get_running_loop()
        try:
            reads = [
                loop.run_in_executor(self.threads, read_run, self.store, cached.object_key, cached.codec, cached.segment.path, run)
                for run in runs(missing)
            ]
            # All of them end before the reservation does, also if one fails.
            for result in await asyncio.gather(*reads, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                self.bytes_from_store += result
        finally:
            cached.reserved -= needed
            self._charge(cached)

    def _charge(self, cached: Cached) -> None:
        """Corrects what the segment is charged: what it holds, and what is reserved for fetches under way."""
        segment = cached.segment
        self.arena.charge(segment.token, min(segment.charged, allocated(segment.path) + cached.reserved))

    def _give_up_unread(self) -> None:
        """Frees unread blocks of shards of which others are read: such a shard cannot be evicted whole."""
        for cached in self.cached.values():
            idle = [key for key, there in cached.blocks.items() if there.done() and key not in cached.pins]
            if idle and cached.pins:
                for key in idle:
                    block = cached.places[key]
                    punch(cached.segment.path, block.at, block.nbytes)
                    del cached.blocks[key]
                self._charge(cached)


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


def punch(path: Path, at: int, nbytes: int) -> None:
    """Gives the whole pages inside the range back; neighbours on shared pages keep their bytes."""
    start, end = page_up(at), page_down(at + nbytes)
    if start < end:
        with open(path, "r+b", buffering=0) as segment:
            offset, length = ctypes.c_int64(start), ctypes.c_int64(end - start)
            if _LIBC.fallocate(segment.fileno(), _PUNCH_HOLE_KEEP_SIZE, offset, length) != 0:
                raise OSError(ctypes.get_errno(), f"cannot free memory of {path}")
