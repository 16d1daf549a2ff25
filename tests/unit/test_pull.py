"""Bytes between nodes: all that was asked for and nothing else, or an error that names the peer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import CkptdError, Corrupt, LeaseLost, NotFound, Unavailable
from ckptd.pull import PIECE_NBYTES, STREAM_NBYTES, STREAMS, receive, send, shared_out
from ckptd.v1.peer_pb2 import Bytes

PEER = "10.0.0.1:7"
NBYTES = 2 * PIECE_NBYTES + 12_345


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(bytes(number * 7 % 251 for number in range(NBYTES)))
    return path


async def stream(pieces: Sequence[Bytes]) -> AsyncIterator[Bytes]:
    for piece in pieces:
        yield piece


async def sent(source: Path, ranges: list[tuple[int, int]], threads: ThreadPoolExecutor) -> list[Bytes]:
    return [piece async for piece in send(source, ranges, lambda: True, threads)]


@pytest.mark.parametrize(
    "ranges",
    [[], [(0, NBYTES)], [(0, 1)], [(5, 5)], [(NBYTES - 1, NBYTES)], [(3, 9), (100, PIECE_NBYTES + 100), (NBYTES - 7, NBYTES)]],
)
def test_what_is_sent_arrives_in_its_place_and_nothing_beside_it(
    ranges: list[tuple[int, int]], source: Path, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(NBYTES))

    async def run() -> int:
        return await receive(send(source, ranges, lambda: True, threads), ranges, target, threads, PEER)

    assert asyncio.run(run()) == sum(end - start for start, end in ranges)
    expected = bytearray(NBYTES)
    for start, end in ranges:
        expected[start:end] = source.read_bytes()[start:end]
    assert target.read_bytes() == expected


def test_bytes_that_change_on_the_way_or_are_others_are_an_error(source: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    ranges = [(0, NBYTES)]
    pieces = asyncio.run(sent(source, ranges, threads))
    flipped = Bytes(at=pieces[1].at, data=pieces[1].data[:-1] + bytes([pieces[1].data[-1] ^ 1]), hash=pieces[1].hash)
    elsewhere = Bytes(at=pieces[1].at + 1, data=pieces[1].data, hash=pieces[1].hash)
    wrong: list[tuple[list[Bytes], type[CkptdError]]] = [
        ([pieces[0], flipped, *pieces[2:]], Corrupt),
        ([pieces[0], elsewhere, *pieces[2:]], Corrupt),
        ([pieces[1], pieces[0], *pieces[2:]], Corrupt),
        ([*pieces, pieces[0]], Corrupt),
        (pieces[:-1], Unavailable),
    ]
    target = tmp_path / "target"
    target.write_bytes(bytes(NBYTES))
    for told, kind in wrong:
        with pytest.raises(kind, match=PEER):
            asyncio.run(receive(stream(told), ranges, target, threads, PEER))


def test_a_segment_that_is_given_up_meanwhile_ends_the_stream_before_others_bytes_are_sent(
    source: Path, threads: ThreadPoolExecutor
) -> None:
    async def run() -> list[Bytes]:
        got = []
        async for piece in send(source, [(0, NBYTES)], lambda: len(got) < 1, threads):
            got.append(piece)  # noqa: PERF401 - what has arrived decides when it is given up
        return got

    with pytest.raises(LeaseLost):
        asyncio.run(run())
    with pytest.raises(NotFound):
        asyncio.run(sent(source.with_name("gone"), [(0, 1)], threads))


@given(st.lists(st.integers(0, 3 * STREAM_NBYTES), max_size=6))
def test_streams_share_all_of_it_and_none_twice(sizes: list[int]) -> None:
    ranges, at = [], 0
    for size in sizes:
        ranges.append((at, at + size))
        at += size + 1
    shares = shared_out(ranges)
    assert len(shares) <= STREAMS + 1
    whole = sorted(part for share in shares for part in share)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(whole))
    assert sum(end - start for start, end in whole) == sum(sizes)
