"""Stock checkpoints from the daemon's side: what is believed of them, what is refused, and what that may cost."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptd import container, errors, items, stock
from ckptd.localstore import LocalStore
from ckptd.metadata import Contents, StoredAt, Tensor
from ckptd.model import CheckpointId
from ckptd.stock import Seen, Stock
from ckptd.v1.manifest_pb2 import Item

MIB = 1024 * 1024
ID = CheckpointId.parse("run/step-1")
ZSTD = ("stream.zstd/1",)
MEMORY = 64 * MIB


def saved(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def compressed(data: bytes) -> bytes:
    """As stock's ZStandard extension writes: in pieces, so that no frame says how long it is, and none has a checksum."""
    made = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(made, closefd=False) as writer:
        for at in range(0, len(data), 100_000):
            writer.write(data[at : at + 100_000])
    assert zstandard.get_frame_parameters(made.getvalue()).content_size in (zstandard.CONTENTSIZE_UNKNOWN, 0)
    return made.getvalue()


def check(data: bytes) -> int:
    return container.check(lambda start, end: data[start:end], len(data))


# -- the container ---------------------------------------------------------------------------------------------


def test_what_torch_saves_is_found_whole() -> None:
    many = [torch.full((2,), number) for number in range(20_000)]  # whose directory takes several pieces to be read
    for value in (many, torch.randn(1000), torch.empty(0, 3), 5, {"a": [torch.ones(3)] * 2, "b": torch.zeros(2, dtype=torch.bfloat16)}):
        assert check(saved(value)) == 0


def test_records_without_a_checksum_are_counted_not_believed_damaged() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.randn(100))
    finally:
        torch.serialization.set_crc32_options(True)
    assert check(data) == len(zipfile.ZipFile(io.BytesIO(data)).infolist())


def test_no_flipped_bit_of_a_container_is_loaded_as_another_tensor() -> None:
    """Torch itself would load most of them, and a flipped attribute in the directory as whatever lies in memory."""
    value = torch.arange(40.0)
    data = saved(value)
    silent = 0
    for at, bit in itertools.product(range(len(data)), range(8)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        try:
            check(bytes(flipped))
        except errors.Corrupt:
            continue
        try:
            loaded = torch.load(io.BytesIO(flipped), weights_only=True)
        except Exception:  # noqa: BLE001 - an error is no wrong tensor
            continue
        silent += 1
        assert torch.equal(loaded, value), (at, bit)
    assert silent > 0  # paddings and the like


@pytest.mark.parametrize("cut", [1, 22, 100, 1000])
def test_a_container_that_is_cut_or_followed_by_something_is_damaged(cut: int) -> None:
    data = saved(torch.arange(1000))
    for wrong in (data[:-cut], data + bytes(cut), b"", data[cut:]):
        with pytest.raises(errors.Corrupt):
            check(wrong)


def test_a_container_past_32_bits_is_understood() -> None:
    """What stands in a zip64 extra field instead: the same container, its directory rewritten with full sizes."""
    data = saved(torch.arange(1000))
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        entries = opened.infolist()
        start = opened.start_dir
    directory = b""
    for entry in entries:
        extra = struct.pack("<HHQQQ", 1, 24, entry.file_size, entry.compress_size, entry.header_offset)
        name = entry.filename.encode()
        full = 0xFFFFFFFF
        directory += struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 0, 0, 0, entry.CRC, full, full, len(name), len(extra), 0, 0, 0, 0, full
        )
        directory += name + extra
    count = len(entries)
    end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), start)
    end += struct.pack("<IIQI", 0x07064B50, 0, start + len(directory), 1)
    end += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), 0xFFFFFFFF, 0)
    large = data[:start] + directory + end
    assert check(large) == 0
    flipped = bytearray(large)
    flipped[start - 1000] ^= 1
    with pytest.raises(errors.Corrupt):
        check(bytes(flipped))


