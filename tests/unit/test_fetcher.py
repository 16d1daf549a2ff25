"""The fetcher's arithmetic: which blocks lie under a range, and which pages under blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import errors
from ckptd.blocks import PAGE, StoredBlock, pages_nbytes, runs
from ckptd.codec import Raw
from ckptd.fetcher import Cached
from ckptd.segment import Segment
from ckptd.v1.manifest_pb2 import Item, Stored, StoredShard, Table

BLOCK = 1000


def cached() -> Cached:
    """Two items: raw bytes 100 to 2600 of a container of 2700 bytes in three blocks, then an opaque one of 500 bytes."""
    table = Table(
        items=[
            Item(fqn=b"a", kind=Item.RAW, at=0, raw_at=100, nbytes=2500),
            Item(fqn=b"b", kind=Item.OPAQUE_OBJECT, at=2700, raw_at=2700, nbytes=500),
        ],
        end=3200,
    )
    stored = [Stored(offset=0, lengths=[10, 20, 30], hashes=bytes(48)), Stored(offset=60, lengths=[40], hashes=bytes(16))]
    shard = StoredShard(file="__0_x.distcp", nbytes=100, table=table, stored=stored)
    return Cached(shard, "key", Raw(), BLOCK, Segment("t", "", 3200, 1, Path("nowhere"), "cache", 0))


def where(blocks: list[StoredBlock]) -> list[tuple[tuple[int, int], int, int, int, int]]:
    return [(block.key, block.at, block.nbytes, block.offset, block.length) for block in blocks]


def test_a_range_leads_to_the_blocks_that_hold_it() -> None:
    found = cached().find([0, 1], [899, 0], [901, 500])
    assert where(found) == [((0, 0), 0, 1000, 0, 10), ((0, 1), 1000, 1000, 10, 20), ((1, 0), 2700, 500, 60, 40)]
    assert where(cached().find([0], [2499], [2500])) == [((0, 2), 2000, 700, 30, 30)]
    assert cached().find([0], [5], [5]) == []


@pytest.mark.parametrize(("item", "start", "end"), [(2, 0, 1), (0, 0, 2501), (0, 3, 2), (1, 500, 501)])
def test_a_range_outside_of_the_item_is_refused(item: int, start: int, end: int) -> None:
    with pytest.raises(errors.InvalidRequest):
        cached().find([item], [start], [end])


def test_neighbours_are_read_in_one_request_and_distant_blocks_are_not() -> None:
    def block(offset: int, length: int) -> StoredBlock:
        return StoredBlock((0, offset), 0, 1, offset, length, b"")

    near, next_to, far = block(0, 10), block(10, 10), block(10_000_000, 10)
    assert runs([near, next_to, far]) == [[near, next_to], [far]]


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 20_000)), max_size=20))
def test_pages_are_counted_once(pieces: list[tuple[int, int]]) -> None:
    spans = [(start, start + nbytes) for start, nbytes in pieces]
    touched = {page for start, end in spans for page in range(start // PAGE, (end - 1) // PAGE + 1)}
    assert pages_nbytes(spans) == len(touched) * PAGE
