"""Which nodes hold what of which attempt: this one's catalogue, and what the peers that answer say of theirs.

A hint and no truth: what is durable, the store says, and bytes are checked by whoever fetches them.
Promises: a peer that does not answer soon is left out, and named for a while, because nobody knows what it
holds; all who ask at the same time share one round of questions. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ckptd import parts
from ckptd.attempt import Attempt, bound, is_joint
from ckptd.errors import CkptdError
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.questions import Questions
from ckptd.sighting import HERE, Sighting, merged
from ckptd.store import Store
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Record, StoredShard
from ckptd.v1.peer_pb2 import Holding, HoldingsRequest

log = logging.getLogger(__name__)

#: Attempts whose holders are remembered, for those who open them later.
REMEMBERED: Final = 64
#: For so long a node that has gone is asked each time whether it is back.
ASKED_SECONDS: Final = 60.0
#: For so long it may be back any moment with something that nobody else knows of.
SILENT_SECONDS: Final = 10.0
#: Who opens an attempt so soon after it was looked for takes what was found then.
FRESH_SECONDS: Final = 5.0
#: So long a node that was there less than RECENT_SECONDS ago is waited for, if the newest attempt cannot be read without it:
#: else a daemon that is restarted would make the others go back to an older checkpoint.
PATIENCE_SECONDS: Final = 4.0
RECENT_SECONDS: Final = 10.0
PAUSE_SECONDS: Final = 0.2
#: How long the store may take to say what it has of an attempt that is not whole.
PARTS_SECONDS: Final = 3.0
#: Attempts whose record is asked for, of a run or an id, before the search for one that is restorable ends.
LOOKED_AT: Final = 16


class Whereabouts:
    """Asks, and remembers for a while. `answer` is what others are told."""

    def __init__(self, node: Node, store: Store, peers: Peers, questions: Questions) -> None:
        self.node = node
        self.store = store
        self.peers = peers
        self.questions = questions
        self._seen: dict[str, Sighting] = {}
        #: Since when, monotonic.
        self._silent: dict[str, float] = {}

    # -- what others are told ---------------------------------------------------------------

    def answer(self, request: HoldingsRequest) -> Iterator[Holding]:
        """What this node holds of what is asked for, and what of it has ended here."""
        one = request.attempt
        run = request.run if request.HasField("run") else None
        for attempt in self._own(request.id, run):
            if one and attempt.name != one:
                continue
            arena = self.node.arena
            held = [token for token in sorted(attempt.held) if token in arena and arena.get(token).path.exists()]
            record = attempt.record if request.with_record else None
            yield Holding(
                summary=attempt.record.summary,
                state=attempt.state,
                held=held,
                record=record,
                reason=attempt.reason,
                adopted=not attempt.confirmed,
            )

    # -- what others say --------------------------------------------------------------------

    async def survey(self, target: CheckpointId | str | None, *, every: bool = False) -> dict[str, Sighting]:
        """All attempts of an id, a run (by its name) or all runs (None) that this node or a peer knows of, by attempt.

        The record is known of the newest ones, until one is restorable: of all, or with `every` of each id.
        """
        return await self.questions.share("survey", (target, every), lambda: self._survey(target, every=every))

    async def look(self, id: CheckpointId, name: str, *, again: bool = False) -> Sighting | None:
        """One attempt, and who holds it; None if nobody knows of it. Remembered for a moment, unless it is to be looked for `again`."""
        seen = self._seen.get(name)
        if seen is None or again or time.monotonic() - seen.at > FRESH_SECONDS:
            seen = await self.questions.share("look", (id, name), lambda: self._look(id, name))
        return seen if seen is not None and seen.summary.id == str(id) else None

    def holders(self, name: str, token: str) -> list[str]:
        """Other nodes that hold the shard, as far as is known; which first, differs from node to node."""
        seen = self._seen.get(name)
        found = [address for address in seen.holders.get(token, []) if address != HERE] if seen is not None else []
        return sorted(found, key=lambda address: hash((self.node.name, token, address)))

    def silent(self) -> list[str]:
        """Nodes that are there, or were a moment ago, and have not answered since: what they hold is not known."""
        now = time.monotonic()
        return [address for address, since in self._silent.items() if now - since < SILENT_SECONDS]

    def failed(self, name: str, address: str) -> None:
        """That node does not give what it was said to hold of the attempt."""
        if (seen := self._seen.get(name)) is not None:
            for addresses in seen.holders.values():
                if address in addresses:
                    addresses.remove(address)

    # -- inside -----------------------------------------------------------------------------

    def _own(self, id: str, run: str | None) -> list[Attempt]:
        attempts = self.node.catalog.attempts.values()
        return [a for a in attempts if (str(a.id) == id if id else run is None or a.id.run == run)]

    async def _survey(self, target: CheckpointId | str | None, *, every: bool) -> dict[str, Sighting]:
        request = HoldingsRequest()
        if isinstance(target, CheckpointId):
            request.id = str(target)
        elif target is not None:
            request.run = target
        records: dict[str, Record] = {}
        stored: dict[str, dict[int, StoredShard]] = {}

        async def candidates(found: dict[str, Sighting]) -> None:
            groups: dict[str, list[Sighting]] = {}
            for _, seen in sorted(found.items(), reverse=True):
                groups.setdefault(seen.summary.id if every else "", []).append(seen)
            for group in groups.values():
                for seen in [seen for seen in group if seen.state not in (Checkpoint.ABORTED, Checkpoint.DURABLE)][:LOOKED_AT]:
                    seen.record = seen.record or records.get(seen.summary.attempt) or await self._record(seen)
                    if seen.record is not None:
                        records[seen.summary.attempt] = seen.record
                        await self._add_stored(seen, stored)
                    if seen.restorable:
                        break

        found = await self._rounds(request, candidates)
        for seen in found.values():
            self._remember(seen)
        return found

    async def _look(self, id: CheckpointId, name: str) -> Sighting | None:
        stored: dict[str, dict[int, StoredShard]] = {}

        async def add_stored(found: dict[str, Sighting]) -> None:
            for seen in found.values():
                seen.record = seen.record or await self._record(seen)
                await self._add_stored(seen, stored)

        found = await self._rounds(HoldingsRequest(id=str(id), attempt=name), add_stored)
        seen = found.get(name)
        if seen is not None:
            self._remember(seen)
        return seen

    async def _rounds(self, request: HoldingsRequest, complete: Callable[[dict[str, Sighting]], Any]) -> dict[str, Sighting]:
        """Asks all peers, and then those that the records of what was found name."""
        run = request.run if request.HasField("run") else None
        self._learn(attempt.record for attempt in self._own(request.id, run))
        told: dict[str, Sequence[Holding]] = {}
        asked: set[str] = set()
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            if fresh := [address for address in self._askable() if address not in asked]:
                asked.update(fresh)
                told.update(await self._ask(fresh, request))
            found = merged([a for a in self._own(request.id, run) if request.attempt in ("", a.name)], told)
            await complete(found)
            self._learn(seen.record for seen in found.values() if seen.record is not None)
            if all(address in asked for address in self._askable()):
                awaited = self._awaited(found)
                if not awaited or time.monotonic() > until:
                    return found
                asked -= awaited
                await asyncio.sleep(PAUSE_SECONDS)

    def _askable(self) -> list[str]:
        """Of those that have just gone all: a load is worth more than the moment that they cost."""
        lately = [address for address in self.peers.known if self.peers.gone_seconds(address) < ASKED_SECONDS]
        return list(dict.fromkeys([*lately, *self.peers.reachable()]))

    async def _ask(self, addresses: Sequence[str], request: HoldingsRequest) -> dict[str, Sequence[Holding]]:
        async def one(address: str) -> tuple[str, Sequence[Holding] | None]:
            try:
                told = await self.peers.call(address, "say what it holds", lambda stub: _all(stub.Holdings(request)))
            except CkptdError as exc:
                log.log(logging.DEBUG if address in self._silent else logging.INFO, "%s", exc)
                # Nothing may ever have been where the operator's list says, and refuses at once then.
                if self.peers.met(address) or isinstance(exc.__cause__, TimeoutError):
                    self._silent.setdefault(address, time.monotonic())
                return address, None
            self._silent.pop(address, None)
            return address, told

        found = await asyncio.gather(*map(one, addresses))
        return {address: told for address, told in found if told is not None}

    def _awaited(self, found: Mapping[str, Sighting]) -> set[str]:
        """Nodes that were there a moment ago and held a part of the newest pending attempt of this node: they may be starting again."""
        shared = [seen for _, seen in sorted(found.items()) if seen.own is not None and seen.own.joint and seen.own.pending]
        missing = {receipt.address for receipt in shared[-1].missing} if shared and not shared[-1].ended else set()
        return {address for address in missing if 0.0 < self.peers.gone_seconds(address) < RECENT_SECONDS}

    async def _add_stored(self, seen: Sighting, known: dict[str, dict[int, StoredShard]]) -> None:
        """Finds shards in the store, if others than those that nobody holds are held. `known`: what was found already, by attempt."""
        record, name = seen.record, seen.summary.attempt
        ended = seen.state in (Checkpoint.ABORTED, Checkpoint.DURABLE)
        if record is None or ended or not is_joint(record) or not seen.missing or not seen.holders.get(record.metadata.token):
            return
        if name not in known:
            known[name] = {}
            id = CheckpointId.parse(seen.summary.id)
            ranks = frozenset(receipt.rank for receipt in seen.missing)
            asked = self.questions.ask("parts", (id, name, ranks), lambda of: parts.find(self.store, *of).shards)
            try:
                async with asyncio.timeout(PARTS_SECONDS):
                    known[name] = await asked
            except (CkptdError, TimeoutError) as exc:
                log.info("what is in the store of %s is not known: %s", id, exc)
        seen.stored = known[name]

    async def _record(self, seen: Sighting) -> Record | None:
        """Its record, from one of those that hold something of it."""
        name = seen.summary.attempt
        if (known := self._seen.get(name)) is not None and known.record is not None:
            return known.record
        request = HoldingsRequest(id=seen.summary.id, attempt=name, with_record=True)
        for address in [address for address in seen.states if address != HERE]:
            try:
                holdings = await self.peers.call(address, f"say what {seen.summary.id} is", lambda stub: _all(stub.Holdings(request)))
            except CkptdError:
                continue
            found = merged([], {address: holdings}).get(name)
            if found is not None and found.record is not None and found.summary.id == seen.summary.id:
                return found.record
        return None

    def _learn(self, records: Iterable[Record]) -> None:
        records = list(records)
        for record in records:  # a later save has to be newer, whatever the clocks of the nodes say
            self.node.catalog.learn(CheckpointId.parse(record.summary.id).run, record.summary.attempt)
        self.peers.learn(receipt.address for record in records for receipt in bound(record) if receipt.node != self.node.name)

    def _remember(self, seen: Sighting) -> None:
        if seen.record is not None:
            self._seen.pop(seen.summary.attempt, None)
            self._seen[seen.summary.attempt] = seen
            for oldest in list(self._seen)[:-REMEMBERED]:
                del self._seen[oldest]


async def _all(call: Any) -> list[Holding]:
    return [holding async for holding in call]