def test_records_that_overlap_are_not_read_again_and_again() -> None:
    data = saved(torch.arange(1000))
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        start = opened.start_dir
    directory, end = data[start:], data[-22:]
    entry = data.index(b"archive/data/0", start) - 46
    one = data[entry : entry + 46 + len(b"archive/data/0")]
    hostile = data[:start] + one * 1000 + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1000, 1000, len(one) * 1000, start, 0)
    assert end in directory
    with pytest.raises(errors.Corrupt, match="overlap"):
        check(hostile)


def test_a_deflated_record_is_checked_too() -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000))
    data = made.getvalue()
    assert check(data) == 0
    with pytest.raises(errors.Corrupt):
        check(data.replace(struct.pack("<I", zipfile.ZipFile(made).infolist()[0].CRC), b"abcd"))


# -- what a .metadata says -------------------------------------------------------------------------------------


def contents(stored: dict[tuple[bytes, tuple[int, ...] | None], StoredAt], shape: tuple[int, ...] = (1000,)) -> Contents:
    """A tensor "t" of float32 in one chunk, an object "o"."""
    return Contents([Tensor(b"t", "float32", shape, ((tuple(0 for _ in shape), shape),))], [b"o"], stored, None)


def put(store: Path, *parts: bytes, file: str = "__0_0.distcp") -> list[tuple[int, int]]:
    """A data file of these items; their places."""
    path = store / str(ID) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(parts))
    ends = list(itertools.accumulate(map(len, parts)))
    return [(end - len(part), len(part)) for part, end in zip(parts, ends, strict=True)]


def described(store: Path, found: Contents, *, memory: int = MEMORY) -> Stock:
    directory = store / str(ID)
    files = {path.name: path.stat().st_size for path in directory.glob("*")} if directory.exists() else {}
    return stock.describe(LocalStore(store), ID, Seen("stock-x", b"", stock.parse(found), files), memory)[0]


def fetched(store: Path, found: Stock, shard: int = 0) -> dict[bytes, bytes]:
    """All items of a shard, through a segment."""
    segment = store / "segment"
    segment.write_bytes(b"")
    os.truncate(segment, max(1, found.shards[shard].table.end))
    table = found.shards[shard].table
    wanted = found.shards[shard].find(range(len(table.items)), [0] * len(table.items), [item.nbytes for item in table.items])
    got = found.shards[shard].read(LocalStore(store), segment, wanted)
    data = segment.read_bytes()
    return {table.items[number].fqn: data[table.items[number].at :][:nbytes] for number, nbytes in got.lengths.items()}


@pytest.mark.parametrize("descriptors", [(), ZSTD, ("stream.zstd/1.7",)])
def test_items_come_as_they_were_saved(tmp_path: Path, descriptors: tuple[str, ...]) -> None:
    tensor, thing = saved(torch.randn(1000)), saved({"a": 1})
    stored = [compressed(tensor), compressed(thing)] if descriptors else [tensor, thing]
    places = put(tmp_path, *stored)
    found = described(
        tmp_path,
        contents(
            {
                (b"t", (0,)): StoredAt("__0_0.distcp", *places[0], descriptors),
                (b"o", None): StoredAt("__0_0.distcp", *places[1], descriptors),
            }
        ),
    )
    assert fetched(tmp_path, found) == {b"t": tensor, b"o": thing}
    table = found.shards[0].table
    assert [(item.fqn, item.kind, item.has_offset) for item in table.items] == [
        (b"t", Item.OPAQUE_TENSOR, True),
        (b"o", Item.OPAQUE_OBJECT, False),
    ]
    assert (table.forms[0].dtype, list(table.forms[0].shape)) == ("float32", [1000])
    assert table.items[1].nbytes == len(thing)


