"""What was really written, then damaged: refused, or read as something else, and nothing worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import contents, metadata, unpickler
from ckptd.errors import Corrupt, InvalidRequest
from fuzz.conftest import Written

PICKLES = ["metadata", "stock", "stock_zstd"]


def flips(data: bytes, step: int = 1) -> Iterator[bytes]:
    """Each with one bit flipped: every one, or every `step`th."""
    damaged = bytearray(data)
    for bit in range(0, 8 * len(data), step):
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)
        damaged[bit // 8] ^= 1 << bit % 8


def shown(data: bytes) -> Any:
    """What `show` makes of a stock `.metadata`, or that it is Corrupt."""
    try:
        found = metadata.read(data)
        return found, contents.stock_lines(found), contents.stock_files(found)
    except Corrupt:
        return Corrupt


@pytest.mark.parametrize("kind", PICKLES)
def test_metadata_with_any_bit_flipped_is_refused_or_something_else(written: Written, kind: str) -> None:
    data = getattr(written, kind)
    whole = shown(data)
    assert whole is not Corrupt
    for damaged in flips(data, step=5):
        shown(damaged)
        metadata.save_id(damaged)
    assert shown(data) == whole


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", PICKLES)
def test_idioms_read_what_the_machine_reads(written: Written, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = getattr(written, kind)
    damaged = list(flips(data))
    with_idioms = [shown(one) for one in damaged]
    monkeypatch.setattr(unpickler, "_IDIOMATIC_PROTOCOL", 200)
    assert [shown(one) for one in damaged] == with_idioms


@pytest.mark.parametrize("kind", PICKLES)
def test_metadata_cut_anywhere_is_corrupt(written: Written, kind: str) -> None:
    data = getattr(written, kind)
    for length in range(len(data)):
        assert shown(data[:length]) is Corrupt, length
        assert metadata.save_id(data[:length]) is None
    assert shown(data + b".") is Corrupt


#: Opcodes with their arguments, real and odd ones.
FRAGMENTS = [
    *(bytes([code]) for code in b"()]}.012NNabdeRostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97"),
    *(
        b"K\x00",
        b"K\x01",
        b"M\xff\xff",
        b"J\xff\xff\xff\xff",
        b"\x8a\x01\x80",
        b"\x8a\x00",
        b"G" + b"\x7f" * 8,
        b"q\x00",
        b"q\x01",
        b"h\x00",
        b"h\x01",
    ),
    *(
        b"j\x00\x00\x00\x00",
        b"X\x01\x00\x00\x00x",
        b"\x8c\x05torch",
        b"\x8c\x04Size",
        b"\x8c\x03fqn",
        b"C\x01x",
        b"\x95" + bytes(8),
        b"\x80\x04",
        b"\x80\x02",
    ),
    *(
        f"c{module}\n{name}\n".encode()
        for module, name in [("torch", "Size"), ("torch", "int8"), ("collections", "OrderedDict"), ("os", "system")]
    ),
    *(
        f"ctorch.distributed.checkpoint.metadata\n{name}\n".encode()
        for name in ["Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata"]
    ),
]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([b"\x80\x02", b"\x80\x04", b""]), st.lists(st.sampled_from(FRAGMENTS), max_size=30))
def test_any_row_of_opcodes_is_refused_or_read(start: bytes, row: list[bytes]) -> None:
    shown(start + b"".join(row) + b".")


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_metadata_with_pieces_moved_and_replaced_is_refused_or_something_else(written: Written, data: st.DataObject) -> None:
    damaged = bytearray(getattr(written, data.draw(st.sampled_from(PICKLES))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        piece = data.draw(st.binary(max_size=8) | st.sampled_from(FRAGMENTS))
        start = data.draw(st.integers(0, len(damaged)))
        copied = bytes(damaged[start : start + data.draw(st.integers(0, 200))])
        damaged[at : at + data.draw(st.integers(0, 20))] = data.draw(st.sampled_from([piece, copied]))
    shown(bytes(damaged))


@settings(deadline=None)
@given(
    client=st.binary(max_size=60),
    prefix=st.sampled_from([b"", b"\x80\x02"]),
    names=st.lists(st.binary(max_size=6), max_size=3),
    edge=st.integers(0, 2**64 - 1),
)
def test_splicing_around_any_bytes_refuses_or_appends(client: bytes, prefix: bytes, names: list[bytes], edge: int) -> None:
    placed = [metadata.Placed(one, (edge,), edge, "__0_x.distcp", edge, edge) for one in names]
    head = prefix + client
    try:
        whole = metadata.splice(head, placed, descriptors=(), checkpoint_id="a", save_id=f"{'0' * 24}-{'0' * 16}.manifest")
    except InvalidRequest:
        return
    assert whole.startswith(head[:-1])
    assert metadata.save_id(whole) is not None
    shown(whole)
