"""One process's connection to its daemon: a lazy channel, its lease, and errors rebuilt.

A connection belongs to one process: after a fork the child makes its own and never
touches the parent's (a gRPC channel and a mapped segment are both unusable there).
Every error that leaves this room is one of ``ckptd.errors``, the same class that the
daemon raised; what gRPC itself raises becomes Unavailable with what was being done.
Nothing is retried here, and nothing connects before it is needed.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from ckptd import __version__
from ckptd.errors import CkptdError, InvalidRequest, Unavailable, WrongPhase, kind_of
from ckptd.v1 import daemon_pb2, daemon_pb2_grpc, manifest_pb2
from ckptd_client.address import connect_seconds, resolve_address, save_seconds
from ckptd_client.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How long a call may take that waits for nothing but the daemon's own work.
_CALL_SECONDS: Final = 60.0
#: How often a daemon that works on a call without a deadline is asked whether it is still there.
_ALIVE_SECONDS: Final = 15.0
#: How long may pass until a connection is taken.
_ACCEPT_SECONDS: Final = 1.0
#: How long a best-effort clean-up may take.
_CLEANUP_SECONDS: Final = 5.0
_OPTIONS: Final = (
    # The daemon is on this node: a proxy from the environment can only be wrong.
    ("grpc.enable_http_proxy", 0),
    # A call fails when its connection fails: only the caller knows whether it may be sent again.
    ("grpc.enable_retries", 0),
    # A daemon that comes back is found within a second, not after minutes of backoff; one that is slow to answer has ten (the
    # middle one is how long one attempt to connect may take).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_GONE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def rebuild(error: grpc.RpcError, address: str, doing: str) -> CkptdError:
    """The error of ``ckptd.errors`` that a failed call means; to be raised ``from`` it."""
    code, details = cast("Any", error).code(), cast("Any", error).details() or ""
    kind = kind_of(error)
    if kind is not None:
        return kind(details if address in details else f"{details} (daemon at {address})")
    if code in _GONE:
        how = "took too long" if code is grpc.StatusCode.DEADLINE_EXCEEDED else "went away"
        return Unavailable(f"the ckptd daemon at {address} {how} while it was asked to {doing} ({details or code.name})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"what answers at {address} cannot {doing}: it is no ckptd daemon, or one of another version ({details})")
    return CkptdError(f"the ckptd daemon at {address} failed to {doing}: {code.name if code else 'UNKNOWN'} {details} (its log says more)")


def unanswered(error: BaseException) -> bool:
    """Whether the daemon gave no answer, so that nobody knows whether it did what was asked."""
    cause = error.__cause__
    return isinstance(error, Unavailable) and isinstance(cause, grpc.RpcError) and kind_of(cause) is None


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Shows a daemon's warning to the user, once per text and process."""
    if text and text not in _warned:
        warnings.warn(f"ckptd: {text}", UserWarning, stacklevel=4)
        _warned.add(text)


def warn_always(text: str) -> None:
    """Shows a warning to the user, each time: Python itself shows the same text once."""
    warnings.warn_explicit(f"ckptd: {text}", UserWarning, __file__, 0, module=__name__, registry={})


