"""One node's saves: arena, catalogue and backlog held together.

Events of trainers go to the catalogue; the effects that come back are carried out here.
Promises: an attempt is accepted only after its commit record is written; what is accepted
survives this process; a failure is kept for whoever waits and told to the next save.
Lives on the loop; blocking work goes to threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from ckptd import errors
from ckptd.arena import Arena
from ckptd.attempt import Attempt, Drop, Effect, Forget, StopFlush
from ckptd.awake import Awake
from ckptd.backlog import Backlog
from ckptd.catalog import Catalog
from ckptd.flusher import Flusher
from ckptd.learning import Learning
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId, mint_token
from ckptd.recovery import left_behind
from ckptd.segment import Segment, is_mapped
from ckptd.shmdir import node_name
from ckptd.table import parse_table, read_range
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record

log = logging.getLogger(__name__)
#: A segment that nobody maps so long after it was given out has no writer any more.
MAPPED_SECONDS = 10.0


class Node:
    """What one daemon knows and does about saves."""

    def __init__(
        self,
        *,
        shm_dir: Path,
        memory: int | None,
        codec: str,
        address: str = "",
        open_timeout_seconds: float,
        ledger: Ledger,
        flusher: Flusher,
        threads: Executor,
        memory_threads: Executor,
        flush_threads: Executor,
    ) -> None:
        self.arena = Arena(shm_dir, memory, victims=self._victims, evicted=self._evicted)
        self.name = node_name(shm_dir, mint_token())
        #: How other nodes reach this one; "" if they cannot.
        self.address = address
        self.catalog = Catalog(self.name, open_timeout_seconds=open_timeout_seconds, codec=codec)
        self.backlog = Backlog(self.catalog, self.arena, ledger, flusher, flush_threads, self.apply)
        self.ledger = ledger
        #: What saves have to know of the store: a clock that went back must not make them look old.
        self.learning = Learning(ledger, threads, self.catalog.learn)
        self.threads = threads
        self.memory_threads = memory_threads
        #: The daemon ends: no new saves, no commits.
        self.draining = False
        #: `ckptd drain`: no new saves; those that have begun may end.
        self.drained = False
        #: Other rooms' segments that may be lost, and who must be told: (victims, evicted).
        self.caches: list[tuple[Callable[[], Iterable[str]], Callable[[str], None]]] = []
        #: Frees what a room keeps and nobody reads, when somebody waits for memory.
        self.give_up_unread: Callable[[], None] = lambda: None
        self.awake = Awake()
        self._changed = asyncio.Event()

    # -- start ------------------------------------------------------------------------------

    def recover(self) -> None:
        """Takes over what an earlier daemon had accepted; unlinks everything else."""
        for left in left_behind(self.arena, self.name):
            record = left.record
            durable = left.durable and record.store in ("", self.ledger.url)
            if left.durable and not durable:
                log.warning("%s is durable in %s: it is put into this store, too", record.summary.id, record.store)
            self.apply(
                self.catalog.accept(record, durable=durable or bool(left.gone), held=left.there | left.gone, confirmed=left.confirmed)
            )
            for token in left.gone:
                self.apply(self.catalog.evicted(token))
            if not durable:
                self.backlog.recovered.add(record.summary.attempt)
                log.info("re-adopted %s (%d bytes), not durable yet", record.summary.id, record.summary.raw_bytes)

    # -- calls of trainers ------------------------------------------------------------------

    def lease(self, owner: str) -> None:
        self.catalog.lease(owner)

    def lease_ended(self, owner: str) -> None:
        self.apply(self.catalog.lease_ended(owner))
        if not self.catalog.leases[owner]:
            self.arena.disown(owner)

    async def allocate(
        self, owner: str, checkpoint: CheckpointId, rank: int, nbytes: int, *, metadata: bool, deadline: float | None
    ) -> Segment:
        """A segment for one shard; see Arena.allocate. `deadline` in loop time."""
        self.refuse_if_draining()
        if self.drained and not metadata and not self.catalog.unbound(checkpoint):
            raise errors.Unavailable("the daemon was drained and takes no new saves: `ckptd drain --cancel` lets it take them again")
        if not self.catalog.leases[owner]:
            raise errors.LeaseLost("this process holds no lease (the daemon was restarted?): save again")
        self.learning.begin(checkpoint.run)
        if not metadata:
            self.apply(self.catalog.restarted(checkpoint, rank, owner))
        self.catalog.waits(checkpoint, 1)
        asyncio.get_running_loop().call_soon(self._make_way)
        try:
            segment = await self.arena.allocate(
                nbytes, owner, metadata=metadata, deadline=deadline, beside=lambda: self._beside(checkpoint, None if metadata else rank)
            )
        finally:
            self.catalog.waits(checkpoint, -1)
        if not self.catalog.leases[owner]:
            self.arena.drop(segment.token)
            raise errors.LeaseLost("the connection to the daemon broke while this save waited for memory: save again")
        self.catalog.opened(segment.token, checkpoint, rank, owner, time.monotonic(), metadata=metadata)
        return segment

    async def seal(self, owner: str, token: str, nbytes: int, table_nbytes: int) -> Receipt:
        shard = self.catalog.open_shard(token, owner)
        segment = self.arena.get(token)
        if nbytes + table_nbytes > segment.nbytes:
            raise errors.InvalidRequest(f"{nbytes + table_nbytes} bytes are sealed in a segment of {segment.nbytes}")
        receipt = Receipt(node=self.name, address=self.address, token=token, rank=shard.rank)
        receipt.nbytes, receipt.table_nbytes = nbytes, table_nbytes
        receipt.sealed_us = time.time_ns() // 1000
        if not shard.metadata:
            loop = asyncio.get_running_loop()
            try:  # in threads of its own: those of the store may all be waiting for it
                encoded = await loop.run_in_executor(self.memory_threads, read_range, segment.path, nbytes, table_nbytes)
                table = await loop.run_in_executor(self.memory_threads, parse_table, encoded, nbytes)
            except (FileNotFoundError, errors.CkptdError) as exc:
                self.catalog.open_shard(token, owner)  # if the lease has ended meanwhile, that is why
                if isinstance(exc, FileNotFoundError):
                    raise errors.LeaseLost(f"segment {token} has been removed from the shm-dir: save again") from exc
                raise
            receipt.raw_bytes = sum(item.nbytes for item in table.items)
            receipt.items = len(table.items)
        self.catalog.open_shard(token, owner)  # the lease may have ended meanwhile
        self.arena.seal(token, nbytes + table_nbytes)
        self.catalog.sealed(token, receipt, time.monotonic())
        return receipt

    def release(self, owner: str, token: str) -> None:
        """The owner stopped writing: the segment stays with it as a spare."""
        self.catalog.open_shard(token, owner)
        self.catalog.released(token)
        self.arena.release(token, reusable=True)

    async def learned(self, run: str) -> str:
        """The newest attempt of the run that is known here, once the store had a moment to say its own; "" if none."""
        self.refuse_if_draining()
        await self.learning.known(run)
        return self.catalog.newest.get(run, "")

    def accept(self, record: Record, *, confirmed: bool = True) -> Attempt:
        """Writes the commit record: when this returns the attempt is accepted here, whatever happens to this process.

        Not `confirmed`: others have to accept it, too, before it counts.
        """
        name, checkpoint = record.summary.attempt, record.summary.id
        try:
            self.arena.put_record(name, "accepted" if confirmed else "adopted", record.SerializeToString())
        except OSError as exc:
            raise errors.ArenaFull(f"{checkpoint}: the commit record cannot be written: {exc}") from exc
        self.apply(self.catalog.accept(record, confirmed=confirmed))
        log.info("accepted %s: %d shards, %d bytes, attempt %s", checkpoint, len(record.shards), record.summary.raw_bytes, name)
        return self.catalog.attempts[name]

    def confirm(self, attempt: Attempt) -> None:
        """All participants have accepted the attempt."""
        self.arena.move_record(attempt.name, "adopted", "accepted", attempt.record.SerializeToString())
        self.apply(self.catalog.confirm(attempt.name))

    def vanished(self, token: str) -> None:
        """A segment's file was removed by somebody else."""
        log.error("segment %s was removed from the shm-dir while it was in use", token)
        self.apply(self.catalog.vanished(token))
        self.arena.drop(token)

    def unpin(self, name: str) -> None:
        """A reader of the attempt has ended."""
        self.apply(self.catalog.unpin(name))

    # -- background -------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second: what nobody bound in time goes, and what a writer left without a word."""
        self.awake.tick()
        now = time.monotonic()
        for token in self.catalog.opened_before(now - MAPPED_SECONDS):
            if token not in self.arena or not is_mapped(self.arena.get(token).path):
                self.apply(self.catalog.abandoned(token))
        self.apply(self.catalog.expire(now))

    async def flush_forever(self) -> None:
        """Makes accepted attempts durable, oldest first."""
        while True:
            changed = self._changed
            attempt = self.backlog.next()
            if attempt is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.backlog.pause_seconds()):
                        await changed.wait()
            else:
                await self.backlog.flush(attempt)
                self._notify()

    async def changed(self) -> None:
        """Returns when anything has happened to a shard or an attempt."""
        await self._changed.wait()

    def forget(self, checkpoint: CheckpointId, *, durable_only: bool = False, but: Collection[str] = ()) -> None:
        """The checkpoint was deleted: what memory holds of it goes, too, `but` these attempts."""
        self.apply(self.catalog.deleted(checkpoint, durable_only=durable_only, but=but))

    def wake(self) -> None:
        """What was held back may go on."""
        self._notify()

    async def drain(self, grace_seconds: float) -> None:
        """Accepts nothing new; returns when all is durable or the grace is over. Then flushes are told to stop."""
        self.draining = True
        self._notify()
        deadline = time.monotonic() + grace_seconds
        while self.backlog.busy and time.monotonic() < deadline:
            changed = self._changed
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                break
        self.backlog.stop_all()

    def close(self) -> None:
        """Unlinks everything but what is accepted and not durable: that waits for the next daemon."""
        kept = {
            token
            for attempt in self.catalog.attempts.values()
            if (attempt.pending or attempt.state in (Checkpoint.FAILED, Checkpoint.LOST)) and attempt.intact
            for token in attempt.held
        }
        for attempt in self.catalog.attempts.values():
            if not attempt.held or not kept.issuperset(attempt.held):
                self.arena.drop_record(attempt.name)
        for token in [token for token in self.catalog.shards if token not in kept]:
            self.arena.drop(token)
        self.arena.close()

    # -- inside -----------------------------------------------------------------------------

    def refuse_if_draining(self) -> None:
        """Raises Unavailable once the daemon ends."""
        if self.draining:
            raise errors.Unavailable("the daemon is shutting down and takes no new saves: retry when it is back")

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carries out what the catalogue says must follow, and tells all who wait."""
        for effect in effects:
            match effect:
                case Drop(token):
                    self.arena.drop(token)
                case Forget(attempt):
                    self.arena.drop_record(attempt)
                case StopFlush(attempt):
                    self.backlog.stop(attempt)
        self.arena.poke()
        self._notify()

    def _beside(self, checkpoint: CheckpointId, rank: int | None) -> set[str]:
        """What other ranks, who live, hold of the same save."""
        others = [one for one in self.catalog.unbound(checkpoint) if not one.metadata and rank not in (None, one.rank)]
        return {one.token for one in others if self.catalog.leases[one.owner] > 0}

    def _make_way(self) -> None:
        """If somebody waits for memory by now."""
        if self.arena.waiting:
            self.give_up_unread()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _victims(self) -> list[tuple[str, bool]]:
        own = list(self.catalog.victims())
        cached = [(token, False) for victims, _ in self.caches for token in victims()]
        return [v for v in own if not v[1]] + cached + [v for v in own if v[1]]

    def _evicted(self, token: str) -> None:
        for _, evicted in self.caches:
            evicted(token)
        attempt = self.catalog.holder(token)
        promised = attempt is not None and attempt.state != Checkpoint.DURABLE and attempt.record.durable and attempt.intact
        effects = self.catalog.evicted(token)
        if promised and attempt is not None and not attempt.intact:
            log.warning("%s was accepted, is not durable and has lost its memory: %s", attempt.id, attempt.reason)
        # Later, because the arena is in the middle of making room.
        asyncio.get_running_loop().call_soon(self.apply, effects)
