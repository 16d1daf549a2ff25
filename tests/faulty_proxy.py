"""An HTTP proxy before a store's server that does to requests what networks and busy services do.

    with FaultyProxy(server.endpoint) as proxy:
        proxy.tell(refuse(503, "SlowDown", on="GET .*list-type", times=3))
        ...                                   # use proxy.endpoint instead of server.endpoint
        assert proxy.count("list-type=2") == 4

A request meets the first fault that matches its line (``PUT /bucket/key?uploadId=…``) and is not used
up; without one it passes unchanged. The proxy never looks into what it carries, so that it stands
before S3 and GCS alike.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

#: By name, as in "Content-Range".
Headers = dict[str, str]


@dataclass
class Fault:
    """What happens to a request whose line matches `on`. Several fields may be set: they happen in this order."""

    #: Searched for in "METHOD /path?query".
    on: str = ""
    #: How many requests meet it; the others pass.
    times: int = 1_000_000
    #: The connection is reset when so many bytes of the request's body have been read.
    reset_request_after: int | None = None
    #: The proxy waits so long before it goes on.
    delay_seconds: float = 0.0
    #: What is passed on instead: headers and body of the request.
    rewrite: Callable[[Headers, bytes], tuple[Headers, bytes]] | None = None
    #: Put after the path's own query on the way to the server.
    query: str = ""
    #: Instead of the answer; with `forwarded`, the server has done what was asked for all the same.
    status: int = 0
    body: bytes = b""
    content_type: str = "application/xml"
    forwarded: bool = False
    #: So many bytes of the answer's body come, then the connection is reset; 0: not even the head comes …
    reset_answer_after: int | None = None
    #: … or is closed in order, although the answer announced more.
    close_answer_after: int | None = None
    #: As if the answer had been so long from the start.
    shorten_answer_to: int | None = None


def refuse(status: int, code: str = "", *, on: str = "", times: int = 1_000_000, forwarded: bool = False) -> Fault:
    """S3's way to say no: with `forwarded`, after it was done."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told by a test</Message></Error>".encode() if code else b""
    return Fault(on=on, times=times, status=status, body=body, forwarded=forwarded)


def refuse_json(status: int, message: str = "told by a test", *, on: str = "", times: int = 1_000_000, forwarded: bool = False) -> Fault:
    """GCS's way."""
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    return Fault(on=on, times=times, status=status, body=body, forwarded=forwarded)


@dataclass
class FaultyProxy:
    """Listens on a free port of the loopback. Use as a context manager."""

    #: The server behind it, as a URL.
    upstream: str
    #: What becomes of requests that meet no fault: looks at line, headers and body, and may give one.
    judge: Callable[[str, Headers, bytes], Fault | None] = lambda _line, _headers, _body: None
    endpoint: str = ""
    #: The lines of all requests so far, those that met a fault included.
    lines: list[str] = field(default_factory=list)
    #: Bytes of all answers' bodies so far.
    nbytes_sent: int = 0
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, *faults: Fault) -> None:
        """From now on these, and no others."""
        with self._lock:
            self._faults = [*faults]

    def sent(self, nbytes: int) -> None:
        """Counts an answer's body."""
        with self._lock:
            self.nbytes_sent += nbytes

    def count(self, pattern: str) -> int:
        """How many requests so far had a line that `pattern` is found in."""
        return sum(re.search(pattern, line) is not None for line in [*self.lines])

    def meets(self, line: str) -> Fault | None:
        """Which fault a request meets; counts it as used."""
        with self._lock:
            self.lines.append(line)
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.on, line):
                    fault.times -= 1
                    return fault
        return None

    def __enter__(self) -> Self:
        proxy = self
        target = urlsplit(self.upstream).netloc

        class Handler(Exchange):
            def handle_one(self) -> None:
                self.carry(proxy, target)

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Server(ThreadingHTTPServer):
    #: A call that finds it full is sent again by the kernel after a second, which is longer than some clients wait.
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is what is tested; everything else is told."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Exchange(BaseHTTPRequestHandler):
    """One connection of a client; each request of it is passed on over a connection of its own."""

    protocol_version = "HTTP/1.1"
    #: What ends with the connection, and must not be sent on.
    hop_by_hop = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "content-length"})

    def handle_one(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.handle_one()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def carry(self, proxy: FaultyProxy, target: str) -> None:
        line = f"{self.command} {self.path}"
        fault = proxy.meets(line) or Fault()
        length = int(self.headers.get("Content-Length") or 0)
        if fault.reset_request_after is not None:
            self.rfile.read(min(length, fault.reset_request_after))
            self.reset()
            return
        body = self.rfile.read(length)
        headers = {name.title(): value for name, value in self.headers.items() if name.lower() not in self.hop_by_hop}
        if fault == Fault():
            fault = proxy.judge(line, headers, body) or fault
        time.sleep(fault.delay_seconds)
        if fault.rewrite is not None:
            headers, body = fault.rewrite(headers, body)
        asked = fault.forwarded or not fault.status
        status, told, answer = self.ask(target, f"{self.path}{fault.query}", headers, body) if asked else (0, {}, b"")
        if fault.status:
            status, told, answer = fault.status, {"Content-Type": fault.content_type}, fault.body
        if fault.shorten_answer_to is not None:
            answer = answer[: fault.shorten_answer_to]
        if fault.reset_answer_after == 0:
            self.reset()
            return
        self.send_response_only(status)
        for name, value in told.items():
            self.send_header(name, value)
        self.send_header("Content-Length", told.get("Content-Length", "0") if self.command == "HEAD" else str(len(answer)))
        self.end_headers()
        if self.command == "HEAD":
            return
        proxy.sent(len(answer))
        if fault.reset_answer_after is not None:
            self.wfile.write(answer[: fault.reset_answer_after])
            self.wfile.flush()
            self.reset()
        elif fault.close_answer_after is not None:
            self.wfile.write(answer[: fault.close_answer_after])
            self.close_connection = True
        else:
            self.wfile.write(answer)

    def ask(self, target: str, path: str, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        """The server's own answer."""
        upstream = http.client.HTTPConnection(target, timeout=60)
        try:
            upstream.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body)
            answer = upstream.getresponse()
            told = {name: value for name, value in answer.getheaders() if name.lower() not in self.hop_by_hop - {"content-length"}}
            data = answer.read()
            if self.command != "HEAD":
                told.pop("Content-Length", None)
            return answer.status, told, data
        finally:
            upstream.close()

    def reset(self) -> None:
        """Ends the connection as a crash does: what was not sent yet never comes."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        for end in (self.rfile, self.wfile, self.connection):
            end.close()
        self.rfile, self.wfile = io.BufferedReader(io.BytesIO()), io.BytesIO()  # what ends the request flushes them

    def log_message(self, format: str, *args: object) -> None:
        pass