def test_an_object_need_not_be_a_container(tmp_path: Path) -> None:
    """A planner writes what it likes; only what looks like a container has to be one."""
    places = put(tmp_path, b"just bytes", b"")
    stored: dict[tuple[bytes, tuple[int, ...] | None], StoredAt] = {(b"o", None): StoredAt("__0_0.distcp", *places[0], ())}
    assert fetched(tmp_path, described(tmp_path, contents(stored))) == {b"o": b"just bytes"}
    damaged = bytearray(saved(list(range(100))))
    damaged[200] ^= 1
    places = put(tmp_path, bytes(damaged))
    stored = {(b"o", None): StoredAt("__0_0.distcp", *places[0], ())}
    with pytest.raises(errors.Corrupt, match=r"__0_0\.distcp: 'o' .* is damaged"):
        fetched(tmp_path, described(tmp_path, contents(stored)))


@pytest.mark.parametrize("descriptors", [(), ZSTD])
@pytest.mark.parametrize("stored", [b"", b"no container at all", bytes(5000)])
def test_a_tensor_has_to_be_a_container(tmp_path: Path, descriptors: tuple[str, ...], stored: bytes) -> None:
    places = put(tmp_path, compressed(stored) if descriptors else stored)
    found = contents({(b"t", (0,)): StoredAt("__0_0.distcp", *places[0], descriptors)})
    with pytest.raises(errors.Corrupt, match="'t'"):
        fetched(tmp_path, described(tmp_path, found))


@pytest.mark.parametrize("cut", [1, 3, 4, 20])
def test_a_stream_that_is_cut_is_damaged(tmp_path: Path, cut: int) -> None:
    whole = compressed(b"some bytes of a planner's own " * 1000)
    places = put(tmp_path, whole[:-cut])
    found = contents({(b"o", None): StoredAt("__0_0.distcp", *places[0], ZSTD)})
    with pytest.raises(errors.Corrupt, match=r"__0_0\.distcp: 'o'.* is damaged"):
        fetched(tmp_path, described(tmp_path, found))


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        (StoredAt("gone.distcp", 0, 10, ()), errors.Corrupt, "gone.distcp.* missing from the store"),
        (StoredAt("__0_0.distcp", 0, 1 << 62, ()), errors.Corrupt, "cut off: the file has 100 bytes"),
        (StoredAt("__0_0.distcp", (1 << 63) - 1, 100, ()), errors.Corrupt, "cut off"),
        (StoredAt("__0_0.distcp", 1, 100, ZSTD), errors.Corrupt, "cut off"),
        (StoredAt("__0_0.distcp", 0, 100, ("stream.lz4/3",)), errors.InvalidRequest, r"'stream\.lz4/3', which ckptd cannot undo"),
        (StoredAt("__0_0.distcp", 0, 100, ("stream.zstd/2",)), errors.InvalidRequest, r"'stream\.zstd/2'"),
        (StoredAt("__0_0.distcp", 0, 100, (*ZSTD, *ZSTD)), errors.InvalidRequest, r"'stream\.zstd/1', 'stream\.zstd/1'"),
        (StoredAt("__0_0.distcp", 0, 100, ("x" * 10_000,)), errors.InvalidRequest, "xxx"),
    ],
)
def test_what_cannot_be_read_is_refused_when_it_is_asked_for_and_spoils_nothing_else(
    tmp_path: Path, place: StoredAt, kind: type[errors.CkptdError], words: str
) -> None:
    put(tmp_path, b"x" * 100)
    good = StoredAt("__0_0.distcp", 0, 100, ())
    for key in ((b"t", (0,)), (b"o", None)):
        stored: dict[tuple[bytes, tuple[int, ...] | None], StoredAt] = {key: place, (b"o" if key[0] == b"t" else b"o2", None): good}
        described_contents = Contents([Tensor(b"t", "float32", (1,), (((0,), (1,)),))], [b"o", b"o2"], stored, None)
        found = described(tmp_path, described_contents)
        for shard in found.shards:
            for number, item in enumerate(shard.table.items):
                if item.fqn == key[0]:
                    with pytest.raises(kind, match=words) as caught:
                        shard.find([number], [0], [1])
                    assert len(str(caught.value)) < 1000
                else:
                    assert [one.length for one in shard.find([number], [0], [1])] == [100]
            assert shard.table.end < MIB


