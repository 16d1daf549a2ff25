"""What a reader needs to know before it asks for bytes: the metadata pickle and the tables of one checkpoint.

Of what memory holds whole they lie where they were written; of what only the store has, or other nodes'
memory, they are read once into a segment of their own. Promises: an index is of the attempt that was asked for,
or of the state of a stock checkpoint's directory, and of no other: LeaseLost says that it is
gone. Lives on the loop; never writes to the store.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptd import blockcheck, errors, stock
from ckptd.attempt import Attempt
from ckptd.blocks import BlockShard, HeldShard
from ckptd.codec import parse
from ckptd.fetcher import Fetcher, Held
from ckptd.ledger import Ledger
from ckptd.model import BLOCK_NBYTES, CheckpointId, data_key
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.pull import pull_bytes
from ckptd.questions import Questions
from ckptd.scan import Entry
from ckptd.segment import Segment
from ckptd.sighting import HERE, Sighting
from ckptd.stock import Seen, Stock
from ckptd.table import parse_table, read_range, write_range
from ckptd.v1.manifest_pb2 import Manifest, Receipt, Record, Table

log = logging.getLogger(__name__)
T = TypeVar("T")
#: How long an index waits for memory.
INDEX_SECONDS = 30.0
#: Contents kept: they never change, the names of id and attempt are theirs for good.
REMEMBERED = 4
#: Tables that are fetched from other nodes at the same time.
TABLES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a segment."""

    segment: Segment
    at: int
    nbytes: int


@dataclass(slots=True)
class Index:
    """The metadata pickle, and each shard's encoded table."""

    metadata: Piece
    tables: list[Piece]
    readers: int = 0
    parsed: list[Table] | None = None
    """The tables, of what only memory has."""

    def held(self, seen: Sighting) -> Held:
        """The shards to read from."""
        assert seen.record is not None
        assert self.parsed is not None
        summary = seen.record.summary
        shards: list[HeldShard | BlockShard] = []
        for table, receipt in zip(self.parsed, seen.record.shards, strict=True):
            if seen.holders.get(receipt.token) or receipt.rank not in seen.stored:
                shards.append(HeldShard(table))
                continue
            stored = seen.stored[receipt.rank]
            shards.append(BlockShard(stored, data_key(CheckpointId.parse(summary.id), stored.file), parse(summary.codec), BLOCK_NBYTES))
        return Held(seen.record, shards)


