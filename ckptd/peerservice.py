"""gRPC from other daemons: translates calls into those of commits, watch and restore. Decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from ckptd import errors, serving
from ckptd.channels import CALLS_KEY, INTRODUCES_KEY, PEER_KEY
from ckptd.commits import Commits
from ckptd.peers import Peers
from ckptd.pull import send
from ckptd.restore import Restore
from ckptd.v1 import peer_pb2 as pb
from ckptd.v1.peer_pb2_grpc import PeerServicer
from ckptd.watch import Watch

Context = grpc.aio.ServicerContext[Any, Any]


class PeerService(PeerServicer):
    """The calls of ckptd.v1.Peer."""

    def __init__(self, commits: Commits, watch: Watch, restore: Restore) -> None:
        self.commits = commits
        self.watch = watch
        self.restore = restore
        self.node = commits.node

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:
        return await self.commits.prepare(request)

    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptReply:
        self.commits.adopt(request.record)
        return pb.AdoptReply()

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.AbandonReply:
        self.commits.abandon(request.attempt, request.reason, deleted=request.deleted)
        return pb.AbandonReply()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> pb.WatchReply:
        return pb.WatchReply(fates=map(self.commits.fate, request.attempts))

    async def Tell(self, request: pb.TellRequest, context: Context) -> pb.TellReply:
        if request.accepted:
            self.commits.confirm(request.attempt)
        if request.again:
            self.watch.try_again(request.attempt)
        self.watch.look(request.attempt)
        return pb.TellReply()

    async def Pull(self, request: pb.PullRequest, context: Context) -> AsyncIterator[pb.Bytes]:
        arena, catalog, token = self.node.arena, self.node.catalog, request.token
        shard = catalog.shards.get(token)
        if shard is None or shard.receipt is None or token not in arena:
            raise errors.NotFound(f"shard {token} is not held here (any more)")
        segment = arena.get(token)
        ranges = [(piece.at, piece.at + piece.nbytes) for piece in request.ranges]
        if any(end > segment.nbytes for _, end in ranges):
            raise errors.InvalidRequest(f"shard {token} has {segment.nbytes} bytes, and more were asked for")
        attempt = catalog.holder(token)
        if attempt is not None:
            catalog.pin(attempt.name)
        try:
            async for piece in send(segment.path, ranges, lambda: token in arena, self.node.memory_threads):
                yield piece
        finally:
            if attempt is not None:
                self.node.unpin(attempt.name)

    async def Holdings(self, request: pb.HoldingsRequest, context: Context) -> AsyncIterator[pb.Holding]:
        async for holding in serving.holdings(self.restore, request):
            yield holding

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.Bytes]:
        async for piece in serving.fetch(self.restore, request):
            yield piece


class Introductions(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Learns the address of every daemon that calls, those that it tells of, and those that lead to this one."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        for key, value in handler_call_details.invocation_metadata or ():
            text = value if isinstance(value, str) else value.decode(errors="replace")
            if key in (PEER_KEY, INTRODUCES_KEY):
                for address in text.split(","):
                    self.peers.called(address)
            elif key == CALLS_KEY:
                self.peers.came_back(text)
        return await continuation(handler_call_details)
