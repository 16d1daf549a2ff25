"""Asks a running daemon: one short-lived channel, and its errors as our own classes again.

Promises: a daemon that is not there is `Unavailable` with a way out, at once if
nothing listens and after CONNECT_SECONDS if something listens and says nothing.
Never retries: a person at a terminal does that better.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

# One line on stderr is ours to write: gRPC's own log would add to it. It is read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from ckptd import __version__, errors
from ckptd.addresses import is_unix
from ckptd.cli.documents import Shown
from ckptd.model import CheckpointId, parse_target
from ckptd.retention import Policy
from ckptd.v1 import daemon_pb2, daemon_pb2_grpc

#: For a daemon to say hello.
CONNECT_SECONDS = 10.0
#: For an answer that may make the daemon list a large store.
ANSWER_SECONDS = 300.0
#: For an answer that only adds to what is known, and may wait for a store that hangs.
DELAY_SECONDS = 5.0

_OPTIONS = (
    # A daemon is on this machine: a proxy for the outside world is not on the way to it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


class Daemon:
    """A daemon that has said hello. Use as a context manager."""

    def __init__(self, address: str) -> None:
        """Connects to `address` (``unix:PATH`` or ``HOST:PORT``); raises Unavailable."""
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = daemon_pb2_grpc.DaemonStub(self._channel)
        try:
            with _rebuilt(address, CONNECT_SECONDS):
                hello: daemon_pb2.HelloReply = self._stub.Hello(daemon_pb2.HelloRequest(version=__version__), timeout=CONNECT_SECONDS)
        except BaseException:
            self._channel.close()
            raise
        #: What the daemon says its store is.
        self.where = hello.store

    def checkpoints(self, run: str | None) -> list[daemon_pb2.Checkpoint]:
        """All checkpoints, or those of one run."""
        found, trouble = self.listing(run)
        if trouble is not None:
            raise trouble
        return found

    def listing(self, run: str | None) -> tuple[list[daemon_pb2.Checkpoint], errors.CkptdError | None]:
        """The same; if the daemon cannot read its store, what its memory holds, and why it cannot. Raises that if it holds nothing."""
        found: list[daemon_pb2.Checkpoint] = []
        try:
            with _rebuilt(self.address, ANSWER_SECONDS):
                for one in self._stub.List(daemon_pb2.ListRequest(run=run), timeout=ANSWER_SECONDS):
                    found.append(one)  # noqa: PERF402 - what has come counts if the rest does not
        except (errors.Unavailable, errors.StoreError) as exc:
            if not found:
                raise
            return found, exc
        return found, None

    def show(self, target: str) -> Shown:
        """One checkpoint by id, ``latest`` or ``<run>/latest``; raises NotFound."""
        with _rebuilt(self.address, ANSWER_SECONDS):
            replies: list[daemon_pb2.ShowReply] = list(self._stub.Show(daemon_pb2.ShowRequest(id=target), timeout=ANSWER_SECONDS))
        if not replies:
            raise errors.Unavailable(f"the daemon at {self.address} ended its answer early")
        return Shown(
            checkpoint=replies[0].checkpoint,
            tensors=[tensor for reply in replies for tensor in reply.tensors],
            files=[file for reply in replies for file in reply.files],
        )

    def wait(self, target: str, timeout_seconds: float | None) -> str | None:
        """The id once it is durable, None if it is not after the timeout; raises why it never will be."""
        try:
            with _rebuilt(self.address, None):
                wait = daemon_pb2.WaitRequest(id=self._resolved(target))
                reply: daemon_pb2.Checkpoint = self._stub.Wait(wait, timeout=timeout_seconds)
        except _TooLate:
            return None
        return reply.summary.id

    def delayed(self, target: str) -> str:
        """Why a checkpoint is not durable yet, as far as the daemon knows and says so soon; else ""."""
        with suppress(errors.CkptdError), _rebuilt(self.address, DELAY_SECONDS):
            found: daemon_pb2.Checkpoint = self._stub.Resolve(daemon_pb2.ResolveRequest(id=target), timeout=DELAY_SECONDS)
            return found.reason
        with suppress(errors.CkptdError):  # what cannot be restored now, because a node is away, is listed all the same
            listed, _ = self.listing(CheckpointId.parse(target).run)
            return next((one.reason for one in listed if one.summary.id == target), "")
        return ""

    def prune(
        self,
        run: str | None,
        policy: Policy | None,
        *,
        dry_run: bool,
        delete_grace_seconds: float | None,
        orphan_age_seconds: float | None,
    ) -> daemon_pb2.PruneReply:
        """All verdicts, and what was swept; None means what the daemon was started with."""
        request = daemon_pb2.PruneRequest(
            run=run, dry_run=dry_run, delete_grace_seconds=delete_grace_seconds, orphan_age_seconds=orphan_age_seconds
        )
        if policy is not None:
            request.MergeFrom(
                daemon_pb2.PruneRequest(
                    keep_last=policy.keep_last, keep_every=policy.keep_every, keep_within_seconds=policy.keep_within_seconds
                )
            )
        whole = daemon_pb2.PruneReply()
        with _rebuilt(self.address, None):
            for reply in self._stub.Prune(request):
                whole.MergeFrom(reply)
        if not whole.HasField("swept"):
            raise errors.Unavailable(f"the daemon at {self.address} ended its answer early: prune again")
        return whole

    def delete(self, id: CheckpointId) -> daemon_pb2.Deleted:
        """Deletes one checkpoint; raises NotFound, WrongPhase."""
        with _rebuilt(self.address, ANSWER_SECONDS):
            reply: daemon_pb2.Deleted = self._stub.Delete(daemon_pb2.DeleteRequest(id=str(id)), timeout=ANSWER_SECONDS)
            return reply

    def pin(self, target: str, *, pinned: bool) -> daemon_pb2.Checkpoint:
        """Pins or unpins one checkpoint by id, ``latest`` or ``<run>/latest``; raises NotFound."""
        with _rebuilt(self.address, ANSWER_SECONDS):
            request = daemon_pb2.PinRequest(id=self._resolved(target), pinned=pinned)
            reply: daemon_pb2.Checkpoint = self._stub.Pin(request, timeout=ANSWER_SECONDS)
            return reply

    def verify(self, target: str, run: str | None) -> Iterator[daemon_pb2.VerifyReply]:
        """Reads back one checkpoint, or with "" all of them (of one run); raises NotFound."""
        with _rebuilt(self.address, None):
            yield from self._stub.Verify(daemon_pb2.VerifyRequest(id=target, run=run))

    def drain(self, *, cancel: bool, timeout_seconds: float | None) -> Iterator[daemon_pb2.DrainReply]:
        """How much is on the way, until nothing is or the time is over."""
        with suppress(_TooLate), _rebuilt(self.address, None):
            yield from self._stub.Drain(daemon_pb2.DrainRequest(cancel=cancel), timeout=timeout_seconds)

    def status(self) -> daemon_pb2.StatusReply:
        """What the daemon says of itself."""
        with _rebuilt(self.address, CONNECT_SECONDS):
            reply: daemon_pb2.StatusReply = self._stub.Status(daemon_pb2.StatusRequest(), timeout=CONNECT_SECONDS)
            return reply

    def _resolved(self, target: str) -> str:
        if not isinstance(parse_target(target), str):
            return target
        found: daemon_pb2.Checkpoint = self._stub.Resolve(daemon_pb2.ResolveRequest(id=target), timeout=ANSWER_SECONDS)
        return found.summary.id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._channel.close()


class _TooLate(errors.Unavailable):
    """The call's deadline came."""


@contextmanager
def _rebuilt(address: str, deadline_seconds: float | None) -> Iterator[None]:
    """Raises what the daemon meant, from the kind in the trailing metadata."""
    try:
        yield
    except grpc.RpcError as error:
        details = str(error.details() or "")
        if (kind := errors.kind_of(error)) is not None:
            raise kind(details) from error
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            secret = "" if is_unix(address) else ", or use its unix socket if it speaks TLS"
            raise errors.Unavailable(
                f"no daemon answers at {address}: start one with `ckptd serve --store URL`{secret}; "
                "all commands but status and drain can open the store itself, with --store URL"
            ) from error
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            within = "" if deadline_seconds is None else f" within {deadline_seconds:.0f} s"
            raise _TooLate(f"the daemon at {address} did not answer{within}") from error
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise errors.InvalidRequest(f"what answers at {address} is no daemon of this version ({__version__}): {details}") from error
        raise errors.CkptdError(details or f"the daemon at {address} failed with {code.name}") from error