class Indexes:
    """The indexes of what this node reads."""

    def __init__(self, node: Node, ledger: Ledger, fetcher: Fetcher, questions: Questions, peers: Peers, served: Counter[str]) -> None:
        self.node = node
        self.ledger = ledger
        self.fetcher = fetcher
        self.questions = questions
        self.peers = peers
        self.served = served
        self._looks = stock.Looks(fetcher.store)
        self._contents: dict[tuple[CheckpointId, str], asyncio.Task[Manifest | Stock]] = {}
        self._indexes: dict[tuple[CheckpointId, str], asyncio.Task[Index]] = {}

    async def same(self, checkpoint: CheckpointId, name: str) -> Entry:
        """The store's entry of the attempt that a reader was told of.

        Raises LeaseLost, not NotFound, if it is not there any more: a checkpoint did exist, so nobody may start from nothing.
        """
        return (await self._same(checkpoint, name))[0]

    async def look(self, checkpoint: CheckpointId) -> Seen:
        """The directory of a stock checkpoint as it is now. Raises Corrupt, and LeaseLost if it is gone."""
        try:
            return await self.questions.ask("stock", checkpoint, self._looks.look)
        except errors.NotFound as exc:
            raise errors.LeaseLost(f"{checkpoint} was deleted since it was resolved: load again") from exc

    async def contents(self, checkpoint: CheckpointId, name: str) -> Manifest | Stock:
        """What the attempt consists of in the store."""
        key = (checkpoint, name)
        if key not in self._contents or failed(self._contents[key]):
            self._contents[key] = asyncio.create_task(self._read_contents(checkpoint, name))
            for old in list(self._contents)[:-REMEMBERED]:
                if self._contents[old].done():
                    del self._contents[old]
        return await asyncio.shield(self._contents[key])

    async def open(self, checkpoint: CheckpointId, name: str, attempt: Attempt | None, seen: Sighting | None = None) -> Index:
        """The index of the attempt, which stays until its reader has left.

        `attempt`: if memory holds any of it. `seen`: who holds what of it, if it is not to be read from the store: its
        index can give `held` then. Raises Unavailable if nobody gives a part of that.
        """
        if attempt is not None and attempt.whole:
            # Where it lies already: what was accepted can be given back however full the memory is.
            held = {token: self.node.arena.get(token) for token in attempt.tokens}
            record = attempt.record
            tables = [Piece(held[receipt.token], receipt.nbytes, receipt.table_nbytes) for receipt in record.shards]
            return Index(Piece(held[record.metadata.token], 0, record.metadata.nbytes), tables, readers=1)
        key = (checkpoint, name)
        while True:
            made = self._indexes.get(key)
            if made is not None and made.done() and not failed(made) and not made.result().metadata.segment.path.exists():
                self.node.arena.drop(made.result().metadata.segment.token)  # somebody removed the file
                made = None
            if made is None or failed(made):
                receipts = [] if attempt is None else attempt.record.shards
                here = [number for number, receipt in enumerate(receipts) if attempt is not None and receipt.token in attempt.held]
                making = self._make(checkpoint, name, here) if seen is None else self._make_held(checkpoint, seen)
                made = self._indexes[key] = asyncio.create_task(making)
            index = await asyncio.shield(made)
            if self._indexes.get(key) is made:
                break  # else its memory was taken before this reader had hold of it
        index.readers += 1
        if seen is not None and seen.record is not None and index.parsed is None:
            try:
                index.parsed = await self._in_memory(_parsed, index, seen.record)
            except BaseException:
                index.readers -= 1
                raise
        return index

    def victims(self) -> list[str]:
        """Segments whose index nobody reads."""
        return [index.metadata.segment.token for index in self._made().values() if index.readers == 0]

    def evicted(self, token: str) -> None:
        """The segment is gone."""
        for key, index in self._made().items():
            if index.metadata.segment.token == token:
                del self._indexes[key]

    def close(self) -> None:
        """Gives the segments back."""
        for index in self._made().values():
            self.node.arena.drop(index.metadata.segment.token)

    async def _make(self, checkpoint: CheckpointId, name: str, here: Sequence[int]) -> Index:
        """Reads the index from the store into a segment of its own; `here`: shards that memory holds, whose files are not needed."""
        found = await self.contents(checkpoint, name)
        entry, seen = await self._same(checkpoint, name)
        if isinstance(found, Stock):
            pickle = seen.pickle if seen is not None else b""
        else:
            try:
                pickle = await self._run(self.ledger.metadata_pickle, entry, found)
            except errors.NotFound as exc:
                raise errors.LeaseLost(f"{checkpoint} was saved again or deleted since it was resolved: load again") from exc
            sizes = await self._run(blockcheck.sizes, self.fetcher.store, checkpoint)
            wrong = [text for number, text in blockcheck.misplaced(checkpoint, found, sizes).items() if number not in here]
            if wrong:
                await self.same(checkpoint, name)  # what was deleted or replaced meanwhile is no damage
                raise errors.Corrupt(f"{'; '.join(wrong[:3])}; load another checkpoint, as fallback=True does")
        return await self._placed([pickle, *(shard.table.SerializeToString() for shard in found.shards)])

    async def _make_held(self, checkpoint: CheckpointId, seen: Sighting) -> Index:
        """Fetches the index from those that hold the shards."""
        assert seen.record is not None
        metadata, at_once = seen.record.metadata, asyncio.Semaphore(TABLES_AT_ONCE)

        async def table(receipt: Receipt) -> bytes:
            if not seen.holders.get(receipt.token) and receipt.rank in seen.stored:
                return seen.stored[receipt.rank].table.SerializeToString()
            async with at_once:
                return await self._pulled(checkpoint, seen, receipt, receipt.nbytes, receipt.nbytes + receipt.table_nbytes)

        return await self._placed(
            await asyncio.gather(self._pulled(checkpoint, seen, metadata, 0, metadata.nbytes), *map(table, seen.record.shards))
        )

    async def _pulled(self, checkpoint: CheckpointId, seen: Sighting, receipt: Receipt, start: int, end: int) -> bytes:
        """A part of what was sealed under a receipt, from whoever holds it."""
        why = []
        for address in sorted(seen.holders.get(receipt.token, [])):  # "" first: this node
            try:
                if address == HERE:
                    return await self._in_memory(read_range, self.node.arena.get(receipt.token).path, start, end - start)
                found = await pull_bytes(self.peers, address, receipt.token, start, end)
            except (KeyError, FileNotFoundError):
                why.append("this node does not hold it any more")
            except errors.CkptdError as exc:
                why.append(str(exc))
            else:
                self.served["peer"] += len(found)
                return found
        raise errors.Unavailable(f"{checkpoint}: what rank {receipt.rank} saved cannot be had ({'; '.join(why) or 'nobody holds it'})")

    async def _placed(self, parts: Sequence[bytes]) -> Index:
        """An index in a segment of its own."""
        whole = b"".join(parts)
        deadline = asyncio.get_running_loop().time() + INDEX_SECONDS
        allocated = await self.node.arena.allocate(len(whole), "", metadata=True, deadline=deadline)
        await self._in_memory(write_range, allocated.path, 0, whole)
        self.node.arena.seal(allocated.token, len(whole))
        segment = self.node.arena.get(allocated.token)
        ends = list(itertools.accumulate(map(len, parts)))
        pieces = [Piece(segment, end - len(part), len(part)) for part, end in zip(parts, ends, strict=True)]
        return Index(pieces[0], pieces[1:])

    async def _read_contents(self, checkpoint: CheckpointId, name: str) -> Manifest | Stock:
        entry, seen = await self._same(checkpoint, name)
        if seen is None:
            return await self._run(self.ledger.manifest, entry)
        found, nbytes = await self._run(stock.describe, self.fetcher.store, checkpoint, seen, self.node.arena.budget)
        self.fetcher.bytes_from_store += nbytes
        if seen.newer:
            log.warning(
                "%s: %s and %d more are newer than .metadata: they were copied so, or DCP was saving over this checkpoint and has "
                "not ended, and then nothing tells old items from new ones",
                *(checkpoint, seen.newer[0], len(seen.newer) - 1),
            )
        return found

    async def _same(self, checkpoint: CheckpointId, name: str) -> tuple[Entry, Seen | None]:
        try:
            entry = await self.questions.ask("find", checkpoint, self.ledger.find)
        except errors.NotFound as exc:
            raise errors.LeaseLost(f"{checkpoint} was deleted since it was resolved: load again") from exc
        seen = await self.look(checkpoint) if entry.attempt is None else None
        if name != (entry.attempt if seen is None else seen.identity):
            raise errors.LeaseLost(f"{checkpoint} was saved again since it was resolved: load again")
        return entry, seen

    def _made(self) -> dict[tuple[CheckpointId, str], Index]:
        return {key: task.result() for key, task in self._indexes.items() if task.done() and not failed(task)}

    async def _in_memory(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.node.memory_threads, call, *arguments)

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.fetcher.threads, call, *arguments)


def _parsed(index: Index, record: Record) -> list[Table]:
    tables = [read_range(piece.segment.path, piece.at, piece.nbytes) for piece in index.tables]
    return [parse_table(table, receipt.nbytes) for table, receipt in zip(tables, record.shards, strict=True)]


def failed(task: asyncio.Task[T]) -> bool:
    """Whether it ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)
