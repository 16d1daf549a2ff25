"""Spliced metadata is what stock would have written; the reader makes values of it and runs nothing."""

from __future__ import annotations

import io
import pathlib
import pickle
import pickletools
import struct
import uuid
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptd import archive, codec, inert, manifest, metadata, unpickler
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.metadata import Placed
from ckptd_client.forms import form_of

SAVE_ID = f"{'0123456789abcdef01234567'}-{'89abcdef01234567'}.manifest"
ODD_NAMES = ["", "a/b/../c", "x" * 1000, "\ud800 alone", "naïve ☃ 🦖", "*?[a-z]", "\0\n\r", "fqn", "y" * 300]


def tensor_metadata(dtype: torch.dtype, shape: list[int], chunks: int = 1) -> TensorStorageMetadata:
    offsets = [torch.Size([i * shape[0], *[0] * (len(shape) - 1)]) if shape else torch.Size([]) for i in range(chunks)]
    # Each Size is an object of its own, as stock's are: one that is shared would be pickled as a reference.
    return TensorStorageMetadata(
        TensorProperties(dtype), torch.Size(shape), [ChunkStorageMetadata(at, torch.Size(shape)) for at in offsets]
    )


def stock_without_storage(names: list[str]) -> Metadata:
    state: dict[str, Any] = {}
    for number, name in enumerate(names):
        state[name] = tensor_metadata(torch.bfloat16, [number, 3], 2) if number % 3 else BytesStorageMetadata()
    return Metadata(state, planner_data={name: (name, 0) for name in names}, version="1.0.0")


def placed_for(names: list[str]) -> list[Placed]:
    placed = []
    for number, name in enumerate(names):
        fqn = name.encode("utf-8", "surrogatepass")
        offsets = [(0, 0), (number, 0)] if number % 3 else [None]
        for index, offset in enumerate(offsets):
            where = (f"__{number % 5}_abc.distcp", number * 1_000_003, 300 + number)
            placed.append(Placed(fqn, offset, index if offset else None, *where))
    return placed


def expected_storage(placed: list[Placed], descriptors: list[str] | None) -> dict[MetadataIndex, _StorageInfo]:
    return {
        MetadataIndex(one.fqn.decode("utf-8", "surrogatepass"), one.offset, one.index): _StorageInfo(
            one.file, one.at, one.nbytes, transform_descriptors=descriptors
        )
        for one in placed
    }


ZSTD = ("stream.zstd/1",)


def splice(of: Metadata, placed: list[Placed], descriptors: tuple[str, ...] = ZSTD, checkpoint_id: str = "run-a/step-7") -> bytes:
    head = pickle.dumps(of, protocol=2)
    whole = metadata.splice(head, placed, descriptors=descriptors, checkpoint_id=checkpoint_id, save_id=SAVE_ID)
    assert whole[: len(head) - 1] == head[:-1]
    return whole


@pytest.mark.parametrize("loads", [pickle.loads, pickle._loads], ids=["C", "Python"])  # type: ignore[attr-defined]
@pytest.mark.parametrize("descriptors", [(), ("stream.zstd/1",), ("one/1", "two/2")], ids=str)
def test_stock_unpickles_what_it_would_have_written(loads: Any, descriptors: tuple[str, ...]) -> None:
    names = [f"model.layers.{i}.weight" for i in range(300)] + ODD_NAMES
    placed = placed_for(names)
    found = loads(splice(stock_without_storage(names), placed, descriptors))

    expected = stock_without_storage(names)
    expected.storage_data = expected_storage(placed, list(descriptors) or None)
    expected.storage_meta = StorageMeta(checkpoint_id="run-a/step-7", save_id=SAVE_ID)
    assert found == expected
    assert type(found) is Metadata
    for (key, info), (wanted_key, wanted_info) in zip(found.storage_data.items(), expected.storage_data.items(), strict=True):
        assert vars(key) == vars(wanted_key)
        assert type(key.offset) is type(wanted_key.offset)
        assert hash(key) == hash(wanted_key)
        assert repr(info) == repr(wanted_info)
        fresh = MetadataIndex(wanted_key.fqn, wanted_key.offset, 77)
        assert found.storage_data[fresh] == wanted_info
    # And once more through stock's own pickling.
    assert pickle.loads(pickle.dumps(found)) == expected


