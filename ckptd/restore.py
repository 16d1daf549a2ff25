"""One node's loads: which attempt is meant, and where its bytes come from.

The store's last name is the truth about what is durable; memory adds what is accepted and
serves what it holds. Promises: a store that cannot be listed is an error, never "no
checkpoint"; what a reader was given stays as it is until it says `copied`; every reader of an
attempt sees that attempt and no other. Lives on the loop; never writes to the store.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from ckptd import contents, errors
from ckptd.attempt import Attempt, checkpoint_of
from ckptd.fetcher import Blocks, Fetcher
from ckptd.index import Index, Indexes
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.questions import Questions
from ckptd.scan import Entry
from ckptd.segment import Segment
from ckptd.stock import Stock
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Manifest, Summary

T = TypeVar("T")
#: How long a store that hangs may keep a reader from what memory holds whole.
PATIENCE_SECONDS = 3.0
#: Summaries kept: they never change, an attempt's name is theirs for good.
REMEMBERED_SUMMARIES = 10_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a want leads to: the shard's segment and, of a stock checkpoint, how many bytes each wanted item really has."""

    segment: Segment
    nbytes: list[int]


@dataclass(slots=True)
class Source:
    """One reader's hold on one attempt. `close` it."""

    restore: Restore
    checkpoint: Checkpoint
    attempt: Attempt | None
    index: Index
    contents: Manifest | Stock | None = None
    held: list[Blocks] = field(default_factory=list)

    @property
    def id(self) -> CheckpointId:
        return CheckpointId.parse(self.checkpoint.summary.id)

    @property
    def name(self) -> str:
        """The attempt, or the state of a stock checkpoint's directory."""
        return self.checkpoint.summary.attempt

    async def want(self, shard: int, items: Sequence[int], starts: Sequence[int], ends: Sequence[int], deadline: float | None) -> Wanted:
        """The shard's segment, with the ranges present and kept until `copied`."""
        restore = self.restore
        if shard >= len(self.index.tables):
            raise errors.InvalidRequest(f"{self.checkpoint.summary.id} has {len(self.index.tables)} shards, no shard {shard}")
        if not len(items) == len(starts) == len(ends) or any(start > end for start, end in zip(starts, ends, strict=True)):
            raise errors.InvalidRequest("a want has one start and one end per item, and no range ends before it starts")
        if self.attempt is not None:
            token = self.attempt.record.shards[shard].token
            if token in self.attempt.held and not restore.node.arena.get(token).path.exists():
                restore.node.vanished(token)
            if token in self.attempt.held:
                restore.bytes_from["memory"] += sum(ends) - sum(starts)
                return Wanted(restore.node.arena.get(token), [])
        if self.contents is None:
            self.contents = await restore.indexes.contents(self.id, self.name)
        try:
            found = restore.fetcher.find(self.contents, shard, items, starts, ends)
            restore.bytes_from["memory"] += sum(block.nbytes for block in found.blocks if block.key in found.cached.blocks)
            blocks = await restore.fetcher.present(self.contents, shard, found.blocks, deadline)
        except errors.Corrupt:
            # It may be no damage: the checkpoint was deleted or saved again, and the files that are being read with it.
            await restore.indexes.same(self.id, self.name)
            raise
        self.held.append(blocks)
        nbytes = [blocks.cached.lengths.get(item, 0) for item in items] if self.checkpoint.stock else []
        return Wanted(blocks.cached.segment, nbytes)

    def copied(self) -> None:
        """The reader has copied what it was given."""
        while self.held:
            self.restore.fetcher.release(self.held.pop())

    def close(self) -> None:
        """Lets go of everything."""
        self.copied()
        self.index.readers -= 1
        self.restore.readers.subtract([self.id])
        self.restore.readers += Counter()  # what nobody reads is forgotten
        if self.attempt is not None:
            self.restore.node.unpin(self.attempt.name)
        self.restore.node.arena.poke()


