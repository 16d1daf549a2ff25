"""Manifest files: framing that shows every damage, and content that readers may trust."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import manifest
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.v1.manifest_pb2 import Form, Item, Manifest, Stored, StoredShard, Summary, Table

if TYPE_CHECKING:
    from collections.abc import Callable


def small() -> Manifest:
    return Manifest(
        summary=Summary(id="run-a/step-7", attempt="0" * 24, step=7, world_size=2, codec="zstd:1", tags={"b": "2", "a": "1", "ü": "é"}),
        shards=[
            StoredShard(
                rank=0,
                file="__0_abc.distcp",
                nbytes=70,
                table=Table(
                    forms=[Form(pkl=b"pkl", dtype="float32", shape=[2, 2], strides=[2, 1])],
                    items=[
                        Item(fqn=b"model.w", offset=[0, 0], has_offset=True, index=0, kind=Item.RAW, at=0, raw_at=64, nbytes=16, form=0),
                        Item(fqn=b"step", kind=Item.OPAQUE_OBJECT, at=100, raw_at=100, nbytes=20),
                    ],
                    end=120,
                ),
                stored=[
                    Stored(offset=0, lengths=[30, 20], hashes=b"h" * 32),
                    Stored(offset=50, lengths=[20], hashes=b"g" * 16),
                ],
            ),
            StoredShard(rank=1, table=Table()),
        ],
        metadata_head=100,
        metadata_nbytes=200,
        metadata_hash=b"m" * 16,
        block_nbytes=64,
    )


def test_what_is_encoded_is_decoded() -> None:
    assert manifest.decode(manifest.encode(small())) == small()
    assert manifest.decode(manifest.encode(Manifest())) == Manifest()


def test_an_item_of_no_bytes_has_no_blocks() -> None:
    one = small()
    one.shards[0].table.items.add(fqn=b"x", at=120, raw_at=120, kind=Item.OPAQUE_OBJECT)
    one.shards[0].stored.add(offset=70)
    assert manifest.decode(manifest.encode(one)) == one


def test_items_of_no_bytes_may_be_anywhere_and_alone() -> None:
    empty = {"fqn": b"x", "kind": Item.OPAQUE_OBJECT}
    one = small()
    table, stored = one.shards[0].table, one.shards[0].stored
    between = Item(at=100, raw_at=100, **empty)
    one.shards[0].table.CopyFrom(Table(forms=table.forms, items=[table.items[0], between, between, table.items[1]], end=120))
    blocks = [stored[0], Stored(offset=50), Stored(offset=50), stored[1]]
    alone = StoredShard(rank=2, file="__2_abc.distcp", table=Table(items=[Item(**empty)]), stored=[Stored()])
    shard = StoredShard(rank=0, file=one.shards[0].file, nbytes=70, table=one.shards[0].table, stored=blocks)
    whole = Manifest(summary=one.summary, shards=[shard, alone], block_nbytes=64)
    assert manifest.decode(manifest.encode(whole)) == whole


def test_equal_manifests_give_equal_bytes() -> None:
    other = small()
    other.summary.tags.clear()
    for tag in ("ü", "a", "b"):
        other.summary.tags[tag] = small().summary.tags[tag]
    assert manifest.encode(other) == manifest.encode(small())


def test_every_flip_is_corrupt() -> None:
    data = manifest.encode(small())
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with pytest.raises(Corrupt):
                manifest.decode(bytes(damaged))


def test_every_truncation_and_addition_is_corrupt() -> None:
    data = manifest.encode(small())
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            manifest.decode(data[:length])
    with pytest.raises(Corrupt):
        manifest.decode(data + b"\0")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        manifest.decode(data)


def test_a_head_gives_the_summary_or_says_how_much_it_takes() -> None:
    data = manifest.encode(small())
    need: Summary | int = 0
    steps = 0
    while isinstance(need, int):
        more = manifest.read_summary(data[:need])
        assert not isinstance(more, int) or more > need
        need, steps = more, steps + 1
    assert need == small().summary
    assert steps == 3
    assert manifest.read_summary(data) == small().summary


def test_a_summary_longer_than_the_usual_head_is_read_in_two_steps() -> None:
    long = small()
    long.summary.tags["long"] = "x" * 200_000
    data = manifest.encode(long)
    need = manifest.read_summary(data[: manifest.HEAD_NBYTES])
    assert isinstance(need, int)
    assert manifest.read_summary(data[:need]) == long.summary


def test_a_damaged_head_is_corrupt_or_asks_for_bounded_more() -> None:
    data = manifest.encode(small())
    head = data[: len(data) // 2]
    for at in range(len(small().summary.SerializeToString()) + 20):
        damaged = bytearray(head)
        damaged[at] ^= 0xFF
        try:
            more = manifest.read_summary(bytes(damaged))
        except Corrupt:
            continue
        assert isinstance(more, int)
        assert len(head) < more < 17 << 20


def test_tags_beyond_reason_are_refused() -> None:
    big = small()
    big.summary.tags["big"] = "x" * (17 << 20)
    with pytest.raises(InvalidRequest, match="tags"):
        manifest.encode(big)


def test_a_body_that_contradicts_its_summary_is_corrupt() -> None:
    one, other = small(), small()
    other.summary.step = 8
    head = manifest.encode(one)
    end = manifest._summary_end(head)
    whole = head[:end] + other.SerializeToString()
    with pytest.raises(Corrupt, match="contradicts"):
        manifest.decode(whole + xxhash.xxh3_128_digest(whole))


def _drop_stored(m: Manifest) -> None:
    del m.shards[0].stored[1]


def _drop_length(m: Manifest) -> None:
    del m.shards[0].stored[0].lengths[1]


def _short_hashes(m: Manifest) -> None:
    m.shards[0].stored[0].hashes = b"h" * 31


def _no_file(m: Manifest) -> None:
    m.shards[0].file = ""


def _past_the_file(m: Manifest) -> None:
    m.shards[0].stored[1].offset = 51


def _no_blocks(m: Manifest) -> None:
    m.block_nbytes = 0


def _overlap(m: Manifest) -> None:
    m.shards[0].table.items[1].at = 70


def _raw_past_the_end(m: Manifest) -> None:
    m.shards[0].table.items[1].nbytes = 21


def _raw_before_the_container(m: Manifest) -> None:
    m.shards[0].table.items[1].raw_at = 99


def _no_such_form(m: Manifest) -> None:
    m.shards[0].table.items[0].form = 1


def _raw_without_a_container(m: Manifest) -> None:
    m.shards[0].table.items.add(fqn=b"x", at=120, raw_at=120, kind=Item.RAW)
    m.shards[0].stored.add(offset=70)


def _gap_before_the_first(m: Manifest) -> None:
    m.shards[0].table.items[0].at = 1


def _bytes_without_items(m: Manifest) -> None:
    m.shards[1].table.end = 1


@pytest.mark.parametrize(
    "spoil",
    [
        _drop_stored,
        _drop_length,
        _short_hashes,
        _no_file,
        _past_the_file,
        _no_blocks,
        _overlap,
        _raw_past_the_end,
        _raw_before_the_container,
        _no_such_form,
        _raw_without_a_container,
        _gap_before_the_first,
        _bytes_without_items,
    ],
)
def test_a_manifest_that_contradicts_itself_is_neither_written_nor_read(spoil: Callable[[Manifest], None]) -> None:
    spoilt = small()
    spoil(spoilt)
    with pytest.raises(InvalidRequest):
        manifest.encode(spoilt)
    head = manifest.encode(Manifest(summary=spoilt.summary))
    whole = head[: manifest._summary_end(head)] + spoilt.SerializeToString()
    with pytest.raises(Corrupt):
        manifest.decode(whole + xxhash.xxh3_128_digest(whole))


@settings(deadline=None)
@given(at=st.integers(0, 1 << 40), nbytes=st.integers(0, 10_000), block=st.integers(1, 4000))
def test_blocks_cover_a_container_without_gap_or_overlap(at: int, nbytes: int, block: int) -> None:
    spans = manifest.block_spans(at, at + nbytes, block)
    assert [stop - start for start, stop in spans[:-1]] == [block] * max(len(spans) - 1, 0)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == nbytes
    assert all(0 < stop - start <= block for start, stop in spans)