def test_a_memo_of_the_client_of_any_length_does_no_harm() -> None:
    for count in (0, 1, 90, 5000):
        names = [f"n{i}" for i in range(count)]
        of = stock_without_storage(names)
        found = pickle.loads(splice(of, placed_for(names)))
        assert found.state_dict_metadata == of.state_dict_metadata
        assert found.planner_data == of.planner_data
        assert len(found.storage_data) == len(placed_for(names))


@settings(deadline=None)
@given(
    numbers=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 62)), max_size=6),
    fqn=st.text(st.characters()),
    index=st.none() | st.integers(0, 1 << 40),
)
def test_numbers_and_names_of_every_size_survive(numbers: list[int], fqn: str, index: int | None) -> None:
    at, nbytes = max(numbers, default=0), len(numbers)
    placed = [Placed(fqn.encode("utf-8", "surrogatepass"), tuple(numbers), index, "f", at, nbytes)]
    whole = splice(Metadata({}), placed, ())
    assert pickle.loads(whole).storage_data == expected_storage(placed, None)
    key = next(iter(pickle.loads(whole).storage_data))
    assert (key.index, key.offset) == (index, torch.Size(numbers))
    assert metadata.read(whole).storage == {(placed[0].fqn, tuple(numbers)): metadata.StoredAt("f", at, nbytes, ())}


def test_offset_none_and_offset_of_a_0_dim_tensor_differ() -> None:
    placed = [Placed(b"x", None, None, "f", 0, 1), Placed(b"x", (), 0, "f", 1, 2)]
    whole = splice(Metadata({}), placed)
    data = pickle.loads(whole).storage_data
    assert (data[MetadataIndex("x")].length, data[MetadataIndex("x", ())].length) == (1, 2)
    assert {key: stored.length for key, stored in metadata.read(whole).storage.items()} == {(b"x", None): 1, (b"x", ()): 2}


def test_of_equal_keys_the_last_counts() -> None:
    placed = [Placed(b"x", None, None, "f", 0, 1), Placed(b"x", None, None, "g", 1, 2)]
    assert pickle.loads(splice(Metadata({}), placed)).storage_data[MetadataIndex("x")].relative_path == "g"


def test_many_files_and_no_items() -> None:
    placed = [Placed(b"%d" % i, (i,), 0, f"__{i}_x.distcp", i, i) for i in range(700)] * 2
    assert pickle.loads(splice(Metadata({}), placed)).storage_data == expected_storage(placed, ["stream.zstd/1"])
    assert pickle.loads(splice(Metadata({}), [])).storage_data == {}


def test_twenty_thousand_keys_are_spliced_and_read() -> None:
    names = [f"optimizer.state.model.layers.{i}.self_attn.q_proj.weight.exp_avg" for i in range(20_000)]
    placed = [Placed(name.encode(), (0, 0), 0, f"__{i % 8}_t.distcp", i * 4096, 4000) for i, name in enumerate(names)]
    of = Metadata({name: tensor_metadata(torch.float32, [4, 8]) for name in names}, planner_data={name: (name,) for name in names})
    whole = splice(of, placed)
    assert pickle.loads(whole).storage_data == expected_storage(placed, ["stream.zstd/1"])
    contents = metadata.read(whole)
    assert [one.fqn.decode() for one in contents.tensors] == names
    assert len(contents.storage) == 20_000


@pytest.mark.parametrize("payload", [b"", b".", b"\x80\x02", b"\x80\x02}", b"\x80\x04}.", b"}.", b"\x80\x02}.x"], ids=repr)
def test_what_is_no_protocol_2_pickle_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a pickle of protocol 2"):
        metadata.splice(payload, [], descriptors=(), checkpoint_id="a", save_id=SAVE_ID)


