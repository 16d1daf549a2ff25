"""One node's loads: which attempt is meant, and where its bytes come from.

The store's last name is the truth about what is durable; memory, this node's and that of others,
adds what is accepted and serves what it holds. Promises: a store that cannot be listed is an error,
never "no checkpoint"; what no node and no store has whole is never meant by `latest`; every reader
of an attempt sees that attempt and no other. Lives on the loop; never writes to the store.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ckptd import contents, errors
from ckptd.attempt import Attempt, checkpoint_of
from ckptd.fetcher import Fetcher, Held
from ckptd.index import Index, Indexes
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.nearby import Nearby
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.questions import Questions
from ckptd.reading import Source, Ways
from ckptd.ring import LOST_SECONDS
from ckptd.scan import Entry
from ckptd.sighting import GONE, Sighting, not_reached
from ckptd.summaries import Summaries
from ckptd.survey import KnownDamage
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Manifest, Record, Summary
from ckptd.whereabouts import Whereabouts

log = logging.getLogger(__name__)
#: How long a store that hangs may keep a reader from what memory holds whole.
PATIENCE_SECONDS = 3.0
#: So often the log has the same of what cannot be read.
LOG_AGAIN_SECONDS = 60.0
_SECONDS = re.compile(r"\d+ s\b")


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader of an attempt gets hold of."""

    line: Checkpoint
    index: Index
    contents: Held | None
    record: Record | None


