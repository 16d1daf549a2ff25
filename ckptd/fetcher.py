"""Store and peers -> memory: makes the blocks that readers ask for present, once for all of them.

A shard that is not in memory gets a sparse segment, laid out like the sealed one; blocks
come from other nodes, where the caller has a way to them, and else from the store; they
are decoded, checked against their hash and written where they belong. Of a stock
checkpoint an item is one block, and checked as far as its format allows. Promises:
one fetch per block however many readers ask (single-flight), only verified bytes are ever
in a segment under a `present` answer, memory is reserved before it is touched, and a
block that somebody reads is not given up. Never reads more of a file than blocks need.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from ckptd import errors
from ckptd.arena import Arena
from ckptd.blocks import REQUEST_NBYTES, BlockShard, HeldShard, Key, StoredBlock, allocated, pages_nbytes, punch, read_run, runs
from ckptd.codec import parse
from ckptd.items import Got, ItemShard, StoredItem, check_placed, damaged
from ckptd.model import CheckpointId, data_key
from ckptd.segment import Segment
from ckptd.stock import Stock
from ckptd.store import Store
from ckptd.v1.manifest_pb2 import Manifest, Record

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held:
    """What an attempt consists of that is no checkpoint in the store: what a manifest is for one. Some of its shards may be there."""

    record: Record
    shards: list[HeldShard | BlockShard]


@dataclass(frozen=True, slots=True)
class Left:
    """Blocks that no other node gave, and why."""

    blocks: list[StoredBlock]
    why: list[str]


Contents: TypeAlias = Manifest | Stock | Held
#: Puts blocks that other nodes have where they belong in a file, and raises nothing.
Elsewhere: TypeAlias = Callable[[Path, Sequence[StoredBlock]], Awaitable[Left]]


@dataclass(slots=True)
class Cached:
    """The sparse segment of one shard, and which of its blocks are there or on their way."""

    shard: BlockShard | ItemShard | HeldShard
    segment: Segment
    fetching: int = 0
    waiting: int = 0
    blocks: dict[Key, asyncio.Future[None]] = field(default_factory=dict)
    places: dict[Key, StoredBlock] = field(default_factory=dict)
    pins: Counter[Key] = field(default_factory=Counter)
    #: Of items: how many bytes each really has, by its number.
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Somebody needs the segment as it is: it cannot be evicted whole."""
        return bool(self.pins or self.fetching or self.waiting)