def test_what_is_no_part_of_the_state_is_left_out() -> None:
    place = StoredAt("__0_0.distcp", 0, 10, ())
    stored: dict[tuple[bytes, tuple[int, ...] | None], StoredAt] = {
        (b"unknown", None): place,
        (b"t", (5,)): place,  # no chunk begins there
        (b"t", None): place,
        (b"o", (0,)): place,
    }
    assert stock.parse(contents(stored)) == []


def test_claims_of_terabytes_cost_nothing_until_they_are_asked_for(tmp_path: Path) -> None:
    put(tmp_path, b"x" * 100)
    shape = (1 << 62, 1 << 62, 1 << 62)
    stored: dict[tuple[bytes, tuple[int, ...] | None], StoredAt] = {(b"t", (0, 0, 0)): StoredAt("__0_0.distcp", 0, 100, ZSTD)}
    found = described(tmp_path, contents(stored, shape))
    assert found.shards[0].table.end <= 100 * 32 * 1024


def test_items_that_claim_the_same_bytes_again_and_again_are_spread_over_segments_that_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / str(ID) / "huge.distcp"
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, 1 << 39)
    names = [f"o{number}".encode() for number in range(10)]
    found = Contents([], names, {(name, None): StoredAt("huge.distcp", 0, 1 << 39, ()) for name in names}, None)
    shards = described(tmp_path, found).shards
    assert [len(shard.table.items) for shard in shards] == [2] * 5
    assert all(shard.table.end == 1 << 40 for shard in shards)
    for shard in shards:
        assert [item.at for item in shard.table.items] == [0, 1 << 39]
        assert shard.find([1], [0], [1])[0].at == 1 << 39


def test_a_bomb_ends_when_it_has_more_than_its_tensor_can_have(tmp_path: Path) -> None:
    bomb = compressed(bytes(64 * MIB)) * 100  # 6.4 GiB in some 200 KiB
    places = put(tmp_path, bomb)
    found = described(tmp_path, contents({(b"t", (0,)): StoredAt("__0_0.distcp", *places[0], ZSTD)}))
    assert found.shards[0].table.end < MIB
    with pytest.raises(errors.Corrupt, match="more than a tensor of its shape and dtype takes"):
        fetched(tmp_path, found)
    assert (tmp_path / "segment").stat().st_size < MIB


def test_a_bomb_of_an_object_ends_when_it_has_more_than_the_memory(tmp_path: Path) -> None:
    bomb = compressed(bytes(64 * MIB)) * 100
    good = compressed(saved(5))
    places = put(tmp_path, bomb, good)
    found = Contents([], [b"bomb", b"o"], {}, None)
    found.storage[b"bomb", None] = StoredAt("__0_0.distcp", *places[0], ZSTD)
    found.storage[b"o", None] = StoredAt("__0_0.distcp", *places[1], ZSTD)
    tracemalloc.start()
    try:
        seen = described(tmp_path, found)
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(errors.Corrupt, match=r"'bomb'.* more than the 67108864 bytes of memory"):
        seen.shards[0].find([0], [0], [1])
    assert seen.shards[0].find([1], [0], [1])[0].nbytes == len(saved(5))


def test_bytes_that_come_back_garbled_once_are_read_again(tmp_path: Path) -> None:
    class Garbling(LocalStore):
        gets = 0

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().get(key, start, end)
            self.gets += 1
            return data if self.gets > 1 else bytes(len(data))

    tensor = saved(torch.randn(1000))
    places = put(tmp_path, tensor)
    found = described(tmp_path, contents({(b"t", (0,)): StoredAt("__0_0.distcp", *places[0], ())}))
    segment = tmp_path / "segment"
    segment.write_bytes(bytes(found.shards[0].table.end))
    store = Garbling(tmp_path)
    got = found.shards[0].read(store, segment, found.shards[0].find([0], [0], [1]))
    assert segment.read_bytes() == tensor
    assert got == items.Got(2 * len(tensor), {0: len(tensor)})