class Daemon:
    """The daemon at one address, as this process sees it. Get it from `connect`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._pid = os.getpid()
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = cast("Any", daemon_pb2_grpc).DaemonStub(self._channel)
        self._lock = threading.Lock()
        self._lease: Lease | None = None

    def hello(self, *, seconds: float | None = None) -> daemon_pb2.HelloReply:
        """Asks who is there, waiting up to `seconds` (default ``CKPTD_CONNECT_TIMEOUT``) for somebody.

        Raises Unavailable if nobody answers, WrongPhase if client and daemon do not
        speak the same version.
        """
        timeout = connect_seconds() if seconds is None else seconds
        try:
            reply = self._stub.Hello(daemon_pb2.HelloRequest(version=__version__), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            rebuilt = rebuild(error, self.address, "say hello")
            if isinstance(rebuilt, Unavailable) and kind_of(error) is None:
                rebuilt = Unavailable(
                    f"the ckptd daemon at {self.address} does not answer: is it stopped, or overloaded?"
                    if _accepts(self.address)
                    else f"no ckptd daemon answers at {self.address}: start one with `ckptd serve --store URL`, or set CKPTD_ADDRESS"
                )
            raise rebuilt from error
        if _release(reply.version) != _release(__version__):
            raise WrongPhase(
                f"the ckptd daemon at {self.address} is version {reply.version}, this client is {__version__}: "
                f"they work together only if both are {_release(__version__)}.x"
            )
        return cast("daemon_pb2.HelloReply", reply)

    def lease(self) -> Lease:
        """This process's live lease; opens one if there is none, or if the last was lost."""
        with self._lock:
            if self._lease is None or self._lease.lost:
                if self._lease is not None:
                    self._lease.close()
                self._lease = Lease(self._stub, self.address, seconds=connect_seconds())
            return self._lease

    def allocate(self, request: daemon_pb2.AllocateRequest) -> daemon_pb2.Segment:
        """A segment to write into; waits up to ``CKPTD_SAVE_TIMEOUT`` for room, then raises ArenaFull."""
        doing = f"give {request.nbytes} bytes of memory for {request.id!r}"
        return cast("daemon_pb2.Segment", self._call("Allocate", request, doing, save_seconds()))

    def seal(self, request: daemon_pb2.SealRequest) -> manifest_pb2.Receipt:
        """Ends the writing of a segment; returns its receipt."""
        return cast("manifest_pb2.Receipt", self._call("Seal", request, "seal a shard", _CALL_SECONDS))

    def release(self, request: daemon_pb2.ReleaseRequest) -> bool:
        """Gives a segment back whose save has failed; never raises. False: nobody knows whether the daemon has taken it."""
        try:
            self._call("Release", request, "take a segment back", _CLEANUP_SECONDS)
        except CkptdError as error:
            return not unanswered(error)
        return True

    def commit(self, request: daemon_pb2.CommitRequest) -> daemon_pb2.Checkpoint:
        """Binds shards into a checkpoint; returns when it is accepted."""
        return cast("daemon_pb2.Checkpoint", self._call("Commit", request, f"commit {request.id!r}", _CALL_SECONDS))

    def resolve(self, request: daemon_pb2.ResolveRequest, *, seconds: float = _CALL_SECONDS) -> daemon_pb2.Checkpoint:
        """Which attempt an id, ``latest`` or ``<run>/latest`` means now."""
        return cast("daemon_pb2.Checkpoint", self._call("Resolve", request, f"find {request.id!r}", seconds))

    def resolve_whole(self, target: str) -> daemon_pb2.Checkpoint:
        """The same, or the newest good one before it if it is damaged: as long as the daemon lives, it may take to read them back."""
        doing = f"find {target!r}, or what is good before it"
        call = self._stub.Resolve.future(daemon_pb2.ResolveRequest(id=target, fallback=True))
        try:
            while True:
                try:
                    return cast("daemon_pb2.Checkpoint", call.result(timeout=_ALIVE_SECONDS))
                except grpc.FutureTimeoutError:
                    self._call("Hello", daemon_pb2.HelloRequest(version=__version__), doing, _CALL_SECONDS)
        except grpc.RpcError as error:
            raise rebuild(error, self.address, doing) from error
        finally:
            call.cancel()

    def wait(self, request: daemon_pb2.WaitRequest, seconds: float | None) -> daemon_pb2.Checkpoint:
        """Returns when a checkpoint is durable; Unavailable also when `seconds` have passed."""
        return cast("daemon_pb2.Checkpoint", self._call("Wait", request, f"wait for {request.id!r}", seconds))

    def load(self, requests: Iterator[daemon_pb2.LoadRequest]) -> Any:
        """Opens a load stream: a gRPC call that iterates over LoadReply."""
        return self._stub.Load(requests)

    def close(self) -> None:
        """Ends lease and channel, quietly; only in the process that opened them."""
        if self._pid != os.getpid():
            return
        if self._lease is not None:
            self._lease.close()
        self._channel.close()

    def _call(self, method: str, request: Any, doing: str, seconds: float | None) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=seconds)
        except grpc.RpcError as error:
            raise rebuild(error, self.address, doing) from error


def _accepts(address: str) -> bool:
    """Whether somebody takes connections there."""
    host, _, port = address.rpartition(":")
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as tried:
                tried.settimeout(_ACCEPT_SECONDS)
                tried.connect(address.removeprefix("unix:"))
        else:
            socket.create_connection((host.strip("[]"), int(port)), _ACCEPT_SECONDS).close()
    except (OSError, ValueError):  # also an address of another kind that gRPC knows
        return False
    return True


def _release(version: str) -> str:
    """What has to be equal: the first two numbers."""
    return ".".join(version.split(".")[:2])


_daemons: dict[str, Daemon] = {}
_lock = threading.Lock()
#: Connections of a parent process. Kept, because to destroy one would close what the parent uses.
_inherited: list[Daemon] = []


def connect(address: str | None) -> Daemon:
    """This process's connection to the daemon at `address` (default: ``CKPTD_ADDRESS``); connects at first use."""
    resolved = resolve_address(address)
    with _lock:
        daemon = _daemons.get(resolved)
        if daemon is None:
            daemon = _daemons[resolved] = Daemon(resolved)
        return daemon


def _forget_parent() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    _inherited.extend(_daemons.values())
    _daemons.clear()


def _close_all() -> None:
    for daemon in _daemons.values():
        daemon.close()


os.register_at_fork(after_in_child=_forget_parent)
atexit.register(_close_all)
