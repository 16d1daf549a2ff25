"""gRPC in and out: translates calls into the node's and the restore's.

Decides nothing. What goes wrong is raised: `statuses` makes of it what callers get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from ckptd import __version__, collector, errors, inspection
from ckptd.attempt import checkpoint_of
from ckptd.commits import Commits
from ckptd.fallback import Fallback
from ckptd.index import Piece
from ckptd.model import CheckpointId, parse_run, parse_target
from ckptd.node import Node
from ckptd.questions import to_its_end
from ckptd.reading import Source
from ckptd.restore import Restore
from ckptd.retention import Policy
from ckptd.segment import Segment
from ckptd.upkeep import Upkeep
from ckptd.v1 import daemon_pb2 as pb
from ckptd.v1.daemon_pb2_grpc import DaemonServicer
from ckptd.v1.manifest_pb2 import Receipt
from ckptd.verifier import Verifier
from ckptd.waits import before_save, until_durable

log = logging.getLogger(__name__)
#: An Allocate is answered this long before the caller's deadline, so that it learns why.
ANSWER_BEFORE_SECONDS = 0.5
#: Verdicts of a prune per reply: far below gRPC's 4 MiB.
VERDICTS_PER_REPLY = 5_000
#: A want waits this long for memory.
WANT_SECONDS = 120.0

Context = grpc.aio.ServicerContext[Any, Any]


class Service(DaemonServicer):
    """The calls of ckptd.v1.Daemon."""

    def __init__(
        self,
        node: Node,
        commits: Commits,
        restore: Restore,
        fallback: Fallback,
        verifier: Verifier,
        upkeep: Upkeep,
        *,
        store: str,
        status: Callable[[], pb.StatusReply],
    ) -> None:
        self.node = node
        self.commits = commits
        self.restore = restore
        self.fallback = fallback
        self.verifier = verifier
        self.upkeep = upkeep
        self.store = store
        self.status = status
        #: Set at the end of the daemon: held-open streams end then.
        self.ending = asyncio.Event()

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        return pb.HelloReply(
            node=self.node.catalog.node,
            version=__version__,
            store=self.store,
            memory=self.node.arena.budget,
            warning=self.node.catalog.warning,
            address=self.node.address,
        )

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> AsyncIterator[pb.LeaseEvent]:
        if not request.owner:
            raise errors.InvalidRequest("a lease names its owner")
        self.node.lease(request.owner)
        try:
            yield pb.LeaseEvent(node=self.node.catalog.node)
            await self.ending.wait()  # or until the caller hangs up or dies: then this is cancelled
        finally:
            self.node.lease_ended(request.owner)

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.Segment:
        arena = self.node.arena
        remaining = context.time_remaining()
        deadline = None
        if remaining is not None:
            deadline = asyncio.get_running_loop().time() + max(0.0, remaining - ANSWER_BEFORE_SECONDS)
        segment = await self.node.allocate(
            request.owner,
            CheckpointId.parse(request.id),
            request.rank,
            request.nbytes,
            metadata=request.kind == pb.AllocateRequest.METADATA,
            deadline=deadline,
        )
        reply = describe(segment)
        reply.keep.extend(arena.owned(request.owner))
        if request.nbytes > arena.budget // 2:
            reply.warning = (
                f"the shard of rank {request.rank} takes {request.nbytes / 2**20:.0f} MiB of the daemon's {arena.budget / 2**20:.0f} MiB: "
                "the next save has to wait until this one is durable; a budget of two saves avoids that (`ckptd serve --memory`)"
            )
        return reply

    async def Seal(self, request: pb.SealRequest, context: Context) -> Receipt:
        return await self.node.seal(request.owner, request.token, request.nbytes, request.table_nbytes)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        self.node.release(request.owner, request.token)
        return pb.ReleaseReply()

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.Checkpoint:
        # A task of its own: a caller that goes away must not leave half a commit.
        return checkpoint_of(await to_its_end("a commit", self.commits.commit(request)))

    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.Checkpoint:
        return await until_durable(self.restore, CheckpointId.parse(request.id), request.token, request.sealed_us)

    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> pb.Checkpoint:
        target = parse_target(request.id)
        if request.saving and isinstance(target, CheckpointId):
            return await before_save(self.restore, target)
        return await (self.fallback.resolve(target) if request.fallback else self.restore.resolve(target))

    async def Load(self, requests: AsyncIterator[pb.LoadRequest], context: Context) -> AsyncIterator[pb.LoadReply]:
        source: Source | None = None
        meant: tuple[CheckpointId, str] | None = None
        try:
            async for request in requests:
                step = request.WhichOneof("step")
                if source is None:
                    if step != "open":
                        raise errors.InvalidRequest("a load begins with `open`")
                    if not request.open.id and request.open.peers:  # nothing is read: these daemons are to know of each other
                        await self.restore.introduce(request.open.peers)
                        yield pb.LoadReply(opened=pb.LoadReply.Opened())
                        continue
                    meant = CheckpointId.parse(request.open.id), request.open.attempt
                    source = await self.restore.open(*meant, request.open.peers)
                    index = source.index
                    opened = pb.LoadReply.Opened(metadata=piece(index.metadata), checkpoint=source.checkpoint)
                    opened.tables.extend(map(piece, index.tables))
                    yield pb.LoadReply(opened=opened)
                elif step == "want":
                    want = request.want
                    deadline = asyncio.get_running_loop().time() + WANT_SECONDS
                    found = await source.want(want.shard, want.items, want.starts, want.ends, deadline)
                    yield pb.LoadReply(present=pb.LoadReply.Present(segment=describe(found.segment), nbytes=found.nbytes))
                elif step == "copied":
                    source.copied()
                    yield pb.LoadReply()
                else:
                    raise errors.InvalidRequest("a load opens one checkpoint, once")
        except errors.Corrupt as exc:
            if meant is not None:
                await self.verifier.loaded(self.restore.indexes.same(*meant), exc)
            raise
        finally:
            if source is not None:
                source.close()

    async def List(self, request: pb.ListRequest, context: Context) -> AsyncIterator[pb.Checkpoint]:
        run = parse_run(request.run) if request.HasField("run") else None
        lines, trouble = await self.restore.listing(run)
        for line in lines:
            yield line
        if trouble is not None:
            raise type(trouble)(f"only what memory holds was found: {trouble}") if lines else trouble

    async def Show(self, request: pb.ShowRequest, context: Context) -> AsyncIterator[pb.ShowReply]:
        target = parse_target(request.id)
        try:
            line = await self.restore.resolve(target, to_open=False)
        except errors.NotFound as exc:
            found = await self.restore.checkpoints(target.run) if isinstance(target, CheckpointId) else []
            for line in found:
                if line.summary.id == str(target):
                    raise errors.NotFound(f"{target} is {pb.Checkpoint.State.Name(line.state).lower()}: {line.reason}") from exc
            raise
        checkpoint = CheckpointId.parse(line.summary.id)
        if line.state == pb.Checkpoint.DURABLE:
            store, ledger = self.restore.fetcher.store, self.restore.ledger

            def from_store() -> list[pb.ShowReply]:
                with collector.paused():
                    return inspection.stored(store, ledger, ledger.find(checkpoint)).replies()

            replies = await asyncio.get_running_loop().run_in_executor(self.restore.threads, from_store)
        else:
            source = await self.restore.open(checkpoint, line.summary.attempt)
            try:
                tables = [(part.segment.path, part.at, part.nbytes) for part in source.index.tables]
                replies = await asyncio.to_thread(lambda: inspection.held(line, tables).replies())
            finally:
                source.close()
        for reply in replies:
            yield reply

    async def Prune(self, request: pb.PruneRequest, context: Context) -> AsyncIterator[pb.PruneReply]:
        rules = [request.HasField(name) for name in ("keep_last", "keep_every", "keep_within_seconds")]
        policy = Policy(
            keep_last=request.keep_last if rules[0] else None,
            keep_every=request.keep_every if rules[1] else None,
            keep_within_seconds=request.keep_within_seconds if rules[2] else None,
        )
        verdicts, swept = await self.upkeep.prune(
            parse_run(request.run) if request.HasField("run") else None,
            policy if any(rules) else None,
            dry_run=request.dry_run,
            delete_grace_seconds=request.delete_grace_seconds if request.HasField("delete_grace_seconds") else None,
            orphan_age_seconds=request.orphan_age_seconds if request.HasField("orphan_age_seconds") else None,
        )
        for at in range(0, len(verdicts), VERDICTS_PER_REPLY):
            some = verdicts[at : at + VERDICTS_PER_REPLY]
            yield pb.PruneReply(
                verdicts=[
                    pb.PruneReply.Verdict(id=str(one.id), kept=one.keep, reason=one.reason, stored_bytes=one.stored_bytes) for one in some
                ]
            )
        yield pb.PruneReply(
            swept=pb.PruneReply.Swept(
                files=swept.files, nbytes=swept.nbytes, later_files=swept.later_files, later_nbytes=swept.later_nbytes
            )
        )

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.Deleted:
        deleted, grace_seconds = await self.upkeep.delete(CheckpointId.parse(request.id))
        return pb.Deleted(id=str(deleted.id), files=deleted.files, nbytes=deleted.nbytes, grace_seconds=grace_seconds)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.Checkpoint:
        return await self.upkeep.pin(CheckpointId.parse(request.id), pinned=request.pinned)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[pb.DrainReply]:
        if request.cancel and self.node.drained:
            log.info("the drain was cancelled: new saves are taken again")
        async for reply in self.upkeep.drain(self.ending, cancel=request.cancel):
            yield reply

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        return self.status()

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncIterator[pb.VerifyReply]:
        async for reply in self.verifier.replies(request):
            yield reply


def describe(segment: Segment) -> pb.Segment:
    """A segment as the wire shows it."""
    return pb.Segment(token=segment.token, path=str(segment.path), inode=segment.inode, nbytes=segment.nbytes)


def piece(part: Piece) -> pb.LoadReply.Piece:
    """A part of a segment as the wire shows it."""
    return pb.LoadReply.Piece(segment=describe(part.segment), at=part.at, nbytes=part.nbytes)
