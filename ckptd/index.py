"""What a reader needs to know before it asks for bytes: the metadata pickle and the tables of one checkpoint.

Of what memory holds whole they lie where they were written; of what only the store has they are
read once into a segment of their own. Promises: an index is of the attempt that was asked for,
or of the state of a stock checkpoint's directory, and of no other: LeaseLost says that it is
gone. Lives on the loop; never writes to the store.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptd import blockcheck, errors, stock
from ckptd.attempt import Attempt
from ckptd.fetcher import Fetcher
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.questions import Questions
from ckptd.scan import Entry
from ckptd.segment import Segment
from ckptd.stock import Seen, Stock
from ckptd.table import write_range
from ckptd.v1.manifest_pb2 import Manifest

log = logging.getLogger(__name__)
T = TypeVar("T")
#: How long an index waits for memory.
INDEX_SECONDS = 30.0
#: Contents kept: they never change, the names of id and attempt are theirs for good.
REMEMBERED = 4


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


class Indexes:
    """The indexes of what this node reads."""

    def __init__(self, node: Node, ledger: Ledger, fetcher: Fetcher, questions: Questions) -> None:
        self.node = node
        self.ledger = ledger
        self.fetcher = fetcher
        self.questions = questions
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

    async def open(self, checkpoint: CheckpointId, name: str, attempt: Attempt | None) -> Index:
        """The index of the attempt (`attempt`, if memory holds any of it), which stays until its reader has left."""
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
                made = self._indexes[key] = asyncio.create_task(self._make(checkpoint, name, here))
            index = await asyncio.shield(made)
            if self._indexes.get(key) is made:
                break  # else its memory was taken before this reader had hold of it
        index.readers += 1
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
                raise errors.Corrupt(f"{'; '.join(wrong[:3])}; load another checkpoint")
        parts = [pickle, *(shard.table.SerializeToString() for shard in found.shards)]
        whole = b"".join(parts)
        deadline = asyncio.get_running_loop().time() + INDEX_SECONDS
        allocated = await self.node.arena.allocate(len(whole), "", metadata=True, deadline=deadline)
        await self._run(write_range, allocated.path, 0, whole)
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

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.fetcher.threads, call, *arguments)


def failed(task: asyncio.Task[T]) -> bool:
    """Whether it ended without a result."""
    return task.done() and (task.cancelled() or task.exception() is not None)
