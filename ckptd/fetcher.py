"""Store -> memory: makes the blocks that readers ask for present, once for all of them.

A shard that is not in memory gets a sparse segment, laid out like the sealed one; blocks
are fetched, decoded, checked against their hash and written where they belong. Promises:
one fetch per block however many readers ask (single-flight), only verified bytes are ever
in a segment under a `present` answer, memory is reserved before it is touched, and a
block that somebody reads is not given up. Never reads more of a file than blocks need.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from ckptd import errors, manifest
from ckptd.arena import Arena
from ckptd.blocks import Key, StoredBlock, allocated, pages_nbytes, punch, read_run, runs
from ckptd.codec import Codec, parse
from ckptd.model import CheckpointId, data_key
from ckptd.segment import Segment
from ckptd.store import Store
from ckptd.v1.manifest_pb2 import Manifest, StoredShard


@dataclass(slots=True)
class Cached:
    """The sparse segment of one stored shard, and which of its blocks are there or on their way."""

    shard: StoredShard
    object_key: str
    codec: Codec
    block_nbytes: int
    segment: Segment
    fetching: int = 0
    waiting: int = 0
    blocks: dict[Key, asyncio.Future[None]] = field(default_factory=dict)
    places: dict[Key, StoredBlock] = field(default_factory=dict)
    pins: Counter[Key] = field(default_factory=Counter)

    @property
    def busy(self) -> bool:
        """Somebody needs the segment as it is: it cannot be evicted whole."""
        return bool(self.pins or self.fetching or self.waiting)

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
        return [cached.segment.token for cached in self.cached.values() if not cached.busy]

    def evicted(self, token: str) -> None:
        for key, cached in list(self.cached.items()):
            if cached.segment.token == token:
                del self.cached[key]

    def find(self, contents: Manifest, shard: int, items: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Blocks:
        """The blocks of one shard of a durable checkpoint under byte ranges of its items."""
        cached = self._open(contents, shard)
        return Blocks(cached, cached.find(items, starts, ends))

    async def present(self, contents: Manifest, shard: int, wanted: Sequence[StoredBlock], deadline: float | None) -> Blocks:
        """Returns when all the blocks are there; they are pinned then, and the caller unpins them with `release`.

        Nothing is pinned, and no block is on its way, while memory is waited for: whoever holds something
        or is waited for by others ends without needing more. Raises Corrupt if a block is not what was
        stored, ArenaFull if there is no memory for it, and what the store raises; then nothing stays pinned.
        """
        cached = self._open(contents, shard)
        missing = await self._reserve(cached, wanted, deadline)
        blocks = Blocks(cached, list(wanted))
        cached.pins.update(block.key for block in wanted)
        if missing.blocks:
            self._start(cached, missing)
        try:
            # All are looked up before the first is awaited: one that fails is forgotten at once.
            for there in [cached.blocks[block.key] for block in wanted]:
                await asyncio.shield(there)
        except BaseException:
            self.release(blocks)
            raise
        return blocks

    async def _reserve(self, cached: Cached, wanted: Sequence[StoredBlock], deadline: float | None) -> Missing:
        """Memory for what is neither there nor on its way by now; what that is may change while it waits."""
        token = cached.segment.token
        cached.waiting += 1
        try:
            while True:
                missing = [block for block in wanted if block.key not in cached.blocks]
                nbytes = pages_nbytes([block.span for block in missing])
                if not missing:
                    return Missing([], 0)
                asyncio.get_running_loop().call_soon(self._make_way)
                await self.arena.reserve(token, nbytes, deadline)
                still = [block for block in wanted if block.key not in cached.blocks]
                if pages_nbytes([block.span for block in still]) <= nbytes:
                    if not still:
                        self.arena.charge(token, allocated(cached.segment.path), settled=nbytes)
                    return Missing(still, nbytes if still else 0)
                # Something of it was given up meanwhile, for somebody else who waits.
                self.arena.charge(token, allocated(cached.segment.path), settled=nbytes)
        finally:
            cached.waiting -= 1

    def _open(self, contents: Manifest, shard: int) -> Cached:
        key = (contents.summary.attempt, shard)
        cached = self.cached.pop(key, None)
        if cached is not None and not cached.segment.path.exists() and not cached.busy:
            self.arena.drop(cached.segment.token)  # somebody removed the file
            cached = None
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

    def _start(self, cached: Cached, missing: Missing) -> None:
        """Begins to fetch, in a task of its own: a reader that is cancelled must not fail those who wait for the same blocks."""
        loop = asyncio.get_running_loop()
        for block in missing.blocks:
            cached.blocks[block.key] = loop.create_future()
            cached.places[block.key] = block
        cached.fetching += 1
        task = asyncio.create_task(self._fetch(cached, missing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release(self, blocks: Blocks) -> None:
        """The reader has copied the blocks."""
        pins = blocks.cached.pins
        for block in blocks.blocks:
            pins[block.key] -= 1
            if pins[block.key] <= 0:
                del pins[block.key]
        self._make_way()
        self.arena.poke()

    async def _fetch(self, cached: Cached, missing: Missing) -> None:
        """Fetches the blocks and tells all who wait for them; raises nothing."""
        failure: Exception | None = None
        try:
            await self._read(cached, missing.blocks)
        except asyncio.CancelledError:
            failure = errors.Unavailable("the daemon is shutting down")
        except Exception as exc:  # noqa: BLE001 - whoever waits raises it
            failure = exc
        for block in missing.blocks:
            if failure is None:
                cached.blocks[block.key].set_result(None)
            else:
                waiting = cached.blocks.pop(block.key)
                waiting.set_exception(failure)
                waiting.exception()  # all who waited may be gone
        cached.fetching -= 1
        self.arena.charge(cached.segment.token, allocated(cached.segment.path), settled=missing.reserved)
        self._make_way()

    async def _read(self, cached: Cached, blocks: Sequence[StoredBlock]) -> None:
        loop = asyncio.get_running_loop()
        reads = [
            loop.run_in_executor(self.threads, read_run, self.store, cached.object_key, cached.codec, cached.segment.path, run)
            for run in runs(blocks)
        ]
        # All of them end before the reservation does, also if one fails.
        for result in await asyncio.gather(*reads, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            self.bytes_from_store += result

    def _make_way(self) -> None:
        """If somebody waits for memory by now."""
        if self.arena.waiting:
            self.give_up_unread()

    def give_up_unread(self) -> None:
        """Frees what nobody reads of shards that are in use otherwise: those cannot be evicted whole."""
        for cached in self.cached.values():
            if not cached.busy:
                continue
            idle = [key for key, there in cached.blocks.items() if there.done() and key not in cached.pins]
            if not idle:
                continue
            for key in idle:
                del cached.blocks[key]
            kept = sorted(cached.places[key].span for key in cached.blocks)
            free_from = 0
            for start, end in [*kept, (cached.segment.nbytes, cached.segment.nbytes)]:
                punch(cached.segment.path, free_from, start)
                free_from = end
            self.arena.charge(cached.segment.token, allocated(cached.segment.path))


@dataclass(frozen=True, slots=True)
class Missing:
    """Blocks to fetch, and the bytes of memory that are reserved for them."""

    blocks: list[StoredBlock]
    reserved: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one cached shard."""

    cached: Cached
    blocks: list[StoredBlock]