class Fetcher:
    """The sparse segments of this node. Lives on the loop; reads and decodes in `threads`."""

    def __init__(self, store: Store, arena: Arena, threads: Executor) -> None:
        self.store = store
        self.arena = arena
        self.threads = threads
        self.cached: dict[tuple[str, str, int], Cached] = {}
        self.bytes_from_store = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def victims(self) -> list[str]:
        """Segments of which nobody reads a block, least recently asked for first."""
        return [cached.segment.token for cached in self.cached.values() if not cached.busy]

    def evicted(self, token: str) -> None:
        for key, cached in list(self.cached.items()):
            if cached.segment.token == token:
                del self.cached[key]

    def find(self, contents: Contents, shard: int, items: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Blocks:
        """The blocks of one shard under byte ranges of its items."""
        cached = self._open(contents, shard)
        found = contents.shards[shard] if isinstance(contents, Held) else cached.shard
        return Blocks(cached, list(found.find(items, starts, ends)))

    async def present(
        self,
        contents: Contents,
        shard: int,
        wanted: Sequence[StoredBlock],
        deadline: float | None,
        elsewhere: Elsewhere | None = None,
    ) -> Blocks:
        """Returns when all the blocks are there; they are pinned then, and the caller unpins them with `release`.

        What is not there comes from `elsewhere`, as far as that gives it, and else from the store.
        Nothing is pinned, and no block is on its way, while memory is waited for: whoever holds something
        or is waited for by others ends without needing more. Raises Corrupt if a block is not what was
        stored, ArenaFull if there is no memory for it, Unavailable if only memory has the attempt and nobody
        gave a block, and what the store raises; then nothing stays pinned.
        """
        cached = self._open(contents, shard)
        missing = await self._reserve(cached, wanted, deadline)
        blocks = Blocks(cached, list(wanted))
        cached.pins.update(block.key for block in wanted)
        if missing.blocks:
            shard_read = contents.shards[shard] if isinstance(contents, Held) else cached.shard
            self._start(cached, missing, functools.partial(self._read, cached, shard_read, missing.blocks, elsewhere))
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

    def _open(self, contents: Contents, shard: int) -> Cached:
        # A copied directory has the same attempt, but files of its own.
        if isinstance(contents, Stock):
            key = ("", contents.identity, shard)
        else:
            summary = contents.record.summary if isinstance(contents, Held) else contents.summary
            key = (summary.id, summary.attempt, shard)
        cached = self.cached.pop(key, None)
        if cached is not None and not cached.segment.path.exists() and not cached.busy:
            self.arena.drop(cached.segment.token)  # somebody removed the file
            cached = None
        if cached is None:
            stored = shard_of(contents, shard)
            cached = Cached(stored, self.arena.create_cache(stored.table.end))
        elif isinstance(cached.shard, HeldShard):  # it may have become durable since
            cached.shard = shard_of(contents, shard)
        self.cached[key] = cached  # the last one is the most recently used
        return cached

    def _start(self, cached: Cached, missing: Missing, read: Callable[[], Awaitable[None]]) -> None:
        """Begins to fetch, in a task of its own: a reader that is cancelled must not fail those who wait for the same blocks."""
        loop = asyncio.get_running_loop()
        for block in missing.blocks:
            cached.blocks[block.key] = loop.create_future()
            cached.places[block.key] = block
        cached.fetching += 1
        task = asyncio.create_task(self._fetch(cached, missing, read))
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

    async def _fetch(self, cached: Cached, missing: Missing, read: Callable[[], Awaitable[None]]) -> None:
        """Fetches the blocks and tells all who wait for them; raises nothing."""
        failure: Exception | None = None
        try:
            await read()
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
        if failure is not None:
            with suppress(OSError):
                self._free_rest(cached)
        cached.fetching -= 1
        self.arena.charge(cached.segment.token, allocated(cached.segment.path), settled=missing.reserved)
        self._make_way()

    async def _read(
        self,
        cached: Cached,
        shard: BlockShard | ItemShard | HeldShard,
        blocks: Sequence[StoredBlock],
        elsewhere: Elsewhere | None,
    ) -> None:
        path = cached.segment.path
        left = Left(list(blocks), []) if elsewhere is None else await elsewhere(path, blocks)
        blocks = left.blocks
        if isinstance(shard, HeldShard):
            if blocks:
                raise errors.Unavailable("; ".join(left.why) or "no node that can be reached holds the shard")
            return
        if isinstance(shard, BlockShard):
            await self._all(self._run(read_run, self.store, shard.key, shard.codec, path, run) for run in runs(blocks))
            return
        items = [block for block in blocks if isinstance(block, StoredItem)]
        small = [self._run(shard.read, self.store, path, run) for run in runs([item for item in items if not item.is_large])]
        large = [self._read_large(shard, path, item) for item in items if item.is_large]
        for got in await self._all([*small, *large]):
            cached.lengths.update(got.lengths)

    async def _read_large(self, shard: ItemShard, path: Path, item: StoredItem) -> Got:
        """An item that one thread alone would take too long for. Bad bytes are read twice."""
        parts = [(start, min(start + REQUEST_NBYTES, item.length)) for start in range(0, item.length, REQUEST_NBYTES)]
        for last_try in (False, True):
            try:
                await self._all(self._run(shard.read_part, self.store, path, item, start, end) for start, end in parts)
                await self._run(check_placed, path, item)
                break
            except errors.Corrupt as exc:
                if last_try:
                    raise damaged(item.name, exc) from exc
        return Got(0, {item.key[0]: item.length})

    async def _all(self, reads: Iterable[Awaitable[T]]) -> list[T]:
        """Their results. All of them end before the reservation does, also if one fails."""
        results = await asyncio.gather(*reads, return_exceptions=True)
        found: list[T] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            self.bytes_from_store += result.nbytes if isinstance(result, Got) else result if isinstance(result, int) else 0
            found.append(result)
        return found

    def _run(self, call: Callable[..., T], *arguments: object) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)

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
            self._free_rest(cached)
            self.arena.charge(cached.segment.token, allocated(cached.segment.path))

    def _free_rest(self, cached: Cached) -> None:
        """Gives back what is in the segment beside its blocks."""
        kept = sorted(cached.places[key].span for key in cached.blocks)
        free_from = 0
        for start, end in [*kept, (cached.segment.nbytes, cached.segment.nbytes)]:
            punch(cached.segment.path, free_from, start)
            free_from = end


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


def shard_of(contents: Contents, number: int) -> BlockShard | ItemShard | HeldShard:
    """One shard of a checkpoint."""
    if not isinstance(contents, Manifest):
        return contents.shards[number]
    stored = contents.shards[number]
    key = data_key(CheckpointId.parse(contents.summary.id), stored.file)
    return BlockShard(stored, key, parse(contents.summary.codec), contents.block_nbytes)