class Restore:
    """What one daemon knows and does about loads."""

    def __init__(self, node: Node, ledger: Ledger, fetcher: Fetcher, threads: Executor) -> None:
        self.node = node
        self.ledger = ledger
        self.fetcher = fetcher
        self.threads = threads
        self.questions = Questions(threads)
        self.bytes_from: Counter[str] = Counter(memory=0, peer=0, store=0)
        self.indexes = Indexes(node, ledger, fetcher, self.questions)
        self.readers: Counter[CheckpointId] = Counter()
        self._summaries: dict[tuple[str, str], Summary] = {}
        node.caches.append((fetcher.victims, fetcher.evicted))
        node.caches.append((self.indexes.victims, self.indexes.evicted))
        node.give_up_unread = fetcher.give_up_unread

    # -- which ------------------------------------------------------------------------------

    async def resolve(self, target: CheckpointId | str, *, to_open: bool = True) -> Checkpoint:
        """The attempt that an id, or the newest of a run (given by its name), means now.

        Of a stock checkpoint, the state of its directory; not without `to_open`, for which it need not be looked at.
        """
        before = self._pending()
        entry: Entry | None
        try:
            if isinstance(target, CheckpointId):
                here = self.node.catalog.newest_of(target)
                patience = PATIENCE_SECONDS if here is not None and here.whole else None
                entry = await asyncio.wait_for(self.questions.ask("find", target, self.ledger.find), patience)
            else:
                entry = await self.questions.ask("latest", target, self.ledger.latest)
        except errors.NotFound:
            entry = None
        except (errors.Unavailable, errors.StoreError) as exc:
            return self._without_store(target, exc)
        except TimeoutError:
            return self._without_store(target, errors.Unavailable("the store does not answer"))
        meant = [a for a in self._pending(before) if (a.id == target if isinstance(target, CheckpointId) else a.id.run == target)]
        attempt = max(meant, key=lambda attempt: attempt.name, default=None)
        if attempt is not None and (entry is None or attempt.name > entry.order):
            return checkpoint_of(attempt)
        if entry is None:
            within = "" if isinstance(target, CheckpointId) or not target else f" in run {target!r}"
            what = f"no checkpoint {target}" if isinstance(target, CheckpointId) else f"no checkpoint{within}"
            raise errors.NotFound(f"{what} in {self.fetcher.store.url} or in memory; `ckptd list` shows what is there")
        return await (self.readable(entry) if to_open else self._line(entry))

    async def readable(self, entry: Entry) -> Checkpoint:
        """One durable checkpoint, as a reader opens it. Raises Corrupt if not even its summary can be read."""
        line = await self._line(entry)
        if line.stock:
            line.summary.attempt = (await self.indexes.look(entry.id)).identity
        return line

    async def checkpoints(self, run: str | None) -> list[Checkpoint]:
        """One per id, by run, step and name: the newest restorable attempt, or why there is none."""
        before = self._pending()
        found = await self.questions.ask("scan", run, self.ledger.scan)
        entries, incomplete = found.entries, found.incomplete
        lines = {entry.id: line for entry, line in zip(entries, await self._durable(entries), strict=True)}
        orders = {entry.id: entry.order for entry in entries}
        ended = [a for a in self.node.catalog.attempts.values() if a.ended and a.state != Checkpoint.ABORTED and a.id not in lines]
        for attempt in sorted([*ended, *self._pending(before)], key=lambda a: (a.restorable, a.name)):
            if (run is None or attempt.id.run == run) and attempt.name > orders.get(attempt.id, ""):
                lines[attempt.id] = checkpoint_of(attempt)
        for checkpoint, reason in incomplete:
            if checkpoint not in lines and (run is None or checkpoint.run == run):
                lines[checkpoint] = Checkpoint(summary=Summary(id=str(checkpoint)), state=Checkpoint.INCOMPLETE, reason=reason)
        ordered = [lines[checkpoint] for checkpoint in sorted(lines, key=lambda c: (c.run, c.step is not None, c.step or 0, c.name))]
        contents.mark_abandoned(ordered)
        return ordered

    # -- reading ----------------------------------------------------------------------------

    async def open(self, checkpoint: CheckpointId, name: str) -> Source:
        """Takes hold of the attempt: from memory if any of it is here, else from the store."""
        attempt = self.node.catalog.attempts.get(name)
        if attempt is not None and attempt.id != checkpoint:
            attempt = None  # a copy of the directory has the same attempt
        if attempt is not None:
            for token in sorted(attempt.held):
                # The first that is gone may have taken the others with it.
                if token in attempt.held and not self.node.arena.get(token).path.exists():
                    self.node.vanished(token)
            if not attempt.held or attempt.state in (Checkpoint.ABORTED, Checkpoint.LOST):
                attempt = None
        if attempt is not None:
            self.node.catalog.pin(name)
        try:
            if attempt is not None:
                line = checkpoint_of(attempt)
            else:
                line = await self._opened(checkpoint, name)
            index = await self.indexes.open(checkpoint, name, attempt)
        except BaseException:
            if attempt is not None:
                self.node.unpin(name)
            raise
        source = Source(self, line, attempt, index)
        self.readers[source.id] += 1
        return source

    def reading(self) -> set[CheckpointId]:
        """What is being read at this moment."""
        return set(+self.readers)

    def close(self) -> None:
        """Gives the index segments back."""
        self.indexes.close()

    # -- inside -----------------------------------------------------------------------------

    def _pending(self, before: Sequence[Attempt] = ()) -> list[Attempt]:
        """Restorable attempts that the store need not have: what is durable, the store decides, not memory.

        `before`: those of a moment ago. One that has become durable since may be missing from an answer
        that the store gave meanwhile, and counts still.
        """
        now = [a for a in self.node.catalog.attempts.values() if a.restorable and a.state != Checkpoint.DURABLE]
        return [*now, *(attempt for attempt in before if attempt.restorable and attempt not in now)]

    def _without_store(self, target: CheckpointId | str, error: errors.Unavailable | errors.StoreError) -> Checkpoint:
        """What can be said while the store cannot be read: an id that memory holds whole, and nothing about the newest."""
        if isinstance(target, CheckpointId):
            attempt = self.node.catalog.newest_of(target)
            if attempt is None or not attempt.whole:
                raise error
            return checkpoint_of(attempt)
        here = self.node.catalog.latest(target)
        hint = f"; memory holds {here.id}: load it by its id if you know that it is the newest" if here is not None else ""
        raise type(error)(f"the newest checkpoint is not known while the store cannot be read: {error}{hint}") from error

    async def _opened(self, checkpoint: CheckpointId, name: str) -> Checkpoint:
        """What only the store has. Ours never changes: all readers of it together ask the store once."""
        found = await self.indexes.contents(checkpoint, name)
        if isinstance(found, Manifest) and found.summary.id == str(checkpoint):
            return Checkpoint(summary=found.summary, state=Checkpoint.DURABLE)
        line = await self._line(await self.indexes.same(checkpoint, name))
        line.summary.attempt = name
        return line

    async def _line(self, entry: Entry) -> Checkpoint:
        line = (await self._durable([entry]))[0]
        if line.state != Checkpoint.DURABLE:
            raise errors.Corrupt(line.reason)
        return line

    async def _durable(self, entries: Sequence[Entry]) -> list[Checkpoint]:
        """What the store knows of each; one that is damaged is incomplete, with the reason."""
        unknown = [entry for entry in entries if entry.save_id is None or (str(entry.id), entry.save_id) not in self._summaries]
        found = await self._run(self.ledger.summaries, unknown) if unknown else []
        fresh = dict(zip([entry.id for entry in unknown], found, strict=True))
        lines = []
        for entry in entries:
            key = (str(entry.id), entry.save_id or "")
            summary = fresh.get(entry.id) or self._summaries[key]
            if isinstance(summary, errors.Corrupt):
                lines.append(Checkpoint(summary=Summary(id=str(entry.id)), state=Checkpoint.INCOMPLETE, reason=str(summary)))
                continue
            if entry.save_id is not None and len(self._summaries) < REMEMBERED_SUMMARIES:
                self._summaries[key] = summary
            lines.append(Checkpoint(summary=summary, state=Checkpoint.DURABLE, stock=entry.attempt is None, pinned=entry.pinned))
        return lines

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)