# -- which state of a directory --------------------------------------------------------------------------------


def save(path: Path, value: float) -> None:
    dcp.save({"t": torch.full((100,), value)}, storage_writer=dcp.FileSystemWriter(path))


def test_the_identity_is_that_of_metadata_and_of_each_data_file(tmp_path: Path) -> None:
    looks = stock.Looks(LocalStore(tmp_path))
    directory = tmp_path / "step-1"
    save(directory, 1.0)
    first = looks.look(CheckpointId.parse("step-1"))
    assert first.identity.startswith("stock-")
    assert first.files == {"__0_0.distcp": (directory / "__0_0.distcp").stat().st_size}
    (directory / "notes.txt").write_text("of somebody else")
    assert looks.look(CheckpointId.parse("step-1")).identity == first.identity

    data = directory / "__0_0.distcp"
    before = data.stat()
    data.write_bytes(data.read_bytes())
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    touched = looks.look(CheckpointId.parse("step-1"))
    assert touched.identity != first.identity
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert looks.look(CheckpointId.parse("step-1")).identity == first.identity

    (directory / ".metadata").write_bytes((directory / ".metadata").read_bytes().replace(b"1.0.0", b"1.0.1"))
    assert looks.look(CheckpointId.parse("step-1")).identity not in (first.identity, touched.identity)
    data.unlink()
    assert looks.look(CheckpointId.parse("step-1")).files == {}
    (directory / ".metadata").unlink()
    with pytest.raises(errors.NotFound):
        looks.look(CheckpointId.parse("step-1"))


def test_a_data_file_newer_than_metadata_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "step-1", 1.0)
    looks = stock.Looks(LocalStore(tmp_path))
    assert looks.look(CheckpointId.parse("step-1")).newer == []
    later = (tmp_path / "step-1" / ".metadata").stat().st_mtime + 60
    os.utime(tmp_path / "step-1" / "__0_0.distcp", (later, later))
    assert looks.look(CheckpointId.parse("step-1")).newer == ["__0_0.distcp"]


def test_files_in_directories_of_their_own_are_found(tmp_path: Path) -> None:
    def moved(info: _StorageInfo, directory: str) -> _StorageInfo:
        return _StorageInfo(f"{directory}/{info.relative_path}", info.offset, info.length)

    for count in (1, 40):
        path = tmp_path / f"step-{count}"
        state = {f"t{number}": torch.full((10,), float(number)) for number in range(count)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False))
        found = dcp.FileSystemReader(path).read_metadata()
        for number, (index, info) in enumerate(list(found.storage_data.items())):
            (path / f"d{number}" / "deep").mkdir(parents=True)
            (path / info.relative_path).rename(path / f"d{number}" / "deep" / info.relative_path)
            found.storage_data[index] = moved(info, f"d{number}/deep")
        (path / ".metadata").write_bytes(pickle.dumps(found))
        seen = stock.Looks(LocalStore(tmp_path)).look(CheckpointId.parse(f"step-{count}"))
        assert len(seen.files) == count
        assert all(name.count("/") == 2 for name in seen.files)


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"cos\nsystem\n(S'true'\ntR."])
def test_a_metadata_that_cannot_be_read_is_damage_with_its_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run/step-1").mkdir(parents=True)
    (tmp_path / "run/step-1/.metadata").write_bytes(data)
    with pytest.raises(errors.Corrupt, match=r"run/step-1/\.metadata cannot be read"):
        stock.Looks(LocalStore(tmp_path)).look(ID)
