"""One checkpoint goes because somebody asks for it: from the store, from this node's memory, and from that of others.

Promises: a deletion that failed has not thrown a newer save away; no attempt of an id is committed here while the id is being
deleted; what another node holds does not come back, as far as any node that answers knows of it. What the store and the other
nodes have both not heard of is said, and owed to the next call. Lives on the loop; the store is worked on in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from ckptd import errors, parts
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.restore import Restore
from ckptd.ring import participants
from ckptd.scan import Entry
from ckptd.sweeper import Deleted, Sweeper
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Record

log = logging.getLogger(__name__)

#: A deletion that knows only after so long what there is to delete has deleted nothing.
LOOK_SECONDS: Final = 30.0
#: Of an attempt that needs no deleting any more.
OVER: Final = (Checkpoint.ABORTED, Checkpoint.DURABLE)

T = TypeVar("T")


class Joint(NamedTuple):
    """A save that other nodes hold, and that has to go there, too."""

    record: Record
    #: It is on its way to the store, and whoever commits it reads the refusal there first.
    reads_refusals: bool


async def nobody_else(_: Record, __: str) -> bool:
    """This node is alone."""
    return True


class Deletion:
    """Deletes for one daemon, one checkpoint at a time: its caller sees to that."""

    def __init__(self, node: Node, restore: Restore, ledger: Ledger, sweeper: Sweeper, threads: Executor) -> None:
        self.node = node
        self.restore = restore
        self.ledger = ledger
        self.sweeper = sweeper
        self.threads = threads
        #: Tells the other nodes that hold an attempt that it goes; whether all have heard.
        self.abandon: Callable[[Record, str], Awaitable[bool]] = nobody_else
        #: What was deleted here, while others that hold it have not heard of that, and may not hear of it from the store. By attempt.
        self._owed: dict[CheckpointId, dict[str, Joint]] = {}

    async def delete(self, checkpoint: CheckpointId) -> Deleted:
        """Returns what goes from the store.

        What is accepted here after it has begun is not meant. Raises NotFound; WrongPhase if it is pinned or a load reads it;
        Unavailable if it may come back without a second deletion.
        """
        meant, began = self._names(checkpoint), time.monotonic()
        entry = await self._find(checkpoint)
        _refuse_pinned(entry)
        attempts = self.node.catalog.attempts
        held = [name for name in meant if (one := attempts.get(name)) is not None and (one.restorable or one.state not in OVER)]
        pending, known, seen = await self._elsewhere(checkpoint)
        if time.monotonic() - began > LOOK_SECONDS:  # who asked may have saved that id anew since, on other nodes
            raise errors.Unavailable(
                f"{checkpoint} was not deleted: the store {self.ledger.url}, or a node, took too long to answer; try again"
            )
        if checkpoint in self.restore.reading():
            raise errors.WrongPhase(f"{checkpoint} cannot be deleted now: a load reads it; try again when that has ended")
        owed = self._owed.get(checkpoint, {})
        if entry is None and not held and not pending and not owed:
            raise errors.NotFound(
                f"no checkpoint {checkpoint} in the store or in memory; `ckptd list` shows what is there, and "
                "`ckptd prune` removes what it calls incomplete, after --orphan-age"
            )
        found = {entry.attempt or ""} if entry is not None else set()  # a stock one names none
        meant |= (found | owed.keys() | seen) - (self._names(checkpoint) - meant)  # but not what this node has accepted meanwhile
        self.node.backlog.held.add(checkpoint)
        try:
            self.node.backlog.stop_of(checkpoint)
            while self.node.backlog.flushing(checkpoint):
                await self.node.changed()
            return await self._delete(checkpoint, pending | owed, known | owed.keys(), meant)
        finally:
            self.node.backlog.held.discard(checkpoint)
            self.node.wake()

    # -- inside -----------------------------------------------------------------------------

    async def _delete(self, checkpoint: CheckpointId, pending: dict[str, Joint], known: set[str], meant: set[str]) -> Deleted:
        entry = await self._find(checkpoint)  # what was on its way may have arrived
        if entry is not None and (entry.attempt or "") not in meant:  # saved anew while this waited
            entry = None
        _refuse_pinned(entry)
        deleted = Deleted(checkpoint, 0, 0) if entry is None else await self._run(self.sweeper.delete, entry)
        if entry is not None and entry.attempt is not None and self.node.address:
            known = known | {entry.attempt}  # a node that was away since before it was durable does not know that, either
        held = [one for one in self.node.catalog.attempts.values() if one.id == checkpoint and one.joint and one.held]
        shared = [one.record for one in held if one.name in meant]
        later = self._names(checkpoint) - meant  # some of it may have been on its way to other nodes
        pending, known = {name: one for name, one in pending.items() if name not in later}, known - later
        noted = await self._refuse(checkpoint, known)
        # Not before: a deletion that failed must not have thrown a newer save away.
        self.node.forget(checkpoint, but=self._names(checkpoint) - meant)
        unheard = await self._tell(one.record for one in pending.values())
        await self._tell(record for record in shared if record.summary.attempt not in pending)  # it is durable, and memory keeps it
        self._owed.pop(checkpoint, None)
        if owed := {name: pending[name] for name in unheard if not (noted and pending[name].reads_refusals)}:
            self._owed[checkpoint] = owed
            how = "and what it holds is not on its way to the store" if noted else f"and the store {self.ledger.url} takes no note of it"
            raise errors.Unavailable(
                f"{checkpoint} is deleted here; a node that holds it did not hear of it, {how}: "
                "delete it again, here, once that node answers, else it may come back with it; if that node is gone for good, all is done"
            )
        for name in pending:
            await self._run(self._forget_parts, checkpoint, name)
        entry = await self._find(checkpoint) if known else None
        if entry is not None and entry.attempt in known:
            _refuse_pinned(entry)
            # Another node has committed it meanwhile. If it has taken that away itself by now, so much the better.
            with suppress(errors.WrongPhase):
                deleted = await self._run(self.sweeper.delete, entry)
        if unheard:  # when they are back they find a note in the store
            log.warning("%s is deleted; a node that holds attempt %s of it did not hear of it yet", checkpoint, ", ".join(unheard))
        return deleted

    async def _elsewhere(self, checkpoint: CheckpointId) -> tuple[dict[str, Joint], set[str], set[str]]:
        """Saves of that id that other nodes hold, by attempt; attempts that may come back; and all that anybody knows of.

        Those that may come back are the same, and of what is over the newest that each other node took part in: it may be
        away, and not know.
        """
        if not self.restore.peers.known and not any(one.id == checkpoint and one.joint for one in self.node.catalog.attempts.values()):
            return {}, set(), set()
        seen = await self.restore.whereabouts.survey(checkpoint, every=True)
        others = {name: one for name, one in seen.items() if one.state not in OVER and (one.own is None or one.own.joint)}
        newest = {
            node: attempt.name
            for attempt in sorted(self.node.catalog.attempts.values(), key=lambda attempt: attempt.name)
            if attempt.id == checkpoint and attempt.joint
            for node in participants(attempt.record)
            if node != self.node.name
        }
        held = {
            name: Joint(one.record, one.record.durable and one.state != Checkpoint.FAILED)
            for name, one in others.items()
            if one.record is not None
        }
        return held, {*others, *newest.values()}, {*seen}

    async def _tell(self, records: Iterable[Record]) -> list[str]:
        """The attempts of which some node did not hear that they were deleted."""
        told = list(records)
        heard = await asyncio.gather(*(self.abandon(record, "it was deleted") for record in told))
        return [record.summary.attempt for record, all_heard in zip(told, heard, strict=True) if not all_heard]

    async def _refuse(self, checkpoint: CheckpointId, attempts: Iterable[str]) -> bool:
        """None of them becomes durable any more, on whichever node; whether the store takes a note of that."""
        try:
            for attempt in sorted(attempts):
                await self._run(self.sweeper.refuse, checkpoint, attempt)
        except (errors.StoreError, errors.Unavailable) as exc:
            log.warning("the store takes no note of the deletion of %s: %s", checkpoint, exc)
            return False
        return True

    def _forget_parts(self, checkpoint: CheckpointId, attempt: str) -> None:
        """Who has not heard finds nothing to commit; else a sweep takes them."""
        with suppress(errors.StoreError, errors.Unavailable):
            keys = [key for of_rank in parts.listed(self.sweeper.store, checkpoint, attempt).values() for key in of_rank]
            self.sweeper.store.delete(keys)

    def _names(self, checkpoint: CheckpointId) -> set[str]:
        return {one.name for one in self.node.catalog.attempts.values() if one.id == checkpoint}

    async def _find(self, checkpoint: CheckpointId) -> Entry | None:
        try:
            return await self._run(self.ledger.find, checkpoint)
        except errors.NotFound:
            return None

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)


def _refuse_pinned(entry: Entry | None) -> None:
    """Raises WrongPhase if it is."""
    if entry is not None and entry.pinned:
        raise errors.WrongPhase(f"{entry.id} is pinned: `ckptd unpin {entry.id}` first")