class Restore:
    """What one daemon knows and does about loads."""

    def __init__(
        self, node: Node, ledger: Ledger, fetcher: Fetcher, threads: Executor, known: KnownDamage, *, peers: Peers | None = None
    ) -> None:
        self.node = node
        self.ledger = ledger
        self.fetcher = fetcher
        self.threads = threads
        self.known = known
        self.questions = Questions(threads)
        self.bytes_from: Counter[str] = Counter(memory=0, peer=0, store=0)
        self.peers = Peers(node.address) if peers is None else peers
        self.whereabouts = Whereabouts(node, fetcher.store, self.peers, self.questions)
        self.indexes = Indexes(node, ledger, fetcher, self.questions, self.peers, self.bytes_from)
        self.readers: Counter[CheckpointId] = Counter()
        nearby = Nearby(self.peers, self.whereabouts, node.memory_threads, self.bytes_from)
        self.ways = Ways(node, fetcher, self.indexes, self.whereabouts, nearby, self.bytes_from, self.readers)
        self.summaries = Summaries(ledger, threads)
        #: What the log was told lately of what cannot be read, and when (monotonic).
        self._logged: dict[str, float] = {}
        node.caches.append((fetcher.victims, fetcher.evicted))
        node.caches.append((self.indexes.victims, self.indexes.evicted))
        node.give_up_unread = fetcher.give_up_unread

    # -- which ------------------------------------------------------------------------------

    async def resolve(self, target: CheckpointId | str, *, to_open: bool = True) -> Checkpoint:
        """The attempt that an id, or the newest of a run (given by its name), means now.

        Of a stock checkpoint, the state of its directory; not without `to_open`, for which it need not be looked at.
        """
        before = self._pending()
        # Before the store is asked: what becomes durable meanwhile is in its answer.
        seen = await self.whereabouts.survey(target)
        entry: Entry | None
        try:
            if isinstance(target, CheckpointId):
                here = self.node.catalog.newest_of(target)
                in_memory = (here is not None and here.whole) or any(one.restorable for one in seen.values())
                patience = PATIENCE_SECONDS if in_memory else None
                async with asyncio.timeout(patience):
                    entry = await self.questions.ask("find", target, self.ledger.find)
            else:
                entry = await self.questions.ask("latest", target, self.ledger.latest)
        except errors.NotFound:
            entry = None
        except (errors.Unavailable, errors.StoreError) as exc:
            return await self._without_store(target, seen, exc)
        except TimeoutError:
            return await self._without_store(target, seen, errors.Unavailable("the store does not answer"))
        if entry is not None and entry.attempt is not None:  # a later save has to be newer, whatever the clocks of the nodes say
            self.node.catalog.learn(entry.id.run, entry.attempt)
        meant = self._meant(target, self._pending(before), seen)
        newest = max(meant, default="")
        if newest and (entry is None or newest > entry.order):
            return self.with_what_is_newer(meant[newest], newest, seen)
        if entry is None:
            within = "" if isinstance(target, CheckpointId) or not target else f" in run {target!r}"
            what = f"no checkpoint {target}" if isinstance(target, CheckpointId) else f"no checkpoint{within}"
            parts = [one for _, one in sorted(seen.items()) if _shared(one) and one.missing and one.state not in GONE]
            silent = self.whereabouts.silent()
            why = f" ({parts[-1].summary.id}: {parts[-1].line().reason}{self._distrust(parts[-1])})" if parts else ""
            if silent and not why:
                how = self.peers.distrust(silent[0]) or "does not answer"
                why = f" that could be reached: the ckptd daemon at {silent[0]} {how}, and may hold one"
            elif not why:
                why = "".join(f"; the ckptd daemon at {a}, which may hold one, {how}" for a, how in self._away())
            if silent or any(not self._given_up(one) for one in parts):  # nobody may start from nothing because a node is slow to come back
                raise errors.Unavailable(f"{what} in {self.fetcher.store.url} or in memory{why}; retry in some seconds")
            raise errors.NotFound(f"{what} in {self.fetcher.store.url} or in memory{why}; `ckptd list` shows what is there")
        line = await (self.readable(entry) if to_open else self.summaries.line(entry))
        return self.with_what_is_newer(line, entry.order, seen)

    def with_what_is_newer(self, line: Checkpoint, order: str, seen: Mapping[str, Sighting]) -> Checkpoint:
        """Who loads it hears what is newer and cannot be read; the log has what may be newer, too. `order`: where it stands in time."""
        away = [address for address in self.peers.known if self.peers.gone_seconds(address)]
        line.not_reached.extend(not_reached(seen, order, away) if order else ())
        silent = [f"no answer comes from the ckptd daemon at {address}" for address in self.whereabouts.silent()]
        now = time.monotonic()
        self._logged = {text: at for text, at in self._logged.items() if now - at < LOG_AGAIN_SECONDS}
        for why in (*line.not_reached, *silent):
            text = f"{line.summary.id} is the newest that can be read: {why}"
            if self._logged.setdefault(_SECONDS.sub("", text), now) == now:  # every rank asks
                log.warning("%s", text)
        return line

    async def readable(self, entry: Entry) -> Checkpoint:
        """A durable checkpoint, as a reader opens it. Raises Corrupt if not even its summary can be read."""
        line = await self.summaries.line(entry)
        if line.stock:
            line.summary.attempt = (await self.indexes.look(entry.id)).identity
        return line

    async def unstored(self, run: str) -> dict[str, Checkpoint]:
        """Restorable attempts of the run that the store does not have, at least not yet: by attempt."""
        seen = await self.whereabouts.survey(run, every=True)
        return self._meant(run, self._pending(), seen)

    async def checkpoints(self, run: str | None) -> list[Checkpoint]:
        """One per id, by run, step and name: the newest restorable attempt, or why there is none."""
        lines, trouble = await self.listing(run)
        if trouble is not None:
            raise trouble
        return lines

    async def listing(self, run: str | None) -> tuple[list[Checkpoint], errors.CkptdError | None]:
        """The same; if the store cannot be read, what memory holds, and why it cannot."""
        before = self._pending()
        seen = await self.whereabouts.survey(run, every=True)
        trouble: errors.CkptdError | None = None
        try:
            found = await self.questions.ask("scan", run, self.ledger.scan)
            entries, incomplete = found.entries, found.incomplete
        except (errors.Unavailable, errors.StoreError) as exc:
            trouble, entries, incomplete = exc, [], []
        lines = {entry.id: line for entry, line in zip(entries, await self.summaries.lines(entries), strict=True)}
        for entry in entries:
            lines[entry.id].reason = lines[entry.id].reason or self.known.of(entry)
        orders = {entry.id: entry.order for entry in entries}
        ended = [a for a in self.node.catalog.attempts.values() if a.ended and not a.joint and a.state != Checkpoint.ABORTED]
        if trouble is not None:  # else the store says what of that is there
            ended += [a for a in self.node.catalog.attempts.values() if a.state == Checkpoint.DURABLE and a.whole]
        held = [(a.restorable, a.name, a.id, checkpoint_of(a)) for a in (*ended, *self._pending(before))]
        for name, one in seen.items():
            if _shared(one) and one.state not in (Checkpoint.ABORTED, Checkpoint.DURABLE):
                held.append((one.restorable, name, CheckpointId.parse(one.summary.id), one.line()))
        lines |= {
            checkpoint: line
            for restorable, name, checkpoint, line in sorted(held, key=lambda one: one[:2])
            # What cannot be read is shown where nothing else is.
            if run in (None, checkpoint.run) and name > orders.get(checkpoint, "") and (restorable or checkpoint not in orders)
        }
        for checkpoint, reason in incomplete:
            if checkpoint not in lines and (run is None or checkpoint.run == run):
                lines[checkpoint] = Checkpoint(summary=Summary(id=str(checkpoint)), state=Checkpoint.INCOMPLETE, reason=reason)
        ordered = [lines[checkpoint] for checkpoint in sorted(lines, key=lambda c: (c.run, c.step is not None, c.step or 0, c.name))]
        contents.mark_abandoned(ordered)
        return ordered, trouble

    # -- reading ----------------------------------------------------------------------------

    async def open(self, checkpoint: CheckpointId, name: str, loading: Sequence[str] = ()) -> Source:
        """Takes hold of the attempt: from this node's memory if any of it is here, else from others' or the store.

        `loading`: addresses of the daemons of all who load it together. Raises LeaseLost if there is no such attempt
        (any more), Unavailable if a part of it cannot be reached.
        """
        for address in loading:  # its reader has just spoken to it
            self.peers.called(address)
        attempt = self._here(checkpoint, name)
        if attempt is not None:
            self.node.catalog.pin(name)
        try:
            found = await self._found(checkpoint, name, attempt)
        except BaseException:
            if attempt is not None:
                self.node.unpin(name)
            raise
        source = Source(self.ways, found.line, attempt, found.index, found.contents, found.record, tuple(loading))
        self.readers[source.id] += 1
        return source

    async def introduce(self, addresses: Sequence[str]) -> None:
        """There are daemons at these addresses, whose readers have found different things: from now on they know of each other."""
        for address in addresses:
            self.peers.called(address)
        await self.peers.introduce(addresses)

    def reading(self) -> set[CheckpointId]:
        """What is being read at this moment."""
        return set(+self.readers)

    def close(self) -> None:
        """Gives the index segments back."""
        self.indexes.close()

    # -- inside -----------------------------------------------------------------------------

    def _pending(self, before: Sequence[Attempt] = ()) -> list[Attempt]:
        """Restorable attempts of this node alone that the store need not have: what is durable, the store decides, not memory.

        `before`: those of a moment ago. One that has become durable since may be missing from an answer
        that the store gave meanwhile, and counts still.
        """
        now = [a for a in self.node.catalog.attempts.values() if not a.joint and a.restorable and a.state != Checkpoint.DURABLE]
        return [*now, *(attempt for attempt in before if attempt.restorable and attempt not in now)]

    def _away(self) -> list[tuple[str, str]]:
        """Peers that cannot be asked what they hold, the first few, and why; not those that have never been there."""
        found = []
        for address in self.peers.known:
            gone = self.peers.gone_seconds(address) if self.peers.met(address) else 0.0
            if how := self.peers.distrust(address) or (f"has not answered for {gone:.0f} s" if gone else ""):
                found.append((address, how))
        return found[:3]

    def _given_up(self, seen: Sighting) -> bool:
        """Whether nobody waits for its missing parts any more."""
        # Who answers, and does not hold what it held, will not hold it later.
        waited_for = [one for one in seen.missing if 0 < self.peers.gone_seconds(one.address) <= LOST_SECONDS]
        return seen.ended or (seen.state == Checkpoint.FAILED and not waited_for)

    def _distrust(self, seen: Sighting) -> str:
        """Why nodes that hold what is missing cannot be reached, if TLS is the reason: to be added to what is said of them."""
        missing = {receipt.address for receipt in seen.missing}
        return "".join(f"; the ckptd daemon at {a} {why}" for a in self.peers.known if a in missing and (why := self.peers.distrust(a)))

    def _here(self, checkpoint: CheckpointId, name: str) -> Attempt | None:
        """The attempt, if this node's memory holds any of it that can be read."""
        attempt = self.node.catalog.attempts.get(name)
        if attempt is None or attempt.id != checkpoint:  # a copy of the directory has the same attempt
            return None
        for token in sorted(attempt.held):
            # The first that is gone may have taken the others with it.
            if token in attempt.held and not self.node.arena.get(token).path.exists():
                self.node.vanished(token)
        ended = attempt.state == Checkpoint.ABORTED or (attempt.state == Checkpoint.LOST and not attempt.joint)
        return None if ended or not attempt.held else attempt

    async def _found(self, checkpoint: CheckpointId, name: str, attempt: Attempt | None) -> Found:
        if attempt is not None and attempt.whole:
            return Found(checkpoint_of(attempt), await self.indexes.open(checkpoint, name, attempt), None, attempt.record)
        seen, trouble = await self.whereabouts.look(checkpoint, name), ""
        for _ in range(2):
            if seen is None or not seen.restorable:
                break
            try:
                return await self._held(checkpoint, name, seen)
            except (errors.Unavailable, errors.NotFound, errors.LeaseLost) as exc:
                trouble = str(exc)  # somebody has given it up, or is gone: it may be in the store by now
                seen = await self.whereabouts.look(checkpoint, name, again=True)
        record = attempt.record if attempt is not None else seen.record if seen is not None else None
        try:
            durable = attempt if attempt is not None and attempt.state == Checkpoint.DURABLE else None
            line = await self._opened(checkpoint, name) if durable is None else checkpoint_of(durable)
            return Found(line, await self.indexes.open(checkpoint, name, attempt), None, record)
        except (errors.Unavailable, errors.StoreError):
            if seen is None or not seen.whole or seen.state == Checkpoint.ABORTED:
                raise
            return await self._held(checkpoint, name, seen)
        except errors.LeaseLost as exc:
            if seen is None or seen.ended or seen.state == Checkpoint.DURABLE:
                raise
            why = trouble or f"{seen.line().reason}{self._distrust(seen)}" or str(exc)
            raise errors.Unavailable(f"{checkpoint} cannot be read: {why}; load again") from exc

    async def _held(self, checkpoint: CheckpointId, name: str, seen: Sighting) -> Found:
        """What is no checkpoint in the store."""
        index = await self.indexes.open(checkpoint, name, None, seen)
        return Found(seen.line(), index, index.held(seen), seen.record)

    def _meant(self, target: CheckpointId | str, own: Sequence[Attempt], seen: Mapping[str, Sighting]) -> dict[str, Checkpoint]:
        """What of an id or a run memory alone can give back, by attempt."""
        meant = {attempt.name: checkpoint_of(attempt) for attempt in own if target in (attempt.id, attempt.id.run)}
        return meant | {name: one.line() for name, one in seen.items() if _shared(one) and one.restorable}

    async def _without_store(
        self, target: CheckpointId | str, seen: dict[str, Sighting], error: errors.Unavailable | errors.StoreError
    ) -> Checkpoint:
        """What can be said while the store cannot be read: an id that memory holds whole, and nothing about the newest."""
        if isinstance(target, CheckpointId):
            attempt = self.node.catalog.newest_of(target)
            held = {attempt.name: checkpoint_of(attempt)} if attempt is not None and attempt.whole else {}
            for name, one in sorted(seen.items(), reverse=True):
                if _shared(one) and one.state != Checkpoint.ABORTED:
                    found = one if one.record is not None else await self.whereabouts.look(target, name)
                    if found is not None and found.whole:
                        held[name] = found.line()
                        break
            if not held:
                raise error
            return self.with_what_is_newer(held[max(held)], max(held), seen)
        newest = max([name for name, one in seen.items() if one.restorable or one.state == Checkpoint.DURABLE], default="")
        hint = f"; memory holds {seen[newest].summary.id}: load it by its id if you know that it is the newest" if newest else ""
        raise type(error)(f"the newest checkpoint is not known while the store cannot be read: {error}{hint}") from error

    async def _opened(self, checkpoint: CheckpointId, name: str) -> Checkpoint:
        """What only the store has. Ours never changes: all readers of it together ask the store once."""
        found = await self.indexes.contents(checkpoint, name)
        if isinstance(found, Manifest) and found.summary.id == str(checkpoint):
            return Checkpoint(summary=found.summary, state=Checkpoint.DURABLE)
        line = await self.summaries.line(await self.indexes.same(checkpoint, name))
        line.summary.attempt = name
        return line


def _shared(seen: Sighting) -> bool:
    """Whether other nodes hold something of it; what this node alone holds the catalogue tells."""
    return seen.own is None or (seen.own.joint and seen.own.state != Checkpoint.ABORTED)
