"""Bytes of segments between nodes: in pieces over gRPC, each with its hash, straight into a local segment.

Promises: what arrives is what lay in the peer's segment while it held it under that token, or the pull
fails; every byte that was asked for is written, once. Knows nothing of what the bytes mean, and of
budgets: whoever calls has the memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final

from ckptd import errors
from ckptd.codec import block_hash
from ckptd.peers import Peers
from ckptd.table import read_exactly
from ckptd.v1.peer_pb2 import Bytes, PullRequest

#: Bytes per message: below this gRPC's cost per message shows, and above 4 MiB it refuses them.
PIECE_NBYTES: Final = 2 * 1024 * 1024
#: Streams per shard at the same time, and the bytes from which another one is worth it.
STREAMS: Final = 4
STREAM_NBYTES: Final = 32 * 1024 * 1024
#: A peer that sends nothing for so long is given up.
STALL_SECONDS: Final = 8.0
#: Pieces that are being written while the next ones arrive.
_AHEAD: Final = 4

Range = tuple[int, int]


async def pull(peers: Peers, address: str, token: str, ranges: Sequence[Range], path: Path, threads: Executor) -> int:
    """Writes [start, end) ranges of the peer's segment to the same places of the file; returns their bytes.

    Raises Unavailable if the peer cannot be reached or stalls, NotFound or LeaseLost if it does not hold the segment
    (any more), Corrupt if bytes changed on the way; each names the peer.
    """
    shares = shared_out(ranges)
    pulls = [asyncio.ensure_future(_pull_one(peers, address, token, share, path, threads)) for share in shares]
    try:
        return sum(await asyncio.gather(*pulls))
    finally:
        for one in pulls:
            one.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)


async def _pull_one(peers: Peers, address: str, token: str, ranges: Sequence[Range], path: Path, threads: Executor) -> int:
    request = PullRequest(token=token, ranges=[PullRequest.Range(at=start, nbytes=end - start) for start, end in ranges])
    doing = f"send shard {token}"
    return await receive(peers.stream(address, doing, lambda stub: stub.Pull(request), STALL_SECONDS), ranges, path, threads, address)


async def pull_bytes(peers: Peers, address: str, token: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of the peer's segment, for what is small enough to be taken at once; raises what `pull` raises."""
    if start == end:
        return b""
    request = PullRequest(token=token, ranges=[PullRequest.Range(at=start, nbytes=end - start)])
    found = bytearray()
    async for piece in peers.stream(address, f"send shard {token}", lambda stub: stub.Pull(request), STALL_SECONDS):
        if piece.at != start + len(found) or block_hash(piece.data) != piece.hash:
            raise errors.Corrupt(f"bytes from the ckptd daemon at {address} changed on the way: try again")
        found += piece.data
    if len(found) != end - start:
        raise errors.Unavailable(f"the ckptd daemon at {address} stopped in the middle of a shard: try again")
    return bytes(found)


async def receive(replies: AsyncIterator[Any], ranges: Sequence[Range], path: Path, threads: Executor, address: str) -> int:
    """Writes the pieces of a stream, which must be those of `ranges` in their order."""
    expected = list(_pieces(ranges))
    loop = asyncio.get_running_loop()
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    writes: list[asyncio.Future[None]] = []
    try:
        at = 0
        async for piece in replies:
            if at >= len(expected) or (piece.at, piece.at + len(piece.data)) != expected[at]:
                raise errors.Corrupt(f"the ckptd daemon at {address} sent other bytes than it was asked for: try again")
            at += 1
            writes.append(loop.run_in_executor(threads, _write, fd, piece, address))
            if len(writes) > _AHEAD:
                await writes.pop(0)
        while writes:
            await writes.pop(0)
        if at < len(expected):
            raise errors.Unavailable(f"the ckptd daemon at {address} stopped in the middle of a shard: try again")
    finally:
        await asyncio.gather(*writes, return_exceptions=True)
        os.close(fd)
    return sum(end - start for start, end in ranges)


async def send(path: Path, ranges: Sequence[Range], still_held: Callable[[], bool], threads: Executor) -> AsyncIterator[Bytes]:
    """The pieces of [start, end) ranges of a local segment.

    Raises LeaseLost once `still_held` is false: then its bytes may be another's.
    """
    loop = asyncio.get_running_loop()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise errors.NotFound("the segment is not there any more") from exc
    ahead: asyncio.Future[Bytes] | None = None
    try:
        for start, end in _pieces(ranges):
            following = loop.run_in_executor(threads, _read, fd, start, end)
            if ahead is not None:
                piece, ahead = await ahead, following
                if not still_held():
                    raise errors.LeaseLost("the segment was given up while it was sent")
                yield piece
            ahead = following
        if ahead is not None:
            piece, ahead = await ahead, None
            if not still_held():
                raise errors.LeaseLost("the segment was given up while it was sent")
            yield piece
    finally:
        if ahead is not None:
            await asyncio.gather(ahead, return_exceptions=True)
        os.close(fd)


def shared_out(ranges: Sequence[Range]) -> list[list[Range]]:
    """The same ranges for a few streams of about the same size."""
    total = sum(end - start for start, end in ranges)
    each = max(-(-total // STREAMS), STREAM_NBYTES)
    shares: list[list[Range]] = [[]]
    room = each
    for start, end in ranges:
        at = start
        while at < end:
            if room == 0:
                shares.append([])
                room = each
            part = min(end - at, room)
            shares[-1].append((at, at + part))
            at += part
            room -= part
    return shares


def _pieces(ranges: Sequence[Range]) -> Iterator[Range]:
    for start, end in ranges:
        for at in range(start, end, PIECE_NBYTES):
            yield at, min(at + PIECE_NBYTES, end)


def _read(fd: int, start: int, end: int) -> Bytes:
    data = read_exactly(fd, start, end - start)
    return Bytes(at=start, data=data, hash=block_hash(data))


def _write(fd: int, piece: Bytes, address: str) -> None:
    data = piece.data
    if block_hash(data) != piece.hash:
        raise errors.Corrupt(f"bytes from the ckptd daemon at {address} changed on the way: try again")
    view, written = memoryview(data), 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], piece.at + written)
