"""Commits: one node's receipts, or those of several, become an attempt.

Where several nodes hold the shards, the coordinator's node asks each to prepare, mints the attempt above all
that any of them knows, and has each adopt the commit record; its own comes last, and then the attempt is
accepted. Promises: when `commit` returns, every participant has the record, the metadata pickle and its
shards; if it fails, nobody is left with an attempt that could pass for accepted; what comes late never
brings back an older state of an id. Lives on the loop. docs/0005-many-nodes.md says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from ckptd import binding, errors
from ckptd.addresses import parse_peer
from ckptd.attempt import Attempt, own_tokens
from ckptd.catalog import REMEMBERED
from ckptd.model import CheckpointId
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.pull import pull
from ckptd.ring import participants
from ckptd.v1.daemon_pb2 import Checkpoint, CommitRequest
from ckptd.v1.manifest_pb2 import Receipt, Record
from ckptd.v1.peer_pb2 import AbandonRequest, AdoptRequest, PrepareReply, PrepareRequest, TellRequest, WatchReply
from ckptd.witness import Witness

log = logging.getLogger(__name__)

#: How long a participant may take to prepare, which includes fetching the metadata pickle, and to adopt.
PREPARE_SECONDS: Final = 12.0
ADOPT_SECONDS: Final = 8.0
#: What is accepted later by the coordinator, because its process or machine stood still, others may have given up.
ACCEPT_SECONDS: Final = ADOPT_SECONDS + 1.0
#: How long is waited until all have heard that all have accepted.
TELL_SECONDS: Final = 1.0
#: How long a participant that cannot be reached may take to start: longer than gRPC waits before it connects anew.
PATIENCE_SECONDS: Final = 2.0
#: Bytes of the pickle per second that this node surely sends, to all participants together.
PICKLE_RATE: Final = 100e6
#: How long the pickle's memory is waited for.
PICKLE_SECONDS: Final = 5.0


class Commits:
    """Commits of one node, as coordinator and as participant."""

    def __init__(self, node: Node, peers: Peers, *, node_local: bool = False, replicas: int = 0, witness: Witness | None = None) -> None:
        self.node = node
        self.peers = peers
        #: The store is a directory that other nodes may not see.
        self.node_local = node_local
        self.replicas = replicas
        #: The store is a directory of which the operator says that all nodes see it.
        self.witness = witness
        #: Attempts that were abandoned, and why: what comes late is refused.
        self._abandoned: dict[str, str] = {}
        #: Runs of which it was said that they have fewer copies than `replicas`.
        self._fewer_copies: set[str] = set()
        #: Told of every joint attempt that is accepted here.
        self.accepted: Callable[[Attempt], None] = lambda _: None

    # -- as coordinator ---------------------------------------------------------------------

    async def commit(self, request: CommitRequest) -> Attempt:
        """Binds the shards; when it returns they are accepted, whatever happens to this process.

        Raises what is wrong with the request, or with a participant. After Unavailable that says "outcome unknown" the
        attempt may yet appear; after every other error it does not.
        """
        catalog = self.node.catalog
        newest = await self.node.learned(CheckpointId.parse(request.id).run)
        checkpoint = binding.check(catalog, request)
        others = binding.others(catalog, request, self.node.address)
        if others and not binding.is_own(catalog, request.metadata):
            raise errors.InvalidRequest(f"{checkpoint}: the metadata pickle is held by another node: commit there")
        _check_addresses(checkpoint, (receipt for receipt in request.shards if not binding.is_own(catalog, receipt)))
        self._tell_of_fewer_copies(checkpoint.run, len(others))
        if not others:
            return self._accept(binding.record_of(catalog, request, time.time_ns() // 1000, newest=newest))
        self.peers.learn(others.values())
        prepared = await self._prepare(request, checkpoint, others)
        binding.check(catalog, request)  # something may have expired meanwhile
        for reply in prepared.values():
            catalog.learn(checkpoint.run, reply.newest)
        record = binding.record_of(catalog, request, time.time_ns() // 1000, newest=newest, replicas=min(self.replicas, len(others)))
        record.store = self.node.ledger.url
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        await self._adopt(record, others)
        try:
            if time.clock_gettime(time.CLOCK_BOOTTIME) - began > ACCEPT_SECONDS:
                raise errors.Unavailable(
                    f"outcome unknown: this daemon stood still for a while, and other nodes may have given {checkpoint} up; save again"
                )
            binding.check(catalog, request)
            attempt = self._accept(record)
        except errors.CkptdError:
            await self._abandon(record.summary.attempt, others, f"{checkpoint} was not accepted")
            raise
        # Who does not hear it finds out by asking.
        told = TellRequest(attempt=attempt.name, accepted=True)
        await self.peers.ask(others.values(), f"go on with {checkpoint}", lambda stub: stub.Tell(told), TELL_SECONDS)
        return attempt

    def _tell_of_fewer_copies(self, run: str, others: int) -> None:
        """Says once per run that its shards lie on fewer nodes than ``--replicas`` asks for."""
        if others < self.replicas and run not in self._fewer_copies:
            self._fewer_copies.add(run)
            log.info(
                "run %r: --replicas %d is more than its saves have other nodes, %d: so many copies of each shard are kept",
                *(run, self.replicas, others),
            )

    async def _prepare(self, request: CommitRequest, checkpoint: CheckpointId, others: dict[str, str]) -> dict[str, PrepareReply]:
        """Asks all participants; raises the first refusal."""
        nodes = frozenset(others)
        witness = await self.witness.show(nodes) if self.witness is not None and request.durable else ""
        wanted = {
            node: PrepareRequest(
                id=request.id,
                shards=[receipt for receipt in request.shards if receipt.node == node],
                metadata=request.metadata,
                durable=request.durable,
                witness=witness,
            )
            for node in others
        }
        seconds = PREPARE_SECONDS + request.metadata.nbytes * len(others) / PICKLE_RATE
        replies: dict[str, PrepareReply] = {}
        try:
            found = await self._each(others, lambda node, stub: stub.Prepare(wanted[node]), f"prepare {checkpoint}", seconds)
            for node, reply in found.items():
                if isinstance(reply, Exception):
                    raise reply
                replies[node] = reply
        finally:
            if self.witness is not None and witness:
                self.witness.remove(witness)
                if len(replies) < len(others):
                    self.witness.forget(nodes)
        if request.durable:
            self._check_store(checkpoint, others, replies)
        return replies

    def _check_store(self, checkpoint: CheckpointId, others: dict[str, str], replies: dict[str, PrepareReply]) -> None:
        own = self.node.ledger.url
        local = [others[node] for node, reply in replies.items() if reply.node_local] + ([self.node.address] if self.node_local else [])
        if local:
            raise errors.StoreError(
                f"{checkpoint} is held by {len(others) + 1} nodes, and the store {own} of {local[0]} is a directory that others may not "
                "see: it would not be resumable on other nodes. Give all daemons one --store that all can reach (s3://…, gs://…), or, if "
                "the directory is on a file system that all nodes share, --shared-store"
            )
        for node, reply in replies.items():
            if reply.store != own and "://" in own:
                raise errors.StoreError(
                    f"{checkpoint} is held by several nodes with different stores ({own} here, {reply.store} on {others[node]}): "
                    "give all daemons of a job the same --store"
                )

    async def _adopt(self, record: Record, others: dict[str, str]) -> None:
        """Has all participants adopt the record; if one does not, all are told to abandon it, and the error says what is known."""
        id, attempt = record.summary.id, record.summary.attempt
        try:
            found = await self._each(others, lambda _, stub: stub.Adopt(AdoptRequest(record=record)), f"accept {id}", ADOPT_SECONDS)
        except asyncio.CancelledError:
            await self._abandon(attempt, others, f"{id} was not accepted: its coordinator's daemon ends")
            raise
        failed = [reply for reply in found.values() if isinstance(reply, errors.CkptdError)]
        if not failed:
            return
        unanswered = [reply for reply in failed if isinstance(reply, errors.Unavailable)]
        told = await self._abandon(attempt, others, f"{id} was not accepted by all nodes: {failed[0]}")
        if unanswered and not told:
            raise errors.Unavailable(
                f"outcome unknown: {unanswered[0]}; {id} may yet appear, and never as something newer than what is saved after it: "
                "`ckptd list` tells, saving again is safe"
            )
        raise failed[0]

    async def _abandon(self, attempt: str, others: dict[str, str], reason: str, *, deleted: bool = False) -> bool:
        """Tells all participants; whether all have heard."""
        self._note_abandoned(attempt, reason)
        request = AbandonRequest(attempt=attempt, reason=reason, deleted=deleted)
        heard = await self.peers.ask(others.values(), f"abandon attempt {attempt}", lambda stub: stub.Abandon(request))
        return len(heard) == len(others)

    async def give_up(self, record: Record, reason: str) -> bool:
        """The attempt was deleted: the other participants are told; whether all have heard."""
        others = {node: address for node, address in participants(record).items() if node != self.node.name}
        return await self._abandon(record.summary.attempt, others, reason, deleted=True)

    async def _each(self, others: dict[str, str], make: Callable[[str, Any], Awaitable[Any]], doing: str, seconds: float) -> dict[str, Any]:
        """The same call to all participants at once: by node, the reply or the error."""

        async def one(node: str, address: str) -> Any:
            try:
                return await self.peers.call(address, doing, lambda stub: make(node, stub), seconds, patience_seconds=PATIENCE_SECONDS)
            except errors.CkptdError as exc:
                return exc

        return dict(zip(others, await asyncio.gather(*(one(node, address) for node, address in others.items())), strict=True))

    def _accept(self, record: Record) -> Attempt:
        record.store = self.node.ledger.url
        attempt = self.node.accept(record)
        if attempt.joint:
            self.accepted(attempt)
        return attempt

    # -- as participant ---------------------------------------------------------------------

    async def prepare(self, request: PrepareRequest) -> PrepareReply:
        """This node holds its shards, and from now on the metadata pickle.

        Raises LeaseLost, InvalidRequest, ArenaFull, Unavailable; StoreError if its store is another directory than the coordinator's.
        """
        checkpoint = CheckpointId.parse(request.id)
        if request.witness and self.witness is not None and await self.witness.is_missing(request.witness):
            raise errors.StoreError(
                f"{checkpoint}: its store {self.node.ledger.url} does not have what the daemon at {request.metadata.address} has just put "
                "into its own: is it the same directory on all nodes, and is the share mounted on each? Give all daemons one --store"
            )
        newest = await self.node.learned(checkpoint.run)
        binding.check_held(self.node.catalog, checkpoint, request.shards)
        binding.check_stops_nothing(self.node.catalog, checkpoint, durable=request.durable)
        # Of earlier tries at this save that came to nothing.
        stale = [
            one.token
            for one in self.node.catalog.unbound(checkpoint)
            if one.metadata and not one.owner and one.token != request.metadata.token
        ]
        self.node.apply(effect for token in stale for effect in self.node.catalog.abandoned(token))
        if request.metadata.token not in self.node.arena:
            _check_addresses(checkpoint, [request.metadata])
            await self._fetch_pickle(checkpoint, request.metadata)
            binding.check_held(self.node.catalog, checkpoint, request.shards)
        newest = max(newest, self.node.catalog.newest.get(checkpoint.run, ""))
        return PrepareReply(newest=newest, store=self.node.ledger.url, node_local=self.node_local)

    async def _fetch_pickle(self, checkpoint: CheckpointId, receipt: Receipt) -> None:
        arena, loop = self.node.arena, asyncio.get_running_loop()
        segment = await arena.allocate(receipt.nbytes, "", metadata=True, deadline=loop.time() + PICKLE_SECONDS)
        try:
            whole = [(0, receipt.nbytes)]
            try:
                await pull(self.peers, receipt.address, receipt.token, whole, segment.path, self.node.memory_threads)
            except errors.Unavailable:  # a connection that broke unnoticed fails the first call over it
                await pull(self.peers, receipt.address, receipt.token, whole, segment.path, self.node.memory_threads)
            if receipt.token in arena:  # asked for twice
                arena.drop(segment.token)
                return
            arena.seal(segment.token, receipt.nbytes, name=receipt.token)
        except BaseException:
            arena.drop(segment.token)
            raise
        # As if it had been written here: without a commit it expires with the shards.
        self.node.catalog.opened(receipt.token, checkpoint, receipt.rank, "", time.monotonic(), metadata=True)
        self.node.catalog.sealed(receipt.token, receipt, time.monotonic())

    def adopt(self, record: Record) -> None:
        """Writes the commit record. Doing it twice is harmless; raises WrongPhase if a newer attempt of the id is known here."""
        catalog, name = self.node.catalog, record.summary.attempt
        self.node.refuse_if_draining()
        checkpoint = CheckpointId.parse(record.summary.id)
        known = catalog.attempts.get(name)
        if known is not None:
            if known.ended:
                raise errors.WrongPhase(f"{checkpoint}: attempt {name} is over here: {known.reason}")
            return
        if name in self._abandoned:
            raise errors.WrongPhase(f"{checkpoint}: attempt {name} was abandoned: {self._abandoned[name]}")
        newer = [a for a in catalog.attempts.values() if a.id == checkpoint and a.name > name and a.state != Checkpoint.ABORTED]
        if newer:
            raise errors.WrongPhase(f"{checkpoint}: attempt {name} is older than attempt {newer[0].name}, which this node has accepted")
        binding.check_stops_nothing(catalog, checkpoint, durable=record.durable)
        own = own_tokens(record, catalog.node)
        binding.check_held(catalog, checkpoint, [receipt for receipt in record.shards if receipt.token in own])
        binding.check_held(catalog, checkpoint, [record.metadata], metadata=True)
        _check_addresses(checkpoint, (receipt for receipt in record.shards if not binding.is_own(catalog, receipt)))
        self.peers.learn(receipt.address for receipt in record.shards if receipt.node != catalog.node)
        self.node.accept(record, confirmed=False)

    def confirm(self, name: str) -> None:
        """All participants have accepted the attempt: from here on it supersedes older ones."""
        attempt = self.node.catalog.attempts.get(name)
        if attempt is not None and attempt.pending and not attempt.confirmed:
            try:
                self.node.confirm(attempt)
            except errors.CkptdError as exc:  # the next who says it lets it be tried again
                log.warning("%s was accepted by all nodes, and that cannot be noted yet: %s", attempt.id, exc)
                return
            self.accepted(attempt)

    def abandon(self, name: str, reason: str, *, deleted: bool) -> None:
        """The attempt was not accepted, or was `deleted`: it goes, unless it is durable. One that is not known yet will not be adopted."""
        attempt = self.node.catalog.attempts.get(name)
        self._note_abandoned(name, reason)
        if attempt is None:
            return
        if attempt.state != Checkpoint.DURABLE or deleted:
            attempt.was_durable |= attempt.state == Checkpoint.DURABLE
            attempt.deleted |= deleted
            log.warning("attempt %s of %s is abandoned: %s", name, attempt.id, reason)
            self.node.apply(self.node.catalog.aborted(name, reason))

    def _note_abandoned(self, name: str, reason: str) -> None:
        self._abandoned[name] = reason
        for oldest in list(self._abandoned)[:-REMEMBERED]:
            del self._abandoned[oldest]

    def fate(self, name: str) -> WatchReply.Fate:
        """What has become of an attempt here."""
        attempt = self.node.catalog.attempts.get(name)
        if attempt is None and name in self._abandoned:
            return WatchReply.Fate(attempt=name, state=Checkpoint.ABORTED, reason=self._abandoned[name])
        if attempt is None:
            return WatchReply.Fate(attempt=name)
        return WatchReply.Fate(
            attempt=name, state=attempt.state, reason=attempt.reason, held=sorted(attempt.held), adopted=not attempt.confirmed
        )


def _check_addresses(checkpoint: CheckpointId, receipts: Iterable[Receipt]) -> None:
    """Raises InvalidRequest if one of the receipts, of other nodes, has an address that none can be called by."""
    for receipt in receipts:
        try:
            parse_peer(receipt.address)
        except errors.InvalidRequest as exc:
            raise errors.InvalidRequest(
                f"{checkpoint}: the receipt of rank {receipt.rank} does not say where its daemon (node {receipt.node}) is called: {exc}"
            ) from None
