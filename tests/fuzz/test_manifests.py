"""Manifests, item tables and tombstones with right checksums and hostile content: Corrupt, or harmless for all who read them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import codec, contents, inspection, manifest, table, tombstone
from ckptd.blocks import BlockShard
from ckptd.cli import documents
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.metadata import save_id
from ckptd.model import CheckpointId
from ckptd.store import check_key
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Form, Item, Manifest, StoredShard, Table, Tombstone
from fuzz import sandbox
from fuzz.conftest import Written
from fuzz.test_written import flips

#: Numbers at which something overflows, and some that it might be compared with.
EDGES = [0, 1, 2, 63, 64, 65, 1 << 22, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
TEXTS = ["", ".", "..", "../x", "a/b", "/", "\0", "x\0y", ".metadata", ".ckptd", "none", "zstd:99", "zstd:22", "float32", "é" * 200]
BYTES = [b"", b"\xff", b"\xed\xa0\x80", b"w", b"../../x", b"\0" * 16, b"x" * 300]


def framed(body: bytes, summary: bytes) -> bytes:
    """A manifest file of any content, with the checksums that it needs."""
    head = b"ckptd/1\n" + struct.pack("<I", len(summary)) + summary
    head += xxhash.xxh3_64_digest(head)
    return head + body + xxhash.xxh3_128_digest(head + body)


def reframed(found: Manifest) -> bytes:
    return framed(found.SerializeToString(), found.summary.SerializeToString())


def read_all(data: bytes) -> bool:
    """Does with a manifest what all its readers do; whether it was refused. Raises what they raise beyond Corrupt."""
    try:
        found = manifest.decode(data)
    except Corrupt:
        return True
    summary = manifest.read_summary(data)
    assert summary == found.summary
    documents.checkpoint(Checkpoint(summary=summary))
    used = codec.parse(found.summary.codec) if found.shards else None
    for shard in found.shards:
        assert not shard.file or "/" not in check_key(shard.file)
        if used is None or not shard.file:
            continue
        blocks = BlockShard(shard, shard.file, used, found.block_nbytes).find(
            range(len(shard.table.items)), [0] * len(shard.table.items), [item.nbytes for item in shard.table.items]
        )
        for block in blocks:
            assert 0 <= block.at <= block.at + block.nbytes <= shard.table.end < 1 << 63
            assert 0 <= block.offset <= block.offset + block.length <= shard.nbytes < 1 << 63
            assert block.nbytes <= 64 << 20
    try:
        lines = contents.lines(shard.table for shard in found.shards)
    except Corrupt:
        return True
    documents.text(documents.shown(documents.Shown(Checkpoint(summary=summary), lines, [])))
    return False


def places(message: Message) -> list[tuple[Message, FieldDescriptor]]:
    """Every field of a message and of those in it, set or not."""
    found: list[tuple[Message, FieldDescriptor]] = []
    for field in message.DESCRIPTOR.fields:
        found.append((message, field))
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            value = getattr(message, field.name)
            for inner in value if field.is_repeated else [value]:
                found += places(inner)
    return found


def spoil(message: Message, data: st.DataObject) -> None:
    """Changes one field somewhere in the message: to an edge, or one thing more or less of a row."""
    inside, field = data.draw(st.sampled_from(places(message)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inside.tags["\x1b[31m" * data.draw(st.integers(0, 3))] = "\0"
        return
    if field.is_repeated:
        row = getattr(inside, field.name)
        if len(row) and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(row) - 1))
            if data.draw(st.booleans()):
                del row[at]
            elif field.message_type is not None:
                row.add().CopyFrom(row[at])
            else:
                row.append(row[at])
            return
    kinds = {
        FieldDescriptor.CPPTYPE_STRING: st.sampled_from(BYTES if field.type == FieldDescriptor.TYPE_BYTES else TEXTS),
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 99, -1]),
        FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([edge for edge in EDGES if edge < 1 << 32]),
        FieldDescriptor.CPPTYPE_UINT64: st.sampled_from(EDGES),
        FieldDescriptor.CPPTYPE_INT64: st.sampled_from([sign * edge for sign in (1, -1) for edge in EDGES if edge < 1 << 63]),
    }
    if field.message_type is not None:
        (getattr(inside, field.name).add() if field.is_repeated else inside).Clear()
    elif field.is_repeated:
        getattr(inside, field.name).append(data.draw(kinds[field.cpp_type]))
    else:
        setattr(inside, field.name, data.draw(kinds[field.cpp_type]))


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_manifest_with_hostile_fields_is_refused_or_harmless(written: Written, data: st.DataObject) -> None:
    found = written.decoded
    for _ in range(data.draw(st.integers(1, 3))):
        spoil(found, data)
    read_all(reframed(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=8_000)
@given(data=st.data())
def test_manifests_with_hostile_fields_are_refused_or_harmless(written: Written, data: st.DataObject) -> None:
    found = written.decoded
    for _ in range(data.draw(st.integers(1, 5))):
        spoil(found, data)
    read_all(reframed(found))


def test_a_manifest_with_any_bit_of_its_content_flipped_is_refused_or_harmless(written: Written) -> None:
    found = written.decoded
    summary = found.summary.SerializeToString()
    assert not read_all(reframed(found))
    for body in flips(found.SerializeToString(), step=7):
        read_all(framed(body, summary))
    for head in flips(summary):
        read_all(framed(found.SerializeToString(), head))


def shard_of(found: Manifest) -> StoredShard:
    return next(shard for shard in found.shards if shard.file)


def item_of(found: Manifest, kind: int) -> Item:
    return next(item for item in shard_of(found).table.items if item.kind == kind)


def _two_shards_in_one_file(found: Manifest) -> None:
    found.shards.add().CopyFrom(shard_of(found))


def _two_items_in_one_place(found: Manifest) -> None:
    shard = shard_of(found)
    shard.stored[1].offset = shard.stored[0].offset


def _a_file(name: str) -> Callable[[Manifest], None]:
    return lambda found: setattr(shard_of(found), "file", name)


def _an_end(end: int) -> Callable[[Manifest], None]:
    return lambda found: setattr(shard_of(found).table, "end", end)


def _blocks(nbytes: int) -> Callable[[Manifest], None]:
    return lambda found: setattr(found, "block_nbytes", nbytes)


def _a_codec(name: str) -> Callable[[Manifest], None]:
    return lambda found: setattr(found.summary, "codec", name)


def _a_time(us: int) -> Callable[[Manifest], None]:
    return lambda found: setattr(found.summary, "accepted_us", us)


def _of_item(kind: int, field: str, value: int) -> Callable[[Manifest], None]:
    return lambda found: setattr(item_of(found, kind), field, value)


def _offset(value: int) -> Callable[[Manifest], None]:
    def change(found: Manifest) -> None:
        item_of(found, Item.RAW).offset[:] = [value] * len(item_of(found, Item.RAW).offset)

    return change


def _form(**fields: object) -> Callable[[Manifest], None]:
    def change(found: Manifest) -> None:
        form = shard_of(found).table.forms[item_of(found, Item.RAW).form]
        form.MergeFrom(Form(**{name: value for name, value in fields.items() if name not in ("shape", "strides")}))
        for name in {"shape", "strides"} & fields.keys():
            getattr(form, name)[:] = fields[name]

    return change


def _without_pickle(found: Manifest) -> None:
    shard_of(found).table.forms[item_of(found, Item.RAW).form].pkl = b""


def _length_of_a_block(nbytes: int) -> Callable[[Manifest], None]:
    def change(found: Manifest) -> None:
        shard = shard_of(found)
        shard.nbytes += nbytes - shard.stored[-1].lengths[-1]
        shard.stored[-1].lengths[-1] = nbytes

    return change


HOSTILE: dict[str, Callable[[Manifest], None]] = {
    "two shards in one file": _two_shards_in_one_file,
    "two items in one place": _two_items_in_one_place,
    **{f"the file {name!r}": _a_file(name) for name in ("..", ".", "../x", "a/b", "/etc/passwd", "x\0y", ".metadata", ".ckptd", "")},
    **{f"a shard that ends at {end}": _an_end(end) for end in (0, 1 << 63, (1 << 64) - 1)},
    **{f"blocks of {nbytes} bytes": _blocks(nbytes) for nbytes in (0, 1, 1 << 27, 1 << 63, (1 << 64) - 1)},
    **{f"the codec {name!r}": _a_codec(name) for name in ("", "zstd:0", "lz4", "none ")},
    **{f"the time {us}": _a_time(us) for us in (-1, 1 << 62, -(1 << 63))},
    **{f"a raw item at {at}": _of_item(Item.RAW, "raw_at", at) for at in (1 << 40, (1 << 64) - 1)},
    **{f"a raw item of {nbytes} bytes": _of_item(Item.RAW, "nbytes", nbytes) for nbytes in (0, 1 << 63, (1 << 64) - 1)},
    **{f"an object at {at}": _of_item(Item.OPAQUE_OBJECT, "raw_at", at) for at in (0, (1 << 64) - 1)},
    "an object of one byte": _of_item(Item.OPAQUE_OBJECT, "nbytes", 1),
    **{f"a raw item of form {form}": _of_item(Item.RAW, "form", form) for form in (99, (1 << 32) - 1)},
    **{f"a sparse item of form {form}": _of_item(Item.OPAQUE_TENSOR, "form", form) for form in (0, 99)},
    "an item of no known kind": _of_item(Item.RAW, "kind", 77),
    "a block of 2^40 bytes": _length_of_a_block(1 << 40),
    "a negative offset": _offset(-1),
    "an offset that a shape leads past 64 bits": _offset((1 << 63) - 1),
    "a shape below zero": _form(shape=[-3, -4]),
    "a shape past 64 bits": _form(shape=[1 << 40, 1 << 40], strides=[1 << 40, 1]),
    "a shape of 10,000 dimensions": _form(shape=[1] * 10_000, strides=[1] * 10_000),
    "strides with holes": _form(strides=[8, 1]),
    "strides below zero": _form(strides=[-4, -1]),
    "strides of another shape": _form(strides=[1]),
    "another shape": _form(shape=[5, 4], strides=[4, 1]),
    "a raw form without a pickle": _without_pickle,
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_corrupt_for_show_and_named(written: Written, tmp_path: Path, change: Callable[[Manifest], None]) -> None:
    found = written.decoded
    change(found)
    name = metadata_save_id(written)
    (tmp_path / "step-1" / ".ckptd").mkdir(parents=True)
    (tmp_path / "step-1" / ".metadata").write_bytes(written.metadata)
    (tmp_path / "step-1" / ".ckptd" / name).write_bytes(reframed(found))
    store = LocalStore(tmp_path)
    ledger = Ledger(store)
    with pytest.raises(Corrupt, match=f"step-1/.ckptd/{name} is damaged"):
        inspection.stored(store, ledger, ledger.find(CheckpointId.parse("step-1")))


def metadata_save_id(written: Written) -> str:

    name = save_id(written.metadata)
    assert name is not None
    return name


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_hostile_table_is_refused_or_could_be_committed(written: Written, data: st.DataObject) -> None:
    found = Table()
    found.CopyFrom(shard_of(written.decoded).table)
    for _ in range(data.draw(st.integers(0, 3))):
        spoil(found, data)
    try:
        read = table.parse_table(found.SerializeToString(), found.end)
    except InvalidRequest:
        return
    manifest.check_table(read)


@settings(deadline=None)
@given(data=st.binary(max_size=200), nbytes=st.sampled_from(EDGES))
def test_any_bytes_are_no_table_or_a_good_one(data: bytes, nbytes: int) -> None:
    try:
        manifest.check_table(table.parse_table(data, nbytes))
    except InvalidRequest:
        return


def test_a_manifest_of_ten_million_claims_takes_no_more_than_its_length(written: Written, tmp_path: Path) -> None:
    found = written.decoded
    long_shape, many_blocks, many_tags = Manifest(), Manifest(), Manifest()
    for one in (long_shape, many_blocks, many_tags):
        one.CopyFrom(found)
    shard_of(long_shape).table.forms[0].shape[:] = [(1 << 63) - 1] * 300_000
    shard_of(many_blocks).stored[0].lengths[:] = [1] * 300_000
    many_tags.summary.tags.update({f"{n}": "x" for n in range(50_000)})
    cases = {
        "a long shape": reframed(long_shape),
        "many blocks": reframed(many_blocks),
        "many tags": reframed(many_tags),
        "nested groups": framed(b"\x0b" * 100_000, b""),
        "nested messages": framed(_nested(2000), b""),
    }
    outcomes = sandbox.run("manifest", cases, tmp_path)
    assert outcomes == {**dict.fromkeys(cases, "Corrupt"), "many tags": sandbox.RETURNED}


def _nested(depth: int) -> bytes:
    inner = b""
    for _ in range(depth):
        inner = b"\x12" + _varint(len(inner)) + inner
    return inner


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def test_a_tombstone_with_any_bit_flipped_or_cut_is_corrupt() -> None:
    data = tombstone.encode(Tombstone(id="step-1", save_id="x", deleted_us=5, files=["__0_a.distcp", ".ckptd/x.manifest"]))
    for damaged in [*flips(data), *(data[:length] for length in range(len(data))), data + b"\0"]:
        with pytest.raises(Corrupt):
            tombstone.decode(damaged)


@settings(deadline=None)
@given(files=st.lists(st.sampled_from([*TEXTS, ".ckptd/x", "a/.ckptd/x", "__0_a.distcp"]) | st.text(max_size=8), max_size=4))
def test_a_tombstone_with_a_good_checksum_names_only_files_of_its_checkpoint(files: list[str]) -> None:
    whole = b"ckptd/x\n" + Tombstone(id="a", files=[file.encode("utf-8", "replace").decode() for file in files]).SerializeToString()
    try:
        found = tombstone.decode(whole + xxhash.xxh3_128_digest(whole))
    except Corrupt:
        return
    for file in found.files:
        assert ".." not in check_key(f"a/{file}").split("/")
        assert not file.endswith(".metadata")


@settings(deadline=None, max_examples=150)
@given(body=st.binary(max_size=100))
def test_any_content_behind_a_good_checksum_is_no_tombstone_or_a_harmless_one(body: bytes) -> None:
    whole = b"ckptd/x\n" + body
    try:
        found = tombstone.decode(whole + xxhash.xxh3_128_digest(whole))
    except Corrupt:
        return
    assert all(tombstone.may_list(file) for file in found.files)
