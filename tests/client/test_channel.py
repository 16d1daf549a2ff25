"""Errors arrive as the class that was raised, and who answers is who was meant."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from ckptd import __version__
from ckptd.errors import TABLE, CkptdError, InvalidRequest, Unavailable, WrongPhase
from ckptd.v1 import daemon_pb2, daemon_pb2_grpc
from ckptd_client.channel import Daemon, connect, unanswered, warn_once


@contextmanager
def serving(servicer: daemon_pb2_grpc.DaemonServicer) -> Iterator[Daemon]:
    """A server in this process that answers as `servicer` does."""
    server = grpc.server(ThreadPoolExecutor(2))
    daemon_pb2_grpc.add_DaemonServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    daemon = Daemon(f"127.0.0.1:{port}")
    try:
        yield daemon
    finally:
        daemon.close()
        server.stop(1.0).wait()


class Saying(daemon_pb2_grpc.DaemonServicer):
    """Greets as another version, and refuses to resolve anything as it was told to."""

    def __init__(self, version: str = __version__, code: grpc.StatusCode | None = None, kind: str = "", warning: str = "") -> None:
        self.version = version
        self.code = code
        self.kind = kind
        self.warning = warning

    def Hello(self, request: daemon_pb2.HelloRequest, context: grpc.ServicerContext) -> daemon_pb2.HelloReply:
        return daemon_pb2.HelloReply(version=self.version, warning=self.warning)

    def Resolve(self, request: daemon_pb2.ResolveRequest, context: grpc.ServicerContext) -> Any:
        assert self.code is not None
        context.set_trailing_metadata((("ckptd-kind", self.kind),) if self.kind else ())
        context.abort(self.code, f"no, because of ключ {request.id}")


@pytest.mark.parametrize("kind", TABLE.values(), ids=TABLE.keys())
def test_every_kind_of_error_arrives_as_itself_with_its_message(kind: type[CkptdError]) -> None:
    with serving(Saying(code=getattr(grpc.StatusCode, kind.status), kind=kind.__name__)) as daemon:
        with pytest.raises(CkptdError) as caught:
            daemon.resolve(daemon_pb2.ResolveRequest(id="step-1"))
        assert type(caught.value) is kind
        assert str(caught.value) == f"no, because of ключ step-1 (daemon at {daemon.address})"
        assert not unanswered(caught.value)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable),
        (grpc.StatusCode.CANCELLED, Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, InvalidRequest),
        (grpc.StatusCode.INTERNAL, CkptdError),
        (grpc.StatusCode.UNKNOWN, CkptdError),
    ],
)
def test_what_comes_without_a_kind_says_what_was_being_done(code: grpc.StatusCode, expected: type[CkptdError]) -> None:
    with serving(Saying(code=code)) as daemon:
        with pytest.raises(CkptdError, match="find 'step-1'") as caught:
            daemon.resolve(daemon_pb2.ResolveRequest(id="step-1"))
        assert type(caught.value) is expected
        assert unanswered(caught.value) == (expected is Unavailable)


def test_a_daemon_of_another_version_is_refused_with_both_numbers() -> None:
    with serving(Saying(version="9.9.1")) as daemon, pytest.raises(WrongPhase, match=f"9.9.1.*{__version__}"):
        daemon.hello()


def test_a_patch_release_is_no_other_version() -> None:
    with serving(Saying(version=".".join([*__version__.split(".")[:2], "77"]))) as daemon:
        daemon.hello()


def test_a_server_of_something_else_is_no_daemon() -> None:
    with serving(daemon_pb2_grpc.DaemonServicer()) as daemon, pytest.raises(InvalidRequest, match="no ckptd daemon"):
        daemon.hello()


def test_a_warning_is_shown_once() -> None:
    with serving(Saying(warning="step-7 has failed")) as daemon:
        with pytest.warns(UserWarning, match="step-7 has failed"):
            warn_once(daemon.hello().warning)
        warn_once(daemon.hello().warning)  # a second warning would be an error here


def test_one_process_has_one_connection_per_address() -> None:
    assert connect("127.0.0.1:1") is connect("127.0.0.1:1")
    assert connect("127.0.0.1:1") is not connect("127.0.0.1:2")
    assert connect("unix:///a/b") is connect("unix:/a/b")
