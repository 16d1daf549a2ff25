"""One node's deletions: by policy, by request, and of what nothing needs any more; pins; and the drain before it goes.

Promises: only what is durable is deleted by a policy, only in runs that this node saves to, and
only after something of the run became durable; what a load reads, or a save of this node is about to
replace, stays; no attempt of an id is committed here while the id is being deleted. Lives on the
loop; the store is worked on in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from ckptd import errors, parts
from ckptd.attempt import MEMORY_ONLY, is_joint
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.restore import Restore
from ckptd.retention import Policy, Verdict, decide
from ckptd.scan import Entry
from ckptd.survey import survey
from ckptd.sweeper import Deleted, Sweeper, Swept
from ckptd.v1.daemon_pb2 import Checkpoint, DrainReply
from ckptd.v1.manifest_pb2 import Record

log = logging.getLogger(__name__)
#: What nothing needs is looked for this often, in the runs that this node saves to.
SWEEP_SECONDS = 3600.0
#: A pause after a failure.
RETRY_SECONDS = 60.0
#: What is collected younger than this could be what a flush of ours has just put: then none may run.
UPLOAD_SECONDS = 3600.0

#: Of a joint attempt that needs no deleting any more.
OVER = (Checkpoint.ABORTED, Checkpoint.DURABLE)

T = TypeVar("T")


async def nobody_else(_: Record, __: str) -> bool:
    """This node is alone."""
    return True


class Upkeep:
    """What one daemon does about checkpoints that are not needed any more."""

    def __init__(
        self,
        node: Node,
        restore: Restore,
        ledger: Ledger,
        sweeper: Sweeper,
        threads: Executor,
        *,
        policy: Policy,
        delete_grace_seconds: float,
        orphan_age_seconds: float,
    ) -> None:
        self.node = node
        self.restore = restore
        self.ledger = ledger
        self.sweeper = sweeper
        self.threads = threads
        self.policy = policy
        self.delete_grace_seconds = delete_grace_seconds
        self.orphan_age_seconds = orphan_age_seconds
        #: Tells the other nodes that hold an attempt that it goes.
        self.abandon: Callable[[Record, str], Awaitable[bool]] = nobody_else
        self._one_at_a_time = asyncio.Lock()
        #: Attempts that were deleted here, of which neither all other nodes nor the store know it.
        self._owed: dict[CheckpointId, list[str]] = {}
        #: When each run that this node saves to is looked at next, in the loop's time.
        self._due: dict[str, float] = {}
        self._woken = asyncio.Event()
        node.backlog.became_durable = self._became_durable
        node.backlog.take_away = sweeper.delete

    # -- what is asked for ------------------------------------------------------------------

    async def prune(
        self,
        run: str | None,
        policy: Policy | None = None,
        *,
        dry_run: bool = False,
        delete_grace_seconds: float | None = None,
        orphan_age_seconds: float | None = None,
    ) -> tuple[list[Verdict], Swept]:
        """Deletes what no rule keeps (None: this daemon's own rules), then what nothing refers to and is old enough."""
        grace = self.delete_grace_seconds if delete_grace_seconds is None else delete_grace_seconds
        orphan_age = self.orphan_age_seconds if orphan_age_seconds is None else orphan_age_seconds
        async with self._one_at_a_time:
            surveyed = await self._run(survey, self.sweeper.store, self.ledger, run, self._busy_now())
            verdicts = decide([candidate for _, candidate in surveyed], policy or self.policy, time.time_ns() // 1000)
            entries = {entry.id: entry for entry, _ in surveyed}
            doomed = [verdict for verdict in verdicts if not verdict.keep]
            # What is due goes first: where the disk is full, even a tombstone needs room.
            swept = await self._sweep(run, grace, orphan_age, dry_run=dry_run)
            if doomed and not dry_run:
                verdicts = [verdict if verdict.keep else await self._carry_out(entries[verdict.id], verdict) for verdict in verdicts]
                swept = swept.then(await self._sweep(run, grace, orphan_age, dry_run=dry_run))
        gone = [verdict for verdict in verdicts if not verdict.keep]
        if (gone or swept.files) and not dry_run:
            log.info("pruned %d checkpoints; %d files went (%d bytes), %d later", len(gone), swept.files, swept.nbytes, swept.later_files)
        if swept.later_files or gone:
            for touched in {verdict.id.run for verdict in verdicts} if run is None else {run}:
                self._look_again(touched, min(grace + 1.0, SWEEP_SECONDS))
        return verdicts, swept

    async def delete(self, checkpoint: CheckpointId) -> tuple[Deleted, float]:
        """Deletes one checkpoint from store and memory; returns what goes, and after how many seconds.

        Raises NotFound; WrongPhase if it is pinned or a load reads it; Unavailable if it may come back without a second deletion.
        """
        async with self._one_at_a_time:
            entry = await self._find(checkpoint)
            if entry is not None and entry.pinned:
                raise errors.WrongPhase(f"{checkpoint} is pinned: `ckptd unpin {checkpoint}` first")
            held = [one for one in self.node.catalog.attempts.values() if one.id == checkpoint and (one.restorable or one.pending)]
            joint, known = await self._joint(checkpoint)
            if checkpoint in self.restore.reading():
                raise errors.WrongPhase(f"{checkpoint} cannot be deleted now: a load reads it; try again when that has ended")
            known += [name for name in self._owed.get(checkpoint, ()) if name not in known]
            if entry is None and not held and not joint and checkpoint not in self._owed:
                raise errors.NotFound(f"no checkpoint {checkpoint} in the store or in memory; `ckptd list` shows what is there")
            self.node.backlog.held.add(checkpoint)
            try:
                self.node.backlog.stop_of(checkpoint)
                while self.node.backlog.flushing(checkpoint):
                    await self.node.changed()
                entry = await self._find(checkpoint)  # what was on its way may have arrived
                deleted = Deleted(checkpoint, 0, 0) if entry is None else await self._run(self.sweeper.delete, entry)
                noted = await self._refuse(checkpoint, known)
                # Not before: a deletion that failed must not have thrown a newer save away.
                self.node.forget(checkpoint)
                heard = await asyncio.gather(*(self.abandon(record, "it was deleted") for record in joint))
                unheard = [record.summary.attempt for record, all_heard in zip(joint, heard, strict=True) if not all_heard]
                for record in joint:  # who has not heard finds nothing to commit
                    await self._run(self._forget_parts, checkpoint, record.summary.attempt)
                entry = await self._find(checkpoint) if known else None
                if entry is not None and entry.attempt in known:
                    # Another node has committed it meanwhile. If it has taken that away itself by now, so much the better.
                    with suppress(errors.WrongPhase):
                        deleted = await self._run(self.sweeper.delete, entry)
                if (unheard or checkpoint in self._owed) and not noted:
                    self._owed[checkpoint] = known
                    raise errors.Unavailable(
                        f"{checkpoint} is deleted here; a node that holds it did not hear of it, and the store {self.ledger.url} takes no "
                        "note of it: delete it again once one of them answers, else it may come back with that node"
                    )
                self._owed.pop(checkpoint, None)
                if unheard:  # when they are back they find a note in the store
                    log.warning("%s is deleted; a node that holds attempt %s of it did not hear of it yet", checkpoint, ", ".join(unheard))
            finally:
                self._let_go(checkpoint)
        log.info("deleted %s: %d files, %d bytes, go after %.0f s", checkpoint, deleted.files, deleted.nbytes, self.delete_grace_seconds)
        self._look_again(checkpoint.run, min(self.delete_grace_seconds, SWEEP_SECONDS))
        return deleted, self.delete_grace_seconds

    async def pin(self, checkpoint: CheckpointId, *, pinned: bool) -> Checkpoint:
        """No policy deletes the checkpoint any more, or again any may. Raises NotFound, WrongPhase."""
        async with self._one_at_a_time:
            held = [one for one in self.node.catalog.attempts.values() if one.id == checkpoint and one.pending]
            if held and await self._find(checkpoint) is None:
                way_out = f": `ckptd wait {checkpoint}`" if held[-1].record.durable else f", which it will not be: {MEMORY_ONLY}"
                raise errors.WrongPhase(f"{checkpoint} is not durable yet, and only then it can be pinned{way_out}")
            await self._run(self.ledger.pin if pinned else self.ledger.unpin, checkpoint)
        return await self.restore.resolve(checkpoint)

    async def drain(self, ending: asyncio.Event, *, cancel: bool = False) -> AsyncIterator[DrainReply]:
        """Takes no new saves; tells how much is left whenever that changes, at last what cannot, or is not to, become durable.

        Raises Unavailable if the daemon ends (`ending`) before that.
        """
        self.node.drained = not cancel
        if cancel:
            yield DrainReply()
            return
        log.info("draining: no new saves are taken")
        told: DrainReply | None = None
        while True:
            changed = asyncio.ensure_future(self.node.changed())
            try:
                catalog = self.node.catalog
                pending = catalog.on_their_way()
                begun = {str(shard.id) for token, shard in catalog.shards.items() if catalog.holder(token) is None}
                if not pending and not begun and not self.node.backlog.flushing():
                    break
                nbytes = sum(attempt.record.summary.raw_bytes for attempt in pending)
                reply = DrainReply(accepted=len(pending), nbytes=nbytes, begun=sorted(begun))
                if ending.is_set():
                    raise errors.Unavailable(f"the daemon is shutting down, and {len(pending)} checkpoints wait for its next start")
                if reply != told:
                    told = reply
                    yield reply
                await asyncio.wait([changed], timeout=1.0)
            finally:
                changed.cancel()
        ended = [a for a in self.node.catalog.attempts.values() if a.state == Checkpoint.FAILED or (a.state == Checkpoint.LOST and a.held)]
        kept = [a for a in self.node.catalog.attempts.values() if a.pending and not a.record.durable]
        yield DrainReply(failed=[f"{attempt.id}: {attempt.reason}" for attempt in ended], memory_only=[str(a.id) for a in kept])

    # -- by itself --------------------------------------------------------------------------

    async def forever(self) -> None:
        """Looks at each run after something of it became durable, and then from time to time."""
        loop = asyncio.get_running_loop()
        while True:
            self._woken.clear()
            now = loop.time()
            for run in [run for run, due in self._due.items() if due <= now]:
                self._due[run] = now + SWEEP_SECONDS
                try:
                    await self._look_after(run)
                    self.node.catalog.troubles.pop(f"upkeep of {run}", None)
                except errors.CkptdError as exc:
                    log.warning("old checkpoints of run %r could not be looked after, again in %.0f s: %s", run, RETRY_SECONDS, exc)
                    self.node.catalog.trouble(f"upkeep of {run}", f"old checkpoints of run {run!r} could not be deleted: {exc}")
                    self._due[run] = loop.time() + RETRY_SECONDS
            pause = min(self._due.values(), default=loop.time() + SWEEP_SECONDS) - loop.time()
            try:
                await asyncio.wait_for(self._woken.wait(), max(0.0, pause))
            except TimeoutError:
                continue

    def _became_durable(self, checkpoint: CheckpointId) -> None:
        if not self.policy.empty or checkpoint.run not in self._due:
            self._look_again(checkpoint.run, 0.0)

    def _look_again(self, run: str, after_seconds: float) -> None:
        due = asyncio.get_running_loop().time() + after_seconds
        self._due[run] = min(due, self._due.get(run, due))
        self._woken.set()

    # -- inside -----------------------------------------------------------------------------

    async def _look_after(self, run: str) -> None:
        if not self.policy.empty:
            await self.prune(run)
            return
        async with self._one_at_a_time:  # nobody gave rules: no checkpoint is looked at
            swept = await self._sweep(run, self.delete_grace_seconds, self.orphan_age_seconds, dry_run=False)
        if swept.later_files:
            self._look_again(run, min(self.delete_grace_seconds + 1.0, SWEEP_SECONDS))

    async def _carry_out(self, entry: Entry, verdict: Verdict) -> Verdict:
        """Deletes one checkpoint, unless it is in use by now, or is not what was decided about any more."""
        busy = self._busy_now()(entry)
        if not busy:
            self.node.backlog.held.add(entry.id)
            try:
                await self._run(self.sweeper.delete, entry)
                self.node.forget(entry.id, durable_only=True)
            except (errors.NotFound, errors.WrongPhase, errors.Corrupt, errors.StoreError) as exc:
                busy = str(exc)  # the others can go all the same
            finally:
                self._let_go(entry.id)
        return verdict if not busy else Verdict(id=verdict.id, keep=True, reason=f"kept: {busy}", stored_bytes=verdict.stored_bytes)

    async def _sweep(self, run: str | None, grace: float, orphan_age: float, *, dry_run: bool) -> Swept:
        backlog = self.node.backlog
        alone = not dry_run and orphan_age < UPLOAD_SECONDS
        backlog.paused = alone
        try:
            while alone and backlog.flushing():
                await self.node.changed()
            busy = {attempt.id for attempt in self.node.catalog.on_their_way()} | self.restore.reading()
            return await self._run(
                lambda: self.sweeper.sweep(run, delete_grace_seconds=grace, orphan_age_seconds=orphan_age, busy=busy, dry_run=dry_run)
            )
        finally:
            backlog.paused = False
            self.node.wake()

    def _busy_now(self) -> Callable[[Entry], str]:
        """Why a checkpoint must not go now, as things stand."""
        saving = {attempt.id for attempt in self.node.catalog.on_their_way()}
        reading = self.restore.reading()

        def why(entry: Entry) -> str:
            if entry.id in reading:
                return "a load reads it"
            return "a newer save of it is on its way" if entry.id in saving else ""

        return why

    async def _find(self, checkpoint: CheckpointId) -> Entry | None:
        try:
            return await self._run(self.ledger.find, checkpoint)
        except errors.NotFound:
            return None

    async def _joint(self, checkpoint: CheckpointId) -> tuple[list[Record], list[str]]:
        """Saves of that id that other nodes hold, too, and that are on their way to the store, or may be.

        And the attempts of these and of those that are over: a node that is away may not know it, and this one may forget it.
        """
        if not self.restore.peers.known:
            return [], []
        seen = await self.restore.whereabouts.survey(checkpoint, every=True)
        joint = {name: one for name, one in seen.items() if one.record is not None and is_joint(one.record)}
        over = [name for name, one in seen.items() if one.state in OVER]
        return [one.record for one in joint.values() if one.record is not None and one.state not in OVER], sorted({*joint, *over})

    async def _refuse(self, checkpoint: CheckpointId, attempts: list[str]) -> bool:
        """None of them becomes durable any more, on whichever node; whether the store takes a note of that."""
        try:
            for attempt in attempts:
                await self._run(self.sweeper.refuse, checkpoint, attempt)
        except (errors.StoreError, errors.Unavailable) as exc:
            log.warning("the store takes no note of the deletion of %s: %s", checkpoint, exc)
            return False
        return True

    def _forget_parts(self, checkpoint: CheckpointId, attempt: str) -> None:
        keys = [key for of_rank in parts.listed(self.sweeper.store, checkpoint, attempt).values() for key in of_rank]
        self.sweeper.store.delete(keys)

    def _let_go(self, checkpoint: CheckpointId) -> None:
        self.node.backlog.held.discard(checkpoint)
        self.node.wake()

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)