def test_names_that_could_not_be_read_back_are_refused() -> None:
    head = pickle.dumps(Metadata({}), protocol=2)
    with pytest.raises(InvalidRequest, match="UTF-8"):
        metadata.splice(head, [Placed(b"\xff", None, None, "f", 0, 1)], descriptors=(), checkpoint_id="a", save_id=SAVE_ID)
    with pytest.raises(InvalidRequest, match="not the name of a manifest"):
        metadata.splice(head, [], descriptors=(), checkpoint_id="a", save_id="../x.manifest")


def test_the_save_id_is_found_in_the_tail_for_the_longest_id() -> None:
    longest = "r" * 128 + "/" + "s" * 128
    whole = splice(stock_without_storage(["a", "b"]), placed_for(["a", "b"]), checkpoint_id=longest)
    assert pickle.loads(whole).storage_meta.checkpoint_id == longest
    for tail in (whole, whole[-512:], whole[-200:]):
        assert metadata.save_id(tail) == SAVE_ID


def test_other_tails_have_no_save_id() -> None:
    whole = splice(Metadata({}), [])
    stock = [pickle.dumps(Metadata({}, storage_meta=StorageMeta("a", SAVE_ID)), protocol) for protocol in (2, 4)]
    for tail in (b"", b".", whole[:-1], whole + b"\n", whole[-60:], *stock):
        assert metadata.save_id(tail) is None


def nested_state() -> dict[str, Any]:
    return {
        "model": {
            "weight": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 4, dtype=torch.uint16),
            "fp8": torch.zeros(5, dtype=torch.float8_e4m3fn),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3, 2, dtype=torch.complex64)}}, "groups": [{"lr": 0.1, "params": [0, 1]}]},
        "step": 7,
        "rng": OrderedDict(a=[1, 2], b=b"bytes"),
        "odd/../name": torch.ones(2),
    }


