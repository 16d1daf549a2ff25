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


def test_an_opaque_tensor_has_a_form_without_a_pickle() -> None:
    one = small()
    one.shards[0].table.forms.add(dtype="qint8", shape=[3, 0, 4])
    one.shards[0].table.items[1].MergeFrom(Item(kind=Item.OPAQUE_TENSOR, form=1))
    assert manifest.decode(manifest.encode(one)) == one


def test_dense_strides_of_every_order_and_empty_tensors_are_taken() -> None:
    one = small()
    form, item = one.shards[0].table.forms[0], one.shards[0].table.items[0]
    for shape, strides, nbytes in [([2, 2], [1, 2], 16), ([4, 1, 2], [2, 77, 1], 32), ([], [], 8), ([0, 7], [9, 9], 0), ([1], [5], 1)]:
        form.shape[:], form.strides[:] = shape, strides
        item.nbytes = nbytes
        assert manifest.decode(manifest.encode(one)) == one


def test_a_summary_with_a_time_that_no_clock_shows_is_corrupt_for_list_as_well() -> None:
    spoilt = small()
    spoilt.summary.accepted_us = 1 << 62
    summary = spoilt.summary.SerializeToString()
    head = b"ckptd/1\n" + len(summary).to_bytes(4, "little") + summary
    with pytest.raises(Corrupt, match="microseconds after 1970"):
        manifest.read_summary(head + xxhash.xxh3_64_digest(head))


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


def _opaque_beside_its_container(m: Manifest) -> None:
    m.shards[0].table.items[1].raw_at = 101


def _a_gap_in_the_file(m: Manifest) -> None:
    m.shards[0].stored[1].offset = 49


def _bytes_behind_the_last(m: Manifest) -> None:
    m.shards[0].nbytes = 71


def _a_file_elsewhere(m: Manifest) -> None:
    m.shards[0].file = "../__0_abc.distcp"


def _a_file_that_is_ours(m: Manifest) -> None:
    m.shards[0].file = ".metadata"


def _a_file_for_nothing(m: Manifest) -> None:
    m.shards[1].file = "__1_abc.distcp"


def _one_file_twice(m: Manifest) -> None:
    m.shards.add().CopyFrom(m.shards[0])


def _large_blocks(m: Manifest) -> None:
    m.block_nbytes = (64 << 20) + 1


def _a_block_that_is_larger_than_it_can_be(m: Manifest) -> None:
    m.shards[0].stored[1].lengths[0] = 2000
    m.shards[0].nbytes = 2050


def _an_unknown_codec(m: Manifest) -> None:
    m.summary.codec = "lz4"


def _a_time_before_all_clocks(m: Manifest) -> None:
    m.summary.accepted_us = -1


def _a_time_after_all_calendars(m: Manifest) -> None:
    m.summary.accepted_us = 1 << 62


def _more_head_than_metadata(m: Manifest) -> None:
    m.metadata_head = 201


def _an_unknown_kind(m: Manifest) -> None:
    m.shards[0].table.items[0].kind = 9  # type: ignore[assignment]


def _an_end_past_64_bits(m: Manifest) -> None:
    m.shards[1].table.end = 1 << 63


def _a_form_without_dtype(m: Manifest) -> None:
    m.shards[0].table.forms[0].dtype = ""


def _a_shape_below_zero(m: Manifest) -> None:
    m.shards[0].table.forms[0].shape[:] = [-2, -2]


def _a_shape_past_64_bits(m: Manifest) -> None:
    m.shards[0].table.forms[0].shape[:] = [1 << 32, 1 << 32]
    m.shards[0].table.forms[0].strides[:] = [1 << 32, 1]


def _a_shape_of_too_many_dimensions(m: Manifest) -> None:
    m.shards[0].table.forms[0].shape[:] = [1] * 257
    m.shards[0].table.forms[0].strides[:] = [1] * 257


def _strides_that_overlap(m: Manifest) -> None:
    m.shards[0].table.forms[0].strides[:] = [1, 1]


def _strides_with_holes(m: Manifest) -> None:
    m.shards[0].table.forms[0].strides[:] = [4, 2]


def _strides_for_one_dimension(m: Manifest) -> None:
    m.shards[0].table.forms[0].strides[:] = [1]


