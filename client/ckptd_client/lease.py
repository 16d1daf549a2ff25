"""A held-open stream that tells the daemon "this process still lives", and what it has mapped.

While the lease lives the daemon keeps this process's unsealed segments; when it ends,
by exit, SIGKILL or a restart of the daemon, they are gone, and so the mappings here are
dropped. A lease is never revived: the next save opens another under another owner name,
so that a late end of the old one cannot take the new one's segments.

Promises: a mapping is never unmapped while somebody copies through it.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc

from ckptd.errors import LeaseLost, Unavailable
from ckptd.v1 import daemon_pb2
from ckptd_client.forking import Nudge
from ckptd_client.mapping import Mappings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptd_client.mapping import Mapping


class Lease:
    """One owner's lease. Thread-safe; belongs to the process that opened it."""

    def __init__(self, stub: Any, address: str, *, seconds: float) -> None:
        """Opens the stream and waits up to `seconds` for the daemon's first word; raises Unavailable."""
        self.owner = secrets.token_hex(8)
        self._mappings = Mappings()
        self._copying: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._ended = threading.Event()
        self._nudge: Nudge | None = Nudge(lambda: stub.Hello.future(daemon_pb2.HelloRequest(), timeout=seconds))
        self._call = stub.Lease(daemon_pb2.LeaseRequest(owner=self.owner, pid=os.getpid()))
        if not self._call.add_callback(self._end):
            self._end()
        # Only the first word is read by a thread. One that waited for more would take gRPC's lock of this call now and then,
        # and a child that is forked in that moment waits for it for ever.
        threading.Thread(target=self._read_first, name="ckptd-lease", daemon=True).start()
        answered = self._answered.wait(seconds)
        if not answered or self._ended.is_set():
            self._call.cancel()
            raise Unavailable(f"the ckptd daemon at {address} gave no lease ({self._why() if answered else 'no answer'}): try again")

    @property
    def lost(self) -> bool:
        """Whether the daemon no longer guards this owner's unsealed segments."""
        return self._ended.is_set()

    def check(self, *, grace_seconds: float = 0.0) -> None:
        """Raises LeaseLost if the lease is gone, or ends within `grace_seconds`."""
        if self._ended.wait(grace_seconds):
            raise LeaseLost("the ckptd daemon went away, or was restarted, during the save: what was copied is lost, save again")

    @contextmanager
    def mapped(self, segment: daemon_pb2.Segment) -> Iterator[Mapping]:
        """The segment in this process's memory, writable, for as long as the block runs.

        Mappings stay for the next save, except those that the daemon no longer names.
        """
        with self._lock:
            self._mappings.keep_only([*segment.keep, *self._copying])
            mapping = self._mappings.obtain(segment)
            self._copying[segment.inode] += 1
        try:
            yield mapping
        finally:
            with self._lock:
                self._copying[segment.inode] -= 1
                self._copying += Counter()  # forgets what nobody copies
                if self.lost:
                    self._mappings.keep_only(list(self._copying))

    def close(self) -> None:
        """Ends the lease and unmaps everything that is not being copied."""
        self._nudge = None
        self._ended.set()
        self._call.cancel()
        with self._lock:
            self._mappings.keep_only(list(self._copying))

    def _read_first(self) -> None:
        try:
            next(self._call)
        except (grpc.RpcError, StopIteration):
            self._ended.set()  # how it ended is in the call itself
        self._answered.set()

    def _end(self) -> None:
        self._nudge = None
        self._ended.set()
        self._answered.set()

    def _why(self) -> str:
        return cast("str", self._call.details() or self._call.code().name)