@pytest.mark.parametrize("extensions", [(), (ZStandard(),)], ids=["plain", "zstd"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_what_stock_saves_is_read(tmp_path: Path, extensions: tuple[Any, ...]) -> None:
    writer = dcp.FileSystemWriter(tmp_path, _extensions=extensions, single_file_per_rank=False)
    dcp.save(nested_state(), storage_writer=writer, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    stock = pickle.loads(data)
    contents = metadata.read(data)

    found: dict[str, Any] = {
        one.fqn.decode(): TensorStorageMetadata(
            TensorProperties(getattr(torch, one.dtype)),
            torch.Size(one.shape),
            [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in one.chunks],
        )
        for one in contents.tensors
    }
    found |= {fqn.decode(): BytesStorageMetadata() for fqn in contents.objects}
    assert found == stock.state_dict_metadata
    assert {type(one.dtype) for one in contents.tensors} == {str}
    assert contents.save_id is None
    assert metadata.save_id(data) is None
    assert {
        MetadataIndex(fqn.decode(), offset): _StorageInfo(at.file, at.offset, at.length, list(at.descriptors) or None)
        for (fqn, offset), at in contents.storage.items()
    } == stock.storage_data
    for at in contents.storage.values():
        assert (tmp_path / at.file).stat().st_size >= at.offset + at.length


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_stock_may_use_is_read(protocol: int) -> None:
    names = [f"a.{i}" for i in range(400)] + ODD_NAMES
    of = stock_without_storage(names)
    of.planner_data = {"set": {1, 2}, "frozen": frozenset("ab"), "bytes": b"\xff" * 300, "float": 1.5, "big": -(1 << 200), "none": None,
                       "path": pathlib.PurePosixPath("/a/b"), "ordered": OrderedDict(x=1), "long": "é" * 300, "bools": [True, False],
                       "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], "dtype": torch.float8_e5m2}  # fmt: skip
    placed = placed_for(names)
    of.storage_data = expected_storage(placed, None)
    of.storage_meta = StorageMeta(checkpoint_id=pathlib.PosixPath("/x"), save_id=str(uuid.uuid4()))
    contents = metadata.read(pickle.dumps(of, protocol=protocol))
    assert [one.fqn for one in contents.tensors] == [n.encode("utf-8", "surrogatepass") for i, n in enumerate(names) if i % 3]
    assert contents.objects == [n.encode("utf-8", "surrogatepass") for i, n in enumerate(names) if not i % 3]
    assert contents.storage == {(one.fqn, one.offset): metadata.StoredAt(one.file, one.at, one.nbytes, ()) for one in placed}
    assert contents.save_id is None
    assert {(one.dtype, one.shape[1]) for one in contents.tensors} == {("bfloat16", 3)}


def test_every_dtype_of_torch_is_known() -> None:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        contents = metadata.read(pickle.dumps(Metadata({"x": tensor_metadata(dtype, [1, 2])})))
        assert getattr(torch, contents.tensors[0].dtype) is dtype


def test_ours_is_read() -> None:
    names = [f"a.{i}" for i in range(30)] + ODD_NAMES
    contents = metadata.read(splice(stock_without_storage(names), placed_for(names)))
    assert contents.save_id == SAVE_ID
    assert len(contents.tensors) + len(contents.objects) == len(names)
    assert contents.storage == {
        (one.fqn, one.offset): metadata.StoredAt(one.file, one.at, one.nbytes, ("stream.zstd/1",)) for one in placed_for(names)
    }


@pytest.mark.parametrize("name", ["none", "zstd:1"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_stock_loads_a_checkpoint_put_together_from_these_rooms(tmp_path: Path, name: str) -> None:
    state = {
        "a": torch.randn(1000, 70),
        "b/../c": torch.arange(12, dtype=torch.int16).reshape(3, 4),
        "0": torch.tensor(2.5, dtype=torch.bfloat16),
        "e": torch.empty(0, 4),
        "cl": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    one, at, stored, placed = codec.parse(name), 0, bytearray(), []
    of = Metadata({}, planner_data={key: (key,) for key in state})
    for key, tensor in state.items():
        of.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), tensor.shape, [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]
        )
        form = form_of(tensor.dtype, tuple(tensor.shape), tensor.stride())
        before, after = archive.gaps(at, form.pkl, tensor.nbytes)
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
        container = before + raw + after
        _, end = archive.layout(at, len(form.pkl), tensor.nbytes)
        start = len(stored)
        for first, last in manifest.block_spans(at, end, 1000):
            stored += one.encode(container[first:last])
        placed.append(Placed(key.encode(), (0,) * tensor.dim(), 0, "__0_t.distcp", start, len(stored) - start))
        at = end
    (tmp_path / "__0_t.distcp").write_bytes(stored)
    (tmp_path / ".metadata").write_bytes(splice(of, placed, one.descriptors))

    loaded = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key


class Calls:
    """Reduces to a call, as a hostile pickle would."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (Calls(exec, "raise SystemExit(3)"), "exec"),
        (Calls(pathlib.os.system, "exit 3"), r"(posix|os)\.system"),  # type: ignore[attr-defined]
        (Calls(torch.load, "x"), r"torch\.serialization\.load"),
        (Calls(torch.hub.load, "x"), r"torch\.hub\.load"),
        (Calls(io.BytesIO, b"x"), "BytesIO"),
        (Calls(uuid.uuid4), r"uuid\.uuid4"),
    ],
)
def test_other_globals_are_refused_by_name_and_never_run(call: Calls, named: str, protocol: int) -> None:
    with pytest.raises(Corrupt, match=named):
        metadata.read(pickle.dumps(Metadata({}, planner_data=[call]), protocol=protocol))


def test_known_globals_are_not_called_either(tmp_path: Path) -> None:
    # Path.touch through getattr: both names are known, nothing happens.
    hostile = b"\x80\x02cbuiltins\ngetattr\ncpathlib\nPosixPath\nX\x05\0\0\0touch\x86R" + b"cpathlib\nPosixPath\n" + b"X"
    target = str(tmp_path / "made").encode()
    hostile += struct.pack("<I", len(target)) + target + b"\x85R\x85R."
    with pytest.raises(Corrupt):
        metadata.read(hostile)
    assert list(tmp_path.iterdir()) == []


BOMBS = {
    "memo number": b"\x80\x02}r\xff\xff\xff\xff.",
    "text length": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
    "negative length": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96" + b"\0\0\0\0\xff\0\0\0.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02X\x01\0\0\0aQ.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "deep tuple as key": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
    "deep marks": b"\x80\x02" + b"(" * 200_000 + b".",
    "list that holds itself": b"\x80\x02]q\0h\0a.",
    "nothing": b"",
    "stop alone": b".",
    "no stop": b"\x80\x02}",
    "state of a class": b"\x80\x02ctorch\nSize\nN}X\x07\0\0\0__new__Ns\x86b.",
    "call of a value": b"\x80\x02X\x01\0\0\0a)R.",
    "unhashable key": b"\x80\x02}}Ns.",
    "append to text": b"\x80\x02X\x01\0\0\0aNa.",
    "not UTF-8": b"\x80\x02X\x01\0\0\0\xff.",
    "global without end": b"\x80\x02ctorch",
    "after the end": pickle.dumps(Metadata({})) + b"x",
    "two values": b"\x80\x02NN.",
    "odd items": b"\x80\x02}(Nu.",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_hostile_pickles_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        metadata.read(data)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"X\x01\0\0\0aNa.", "adds to a str"),
        (b"X\x01\0\0\0a(Ne.", "adds to a str"),
        (b"](NNu.", "sets keys of a list"),
        (b"]NNs.", "sets keys of a list"),
        (b"]Nb.", "gives state to a list"),
        (b"N)R.", "calls a NoneType with a tuple"),
        (b"ctorch\nSize\nNR.", "calls a Plain with a NoneType"),
        (b"]X\x01\0\0\0a\x93.", "names a class by a str in a list"),
        (b"X\x05\0\0\0torch]\x93.", "names a class by a list in a str"),
        (b"\x8a\xff\x01.", "cut short: 255 more are needed at byte 4"),
        (b"N(.", "ends at byte 5 of 5 with 1 values"),
        (b"NN.", "ends at byte 5 of 5 with 2 values"),
        (b"N.N", "ends at byte 4 of 5 with 1 values"),
    ],
)
def test_a_pickle_that_no_pickler_writes_is_told_apart(data: bytes, told: str) -> None:
    with pytest.raises(Corrupt, match=told):
        unpickler.load(b"\x80\x02" + data, lambda _module, _name: True, {("torch", "Size")})


def test_chunks_shared_by_reference_do_not_multiply() -> None:
    shared = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 3000
    of = Metadata({str(i): TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([1]), shared) for i in range(3000)})
    with pytest.raises(Corrupt, match="more chunks than its length allows"):
        metadata.read(pickle.dumps(of))


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../other/x", "a/../../x", "a//b", ".", ".."])
def test_files_outside_the_checkpoint_are_corrupt(name: str) -> None:
    of = Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo(name, 0, 1)})
    with pytest.raises(Corrupt, match="not inside the checkpoint"):
        metadata.read(pickle.dumps(of))


@pytest.mark.parametrize(
    "of",
    [
        None,
        [],
        StorageMeta(),
        Metadata(None),  # type: ignore[arg-type]
        Metadata({1: BytesStorageMetadata()}),  # type: ignore[dict-item]
        Metadata({"x": StorageMeta()}),  # type: ignore[dict-item]
        Metadata({"x": TensorStorageMetadata(None, torch.Size([]), [])}),  # type: ignore[arg-type]
        Metadata({"x": TensorStorageMetadata(TensorProperties("float32"), torch.Size([]), [])}),  # type: ignore[arg-type]
        Metadata({"x": TensorStorageMetadata(TensorProperties(torch.int8), "no size", [])}),  # type: ignore[arg-type]
        Metadata({"x": TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([]), [3])}),  # type: ignore[list-item]
        Metadata({}, storage_data=[1]),
        Metadata({}, storage_data={"x": _StorageInfo("f", 0, 1)}),
        Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo("f", -1, 1)}),
        Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo("f", 0, 1, "text")}),
        Metadata({}, storage_data={MetadataIndex("x"): "f"}),
        Metadata({}, storage_meta="x"),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_metadata_of_another_shape_is_corrupt(of: object) -> None:
    with pytest.raises(Corrupt):
        metadata.read(pickle.dumps(of))


def test_damage_is_corrupt_or_another_value_but_nothing_else() -> None:
    names = ["a", "b", "c"]
    whole = splice(stock_without_storage(names), placed_for(names))
    for at in range(len(whole)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            try:
                assert isinstance(metadata.read(bytes(damaged)), metadata.Contents)
            except Corrupt:
                continue
        with pytest.raises(Corrupt):
            metadata.read(whole[:at])


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        metadata.read(b"\x80\x02" + data)


def test_more_than_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "LIMIT_NBYTES", 100)
    with pytest.raises(Corrupt, match="too large"):
        metadata.read(pickle.dumps(Metadata({}, planner_data="x" * 100)))


def test_every_opcode_that_the_c_pickler_writes_is_known_and_no_other() -> None:
    # Those that only hand-made pickles, protocols 0 and 1, or features that metadata cannot have use.
    unused = {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "INST", "OBJ"}
    unused |= {"INT", "LONG", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "FLOAT", "LIST", "DICT", "PUT", "GET"}
    refused = set()
    for one in pickletools.opcodes:
        with pytest.raises(Corrupt) as told:
            metadata.read(b"\x80\x04" + one.code.encode("latin1"))
        if "has opcode" in str(told.value):
            refused.add(one.name)
    assert refused == unused


def oddly_chunked() -> Metadata:
    """Tensors of every kind that an idiom has to tell apart, among enough others that references get long."""
    wide = [0, 1, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 39) - 1, 1 << 39, (1 << 47) - 1, 1 << 47, (1 << 62) + 1]
    names = [f"model.layers.{i}.weight" for i in range(300)]
    of = Metadata({name: tensor_metadata(torch.bfloat16, [i, 3], 1 + i % 3) for i, name in enumerate(names)})
    state: dict[str, Any] = of.state_dict_metadata
    for dims in range(7):
        state[f"dims.{dims}"] = tensor_metadata(torch.float32, [2] * dims)
    for number in wide:
        state[f"wide.{number}"] = tensor_metadata(torch.int8, [1, number, 1], 2)
    state["many"] = tensor_metadata(torch.float8_e4m3fn, [1, 2], 1000)
    state["more"] = tensor_metadata(torch.complex64, [1, 2], 1001)
    state["none"] = tensor_metadata(torch.complex64, [1, 2], 0)
    state["grad"] = tensor_metadata(torch.float32, [1])
    state["grad"].properties.requires_grad = True
    state["sparse"] = tensor_metadata(torch.float32, [1])
    state["sparse"].properties.layout = torch.sparse_coo
    shared = state["model.layers.7.weight"]
    state["again"] = TensorStorageMetadata(shared.properties, shared.size, shared.chunks)
    of.storage_data = {}
    for number, (name, entry) in enumerate(state.items()):
        for at, piece in enumerate(entry.chunks):
            where = (f"__{number % 5}_0.distcp", wide[number % len(wide)], wide[at % len(wide)])
            info = _StorageInfo(*where, transform_descriptors=["stream.zstd/1"] if number % 2 else None)
            of.storage_data[MetadataIndex(name, piece.offsets, at if number % 3 else None)] = info
    of.planner_data = {name: (name,) for name in state}
    of.storage_meta = StorageMeta(checkpoint_id="x", save_id=str(uuid.uuid4()))
    return of


@pytest.mark.parametrize("protocol", [4, 5])
def test_idioms_read_what_the_machine_reads_and_what_was_written(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = oddly_chunked()
    data = pickle.dumps(of, protocol)
    found = metadata.read(data)
    for tensor in found.tensors:
        expected = of.state_dict_metadata[tensor.fqn.decode()]
        assert isinstance(expected, TensorStorageMetadata)
        assert (getattr(torch, tensor.dtype), tensor.shape) == (expected.properties.dtype, tuple(expected.size))
        assert tensor.chunks == tuple((tuple(one.offsets), tuple(one.sizes)) for one in expected.chunks)
    assert len(found.tensors) == len(of.state_dict_metadata)
    assert found.storage == {
        (index.fqn.encode(), tuple(index.offset)): (info.relative_path, info.offset, info.length, tuple(info.transform_descriptors or ()))
        for index, info in of.storage_data.items()
    }
    monkeypatch.setattr(unpickler, "_IDIOMATIC_PROTOCOL", 200)
    assert metadata.read(data) == found


def test_nearly_all_that_stock_writes_is_read_by_idioms(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.{i}.weight" for i in range(400)]
    of = Metadata({name: tensor_metadata(torch.bfloat16, [4, 3], 1 + i % 2) for i, name in enumerate(names)})
    chunks = [(name, piece) for name, entry in of.state_dict_metadata.items() for piece in entry.chunks]  # type: ignore[union-attr]
    of.storage_data = {MetadataIndex(name, piece.offsets, 0): _StorageInfo("__0_0.distcp", 70_000, 300) for name, piece in chunks}
    made: list[Any] = []
    recognise = inert.Machine.recognise

    def counted(machine: inert.Machine, frequent: inert.Frequent, at: int) -> int:
        end = recognise(machine, frequent, at)
        made.append(end)
        return end

    monkeypatch.setattr(inert.Machine, "recognise", counted)
    assert len(metadata.read(pickle.dumps(of, 4)).tensors) == 400
    # The first of each kind spells out what the others refer to; the first two keep their references short.
    assert made.count(0) <= 4
    assert len(made) >= 400 + 2 * len(chunks) - 4


def test_a_class_that_is_replaced_in_the_memo_is_not_taken_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # No pickler does that at protocol 4; who does it by hand gets what the machine makes of it.
    whole = pickle.dumps(Metadata({f"t{i}": tensor_metadata(torch.int8, [1, 2]) for i in range(3)}), 4)
    at = whole.index(b"\x8c\x02t2")
    replaced = [whole[:at] + b"N" + b"q" + bytes([place]) + b"0" + whole[at:] for place in range(40)]

    def outcomes() -> list[Any]:
        found: list[Any] = []
        for data in replaced:
            try:
                found.append(metadata.read(data))
            except Corrupt:
                found.append(Corrupt)
        return found

    with_idioms = outcomes()
    assert Corrupt in with_idioms
    monkeypatch.setattr(unpickler, "_IDIOMATIC_PROTOCOL", 200)
    assert outcomes() == with_idioms


def test_mappings_of_other_kinds_are_read_and_what_is_none_is_corrupt() -> None:
    entries = {"a": tensor_metadata(torch.int8, [1]), "b": BytesStorageMetadata()}
    for mapping in (OrderedDict(entries), defaultdict(dict, entries)):
        found = metadata.read(pickle.dumps(Metadata(mapping)))  # type: ignore[arg-type]
        assert ([one.fqn for one in found.tensors], found.objects) == ([b"a"], [b"b"])
    for odd in ([1, 2], [(1, 2, 3)], ["ab"]):
        with pytest.raises(Corrupt):
            metadata.read(pickle.dumps(Metadata(ListLike(odd))))  # type: ignore[arg-type]


class ListLike:
    """Pickles to an OrderedDict that is appended to as a list."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, iter(self.values)
