"""One load stream: what it is open for stays pinned; Want, Present, Copied, acknowledged.

Promises: a mapping that was handed out is valid until the next `fetch` or the end of
the block, and what was copied out of it counts only once `copied` has returned.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from ckptd.errors import CkptdError, Unavailable
from ckptd.v1 import daemon_pb2, manifest_pb2
from ckptd_client.channel import Daemon, rebuild
from ckptd_client.mapping import Mapping, open_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

#: A daemon that says nothing for so long is taken for stuck; fetching one batch from a slow store takes less.
_REPLY_SECONDS: Final = 300.0


class LoadStream:
    """Reads one attempt; a context manager. Raises LeaseLost if the daemon no longer holds what is read.

    `peers`: addresses of the daemons of all ranks that load it together.
    """

    def __init__(self, daemon: Daemon, checkpoint_id: str, attempt: str, peers: Sequence[str] = ()) -> None:
        self._daemon = daemon
        self._doing = f"load {checkpoint_id!r}"
        self._requests: queue.SimpleQueue[daemon_pb2.LoadRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[daemon_pb2.LoadReply | CkptdError] = queue.SimpleQueue()
        self._mappings: dict[int, Mapping] = {}
        self._call: Any = daemon.load(self._outgoing())
        threading.Thread(target=self._pump, name="ckptd-load", daemon=True).start()
        self._open = daemon_pb2.LoadRequest.Open(id=checkpoint_id, attempt=attempt, peers=peers)

    def open(self) -> daemon_pb2.LoadReply.Opened:
        """Opens the attempt, which has to come first; from here on nothing of it goes away."""
        return self._ask(daemon_pb2.LoadRequest(open=self._open)).opened

    def index(self, opened: daemon_pb2.LoadReply.Opened) -> tuple[bytes, list[manifest_pb2.Table]]:
        """The metadata pickle and the shards' item tables of what was opened."""
        return self._read(opened.metadata), [manifest_pb2.Table.FromString(self._read(table)) for table in opened.tables]

    def fetch(self, want: daemon_pb2.LoadRequest.Want) -> tuple[Mapping, list[int]]:
        """The shard's segment, mapped: the ranges that were wanted are there, the rest may not be.

        And, of a stock checkpoint, how many bytes each wanted item really has.
        """
        present = self._ask(daemon_pb2.LoadRequest(want=want)).present
        return self._mapping(present.segment), list(present.nbytes)

    def copied(self) -> None:
        """Says that the last fetch has been copied; when it returns, nothing has changed under the copy."""
        self._ask(daemon_pb2.LoadRequest(copied=daemon_pb2.LoadRequest.Copied()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._requests.put(None)
        if value is not None:
            self._call.cancel()
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()

    def _read(self, piece: daemon_pb2.LoadReply.Piece) -> bytes:
        return bytes(self._mapping(piece.segment).view(piece.at, piece.nbytes))

    def _mapping(self, segment: daemon_pb2.Segment) -> Mapping:
        mapping = self._mappings.get(segment.inode)
        if mapping is None:
            for other in self._mappings.values():
                other.close()
            self._mappings.clear()
            mapping = self._mappings[segment.inode] = open_mapping(segment.path, segment.inode, segment.nbytes, writable=False)
        return mapping

    def _ask(self, request: daemon_pb2.LoadRequest) -> daemon_pb2.LoadReply:
        self._requests.put(request)
        try:
            reply = self._replies.get(timeout=_REPLY_SECONDS)
        except queue.Empty:
            self._call.cancel()
            raise self._failed(f"said nothing for {_REPLY_SECONDS:.0f} s") from None
        if isinstance(reply, CkptdError):
            raise reply
        return reply

    def _outgoing(self) -> Iterator[daemon_pb2.LoadRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _pump(self) -> None:
        try:
            for reply in self._call:
                self._replies.put(reply)
        except grpc.RpcError as error:
            self._replies.put(_caused(rebuild(error, self._daemon.address, self._doing), error))
        else:
            self._replies.put(self._failed("ended the stream"))

    def _failed(self, how: str) -> Unavailable:
        return Unavailable(f"the ckptd daemon at {self._daemon.address} {how} while it was asked to {self._doing}")


def _caused(error: CkptdError, cause: grpc.RpcError) -> CkptdError:
    error.__cause__ = cause
    return error
