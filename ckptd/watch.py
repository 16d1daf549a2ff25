"""One node's eye on the attempts that it holds together with others, until each is durable or over.

Asks the other participants from time to time, and whenever one tells that something has happened. Promises:
what a node that is gone held is uploaded by one that has a copy, and another commits; an attempt of which a
part is in no memory and not in the store is lost after a time, and never keeps memory from later saves;
durable is only what the store says. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from ckptd import errors
from ckptd.attempt import Attempt
from ckptd.jointflush import Duty
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.ring import LOST_SECONDS, TAKEOVER_SECONDS, Judgement, View, judge, participants
from ckptd.sighting import FORGETFUL
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.peer_pb2 import TellRequest, WatchReply, WatchRequest

log = logging.getLogger(__name__)

#: Before the reason for which an attempt failed on another node.
_SAID: Final = "another node says: "
#: How often the others are asked.
ROUND_SECONDS: Final = 2.0


@dataclass(slots=True)
class _Seen:
    """What was heard of one attempt from one node."""

    fate: WatchReply.Fate | None
    #: When it was there last, by the node's clock.
    last: float
    #: When it said first that it has given up what is tried again here.
    denied: float = 0.0


class Watch:
    """Watches the joint attempts of one node."""

    def __init__(self, node: Node, peers: Peers) -> None:
        self.node = node
        self.peers = peers
        #: Told of attempts of which another node knows that all have accepted them.
        self.confirmed: Callable[[str], None] = lambda _: None
        self._seen: dict[str, dict[str, _Seen]] = {}
        #: What an earlier daemon left, and this one tries for the first time.
        self._left: set[str] = set()
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self._telling: set[asyncio.Task[object]] = set()
        node.backlog.tell = self.tell
        #: Told of every joint attempt that an earlier daemon left.
        self.taken_over: Callable[[Attempt], None] = lambda _: None

    async def forever(self) -> None:
        """Asks round after round."""
        for attempt in self._watched():
            self._left.add(attempt.name)
            self.taken_over(attempt)
        while True:
            self._woken.clear()
            await self._round()
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                continue

    def begin(self, attempt: Attempt) -> None:
        """The attempt is new here: the coordinator's node commits it, unless that is gone."""
        if next(iter(participants(attempt.record))) == self.node.name:
            self.node.backlog.duties[attempt.name] = Duty(commits=True)
        self.peers.learn(self._others(attempt).values())

    def look(self, name: str) -> None:
        """Something has happened to the attempt, here or elsewhere."""
        self.node.backlog.nudge(name)
        self.node.wake()
        self._woken.set()

    def look_at(self, attempt: Attempt) -> None:
        """The same, for whoever has the attempt itself."""
        self.look(attempt.name)

    def try_again(self, name: str) -> None:
        """Somebody has removed the cause and started another participant again: what has failed here as well is tried again with it."""
        attempt = self.node.catalog.attempts.get(name)
        if attempt is not None and attempt.state == Checkpoint.FAILED and attempt.intact:
            log.info("%s is tried again: another node that holds it was started again", attempt.id)
            self.node.backlog.recovered.add(name)
            self._left.discard(name)  # who is told tells nobody: else they would go on telling each other
            self._revive(attempt)

    def tell(self, attempt: Attempt, *, everybody: bool) -> None:
        """Something of the attempt is in the store that was not there before: the committer, or everybody, may be waiting for it."""
        others = [address for address in self._others(attempt).values() if not self.peers.gone_seconds(address)]
        self._tell(others if everybody else others[:1], attempt, TellRequest(attempt=attempt.name))

    # -- inside -----------------------------------------------------------------------------

    def _tell(self, addresses: list[str], attempt: Attempt, request: TellRequest) -> None:
        task = asyncio.create_task(self.peers.ask(addresses, f"look at {attempt.id}", lambda stub: stub.Tell(request)))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _revive(self, attempt: Attempt) -> None:
        """What had ended here goes on."""
        self.node.catalog.found(attempt.name)
        self.taken_over(attempt)  # its copies are fetched again
        self.look(attempt.name)

    def _watched(self) -> list[Attempt]:
        attempts = self.node.catalog.attempts.values()
        return [a for a in attempts if a.joint and (a.pending or (a.state == Checkpoint.LOST and a.intact))]

    def _others(self, attempt: Attempt) -> dict[str, str]:
        return {node: address for node, address in participants(attempt.record).items() if node != self.node.name}

    async def _round(self) -> None:
        watched = self._watched()
        for name in self._seen.keys() - {attempt.name for attempt in watched}:
            del self._seen[name]
            self._left.discard(name)
            self.node.backlog.forget(name)
        if not watched:
            return
        now = self.node.awake.now()
        asked: dict[str, list[Attempt]] = {}
        for attempt in watched:
            for node, address in self._others(attempt).items():
                self._seen.setdefault(attempt.name, {}).setdefault(node, _Seen(None, now))
                asked.setdefault(address, []).append(attempt)
        for address, attempts, reply in await self._ask(asked):
            for attempt, fate in zip(attempts, reply.fates, strict=False):
                for node, there in self._others(attempt).items():
                    if there == address and fate.attempt == attempt.name:
                        self._heard(attempt, node, fate)
        for attempt in watched:
            if attempt.state == Checkpoint.LOST and attempt.name not in self._looking:  # not waited for: the store may hang
                task = self._looking[attempt.name] = asyncio.create_task(self.node.backlog.look_again(attempt))
                task.add_done_callback(functools.partial(self._looked, attempt.name))
        for attempt in watched:
            if attempt.name in self.node.catalog.attempts and (attempt.pending or attempt.state == Checkpoint.LOST):
                self._follow(attempt, self._judged(attempt, asked))

    def _looked(self, name: str, _: object) -> None:
        del self._looking[name]

    def _heard(self, attempt: Attempt, node: str, fate: WatchReply.Fate) -> None:
        """What one node says of an attempt."""
        if self.node.catalog.attempts.get(attempt.name) is not attempt or not (attempt.pending or attempt.state == Checkpoint.LOST):
            return  # it has ended, or is durable, since the question was put
        seen = self._seen[attempt.name][node]
        if fate.state == Checkpoint.ABORTED:  # superseded, deleted or abandoned, and so it is for all
            log.warning(
                "attempt %s of %s is over, says the daemon at %s: %s", attempt.name, attempt.id, self._others(attempt)[node], fate.reason
            )
            self.node.apply(self.node.catalog.aborted(attempt.name, fate.reason))
            return
        if fate.state != Checkpoint.UNKNOWN and not fate.adopted and not attempt.confirmed:
            self.confirmed(attempt.name)
        if fate.state == Checkpoint.FAILED and seen.fate is None and self._is_to_try_again(attempt, node, seen):
            seen.last = self.node.awake.now()
        elif _counts(attempt, node, fate):
            self._seen[attempt.name][node] = _Seen(fate, self.node.awake.now())

    def _is_to_try_again(self, attempt: Attempt, node: str, seen: _Seen) -> bool:
        """Whether the node may not have heard yet that what it has given up is tried again: who was started again tells it, once."""
        if attempt.name not in self.node.backlog.recovered:
            return False
        now = self.node.awake.now()
        if not seen.denied:
            seen.denied = now
            if attempt.name in self._left:
                self._tell([self._others(attempt)[node]], attempt, TellRequest(attempt=attempt.name, again=True))
        return now - seen.denied < 2 * ROUND_SECONDS

    async def _ask(self, asked: dict[str, list[Attempt]]) -> Iterable[tuple[str, list[Attempt], WatchReply]]:
        async def one(address: str, attempts: list[Attempt]) -> tuple[str, list[Attempt], WatchReply] | None:
            request = WatchRequest(attempts=[attempt.name for attempt in attempts])
            try:
                return address, attempts, await self.peers.call(address, "say what became of attempts", lambda stub: stub.Watch(request))
            except errors.CkptdError as exc:
                log.debug("%s", exc)
                return None

        found = await asyncio.gather(*(one(address, attempts) for address, attempts in asked.items()))
        return [one for one in found if one is not None]

    def _judged(self, attempt: Attempt, asked: dict[str, list[Attempt]]) -> Judgement:
        now = self.node.awake.now()
        views = {}
        for node, seen in self._seen[attempt.name].items():
            silent = now - seen.last
            views[node] = View(seen.fate, silent if silent > ROUND_SECONDS else 0.0)
        uncovered = self.node.backlog.missing.get(attempt.name)
        return judge(attempt.record, self.node.name, attempt.held, views, uncovered)

    def _follow(self, attempt: Attempt, found: Judgement) -> None:
        """Does what follows."""
        backlog, catalog, name = self.node.backlog, self.node.catalog, attempt.name
        duty = Duty(commits=found.commits, durable=found.durable, for_others=found.for_others)
        if backlog.duties.get(name, Duty()) != duty:
            if found.for_others and attempt.record.durable:
                log.warning("%s: uploads what nodes that are gone held, %d in all", attempt.id, len(found.for_others))
            backlog.duties[name] = duty
            self.look(name)
        if found.failed and attempt.pending:
            log.error("%s cannot be made durable, says another node: %s", attempt.id, found.failed)
            catalog.failed(name, f"{_SAID}{found.failed.removeprefix(_SAID)}")
            return
        if attempt.pending:
            catalog.replicated(name, replicated=found.replicated)
        was_doubtful = attempt.doubtful
        attempt.doubtful = bool(found.missing) and found.missing_seconds >= TAKEOVER_SECONDS
        if attempt.doubtful:
            attempt.reason = self._reason(attempt, found)
            self.node.arena.poke()
            if found.missing_seconds >= LOST_SECONDS and attempt.pending:
                log.error("%s is lost: %s", attempt.id, attempt.reason)
                self.node.apply(catalog.lost(name, attempt.reason))
        elif attempt.state == Checkpoint.LOST and attempt.intact:
            log.warning("%s is back: all that it consists of is held again", attempt.id)
            self._revive(attempt)
        elif attempt.pending and was_doubtful:
            attempt.reason = ""

    def _reason(self, attempt: Attempt, found: Judgement) -> str:
        nodes = participants(attempt.record)
        said = []
        for node, receipts in found.missing.items():
            ranks = ", ".join(str(receipt.rank) for receipt in receipts)
            what = f"the shards of ranks {ranks} were" if len(receipts) > 1 else f"the shard of rank {ranks} was"
            there = nodes[node] in self.peers.known and not self.peers.gone_seconds(nodes[node])
            since = f"which is there {FORGETFUL}" if there else f"which has not been reached for {found.missing_seconds:.0f} s"
            said.append(f"{what} held by node {node} at {nodes[node]} alone, {since}")
        return "; ".join(said)


def _counts(attempt: Attempt, node: str, fate: WatchReply.Fate) -> bool:
    """Whether the node is there, as far as the attempt goes: a daemon that was started afresh knows nothing of it."""
    if fate.state in (Checkpoint.DURABLE, Checkpoint.FAILED):
        return True
    of_node = {receipt.token for receipt in attempt.record.shards if receipt.node == node}
    return fate.state not in (Checkpoint.UNKNOWN, Checkpoint.ABORTED) and of_node <= set(fate.held)