def _strides_below_zero(m: Manifest) -> None:
    m.shards[0].table.forms[0].shape[:] = [0, 2]
    m.shards[0].table.forms[0].strides[:] = [-2, 1]
    m.shards[0].table.items[0].nbytes = 0


def _bytes_that_are_no_elements(m: Manifest) -> None:
    m.shards[0].table.items[0].nbytes = 15


def _elements_without_bytes(m: Manifest) -> None:
    m.shards[0].table.items[0].nbytes = 0


def _bytes_without_elements(m: Manifest) -> None:
    m.shards[0].table.forms[0].shape[:] = [0, 2]


def _raw_without_a_pickle(m: Manifest) -> None:
    m.shards[0].table.forms[0].pkl = b""


def _opaque_with_a_pickle(m: Manifest) -> None:
    m.shards[0].table.items[1].kind = Item.OPAQUE_TENSOR


def _opaque_with_strides(m: Manifest) -> None:
    m.shards[0].table.forms.add(dtype="int8", shape=[2], strides=[1])


def _opaque_of_no_form(m: Manifest) -> None:
    m.shards[0].table.items[1].kind = Item.OPAQUE_TENSOR
    m.shards[0].table.items[1].form = 1


@pytest.mark.parametrize(
    "spoil",
    [
        _opaque_beside_its_container,
        _a_gap_in_the_file,
        _bytes_behind_the_last,
        _a_file_elsewhere,
        _a_file_that_is_ours,
        _a_file_for_nothing,
        _one_file_twice,
        _large_blocks,
        _a_block_that_is_larger_than_it_can_be,
        _an_unknown_codec,
        _a_time_before_all_clocks,
        _a_time_after_all_calendars,
        _more_head_than_metadata,
        _an_unknown_kind,
        _an_end_past_64_bits,
        _a_form_without_dtype,
        _a_shape_below_zero,
        _a_shape_past_64_bits,
        _a_shape_of_too_many_dimensions,
        _strides_that_overlap,
        _strides_with_holes,
        _strides_for_one_dimension,
        _strides_below_zero,
        _bytes_that_are_no_elements,
        _elements_without_bytes,
        _bytes_without_elements,
        _raw_without_a_pickle,
        _opaque_with_a_pickle,
        _opaque_with_strides,
        _opaque_of_no_form,
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
    summary = spoilt.summary.SerializeToString()
    head = b"ckptd/1\n" + len(summary).to_bytes(4, "little") + summary
    whole = head + xxhash.xxh3_64_digest(head) + spoilt.SerializeToString()
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


def _past_64_bits(t: Table) -> None:
    t.items.add(fqn=b"x", at=t.end, raw_at=t.end, nbytes=(1 << 63) - t.end, kind=Item.OPAQUE_OBJECT)
    t.end = 1 << 63


def _raw_data_past_its_container(t: Table) -> None:
    t.items[0].raw_at = 85


def _raw_data_before_its_container(t: Table) -> None:
    t.items.insert(1, Item(fqn=b"x", at=100, raw_at=99, nbytes=0, kind=Item.RAW))


def _opaque_data_that_is_not_all(t: Table) -> None:
    t.items[1].nbytes = 19


def _no_known_kind(t: Table) -> None:
    t.items[1].kind = 9  # type: ignore[assignment]


def _no_container(t: Table) -> None:
    t.forms.add(pkl=b"pkl", dtype="int8", shape=[0], strides=[1])
    t.items.add(fqn=b"x", at=120, raw_at=120, kind=Item.RAW, form=1)


def _more_elements_than_64_bits_count(t: Table) -> None:
    t.forms.add(dtype="int8", shape=[1 << 32, 1 << 32])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_past_64_bits, "where no file can end"),
        (_raw_data_past_its_container, "does not fit"),
        (_raw_data_before_its_container, "does not fit"),
        (_opaque_data_that_is_not_all, "not all of its container"),
        (_no_known_kind, "of a kind that is not known: 9"),
        (_no_container, "without a container"),
        (_more_elements_than_64_bits_count, "which no tensor can have"),
    ],
)
def test_a_table_says_what_is_wrong_with_it(spoil: Callable[[Table], None], told: str) -> None:
    table = small().shards[0].table
    manifest.check_table(table)
    spoil(table)
    with pytest.raises(Corrupt, match=told):
        manifest.check_table(table)
