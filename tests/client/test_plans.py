"""A load asks for every byte it needs, once, in pieces that fit."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from ckptd.model import BLOCK_NBYTES
from ckptd.v1.manifest_pb2 import Item
from ckptd_client import plans
from ckptd_client.plans import Box

MIB = 1024 * 1024
#: A block's first and last page.
PAGES = 2 * 4096


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box, int]:
    """A dense tensor in some order of its dimensions and a box in it; elements so large that rows exceed a block."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    strides = [0] * len(shape)
    stride = 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = stride
        stride *= shape[dim]
    lengths = tuple(draw(st.integers(1, size)) for size in shape)
    offsets = tuple(draw(st.integers(0, size - length)) for size, length in zip(shape, lengths, strict=True))
    return shape, tuple(strides), (offsets, lengths), draw(st.sampled_from([1, 8, MIB, 3 * MIB, 5 * MIB]))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(offset, offset + length) for offset, length in zip(*box, strict=True))))


def item_of(shape: tuple[int, ...], itemsize: int) -> Item:
    return Item(at=1000, raw_at=1600, nbytes=math.prod(shape) * itemsize)


@given(boxes())
def test_ranges_hold_every_element_and_nothing_outside_the_item(drawn: tuple[tuple[int, ...], tuple[int, ...], Box, int]) -> None:
    shape, strides, box, itemsize = drawn
    ranges = plans.spans(box, strides, itemsize)
    assert all(start < end for start, end in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[0][0] >= 0
    assert ranges[-1][1] <= math.prod(shape) * itemsize
    for element in elements(box):
        at = sum(map(int.__mul__, element, strides)) * itemsize
        assert any(start <= at and at + itemsize <= end for start, end in ranges)


@given(boxes())
def test_rows_of_a_block_or_more_are_not_fetched_for_their_neighbours(drawn: tuple[tuple[int, ...], tuple[int, ...], Box, int]) -> None:
    _, strides, box, itemsize = drawn
    if itemsize < BLOCK_NBYTES:
        return
    assert sum(end - start for start, end in plans.spans(box, strides, itemsize)) == len(elements(box)) * itemsize


@given(boxes(), st.integers(3, 16))
def test_a_cut_box_covers_each_element_once_and_each_part_fits(
    drawn: tuple[tuple[int, ...], tuple[int, ...], Box, int], blocks: int
) -> None:
    shape, strides, box, itemsize = drawn
    item, limit = item_of(shape, itemsize), blocks * BLOCK_NBYTES
    parts = list(plans.cut(item, box, strides, itemsize, limit))
    found = [element for part, _ in parts for element in elements(part)]
    assert len(found) == len(set(found))
    assert set(found) == elements(box)
    for part, ranges in parts:
        assert ranges == plans.spans(part, strides, itemsize)
        assert plans.fetched_nbytes(item, ranges) <= limit or len(elements(part)) == 1


def test_an_empty_box_needs_nothing() -> None:
    assert plans.spans(((0, 0), (0, 4)), (4, 1), 4) == []
    assert list(plans.cut(item_of((0, 4), 4), ((0, 0), (0, 4)), (4, 1), 4, BLOCK_NBYTES)) == [(((0, 0), (0, 4)), [])]


def test_what_is_fetched_counts_whole_blocks_once() -> None:
    item = Item(at=0, raw_at=64, nbytes=100 * MIB)
    assert plans.fetched_nbytes(item, [(0, 1)]) == BLOCK_NBYTES + PAGES
    assert plans.fetched_nbytes(item, [(0, 1), (5, 6), (BLOCK_NBYTES, BLOCK_NBYTES + 1)]) == 2 * BLOCK_NBYTES + PAGES
    assert plans.fetched_nbytes(Item(at=0, raw_at=64, nbytes=100), [(0, 100)]) == 164 + PAGES


def test_batches_are_of_one_shard_and_at_most_the_limit() -> None:
    item = Item(at=0, raw_at=0, nbytes=6 * MIB)
    reads = [
        plans.Read(request=None, place=plans.Place(shard, number, item), box=None, ranges=[(0, item.nbytes)], last=True)  # type: ignore[arg-type]
        for shard in range(3)
        for number in range(5)
    ]
    found = list(plans.batches(reads, 16 * MIB))
    assert [read for batch in found for read in batch.reads] == reads
    assert all({read.place.shard for read in batch.reads} == {batch.shard} for batch in found)
    assert [len(batch.reads) for batch in found] == [2, 2, 1] * 3
    assert list(found[0].want().items) == [0, 1]


def test_a_batch_is_never_smaller_than_what_one_span_may_touch() -> None:
    assert plans.batch_limit(512 * MIB) == 64 * MIB
    assert plans.batch_limit(256 * MIB) == 32 * MIB
    assert plans.batch_limit(1) == 2 * BLOCK_NBYTES + PAGES


def test_an_opaque_item_is_asked_for_once_however_many_reads_it_has() -> None:
    places = [plans.Place(0, number, Item(at=number * MIB, raw_at=number * MIB, nbytes=MIB)) for number in range(2)]
    reads = [plans.Read(None, place, None, [(0, MIB)], last=True) for place in places for _ in range(100)]  # type: ignore[arg-type]
    (batch,) = plans.batches(reads, 2 * (MIB + PAGES))
    want = batch.want()
    assert (list(want.items), list(want.starts), list(want.ends)) == ([0, 1], [0, 0], [MIB, MIB])
    assert len(batch.reads) == 200
