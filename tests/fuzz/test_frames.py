"""Stored blocks and containers that nobody wrote: Corrupt, and no more memory than the block that was asked for."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import archive, codec
from ckptd.errors import Corrupt, InvalidRequest
from fuzz import sandbox
from fuzz.conftest import Written
from fuzz.test_manifests import EDGES

BLOCK = b"a block of some bytes, and some more bytes of it" * 20
MAGIC = b"\x28\xb5\x2f\xfd"


def frame(
    descriptor: int, *, window: int | None = None, size: bytes = b"", blocks: bytes = b"\x01\0\0", checksum: bytes = bytes(4)
) -> bytes:
    """A zstd frame by its fields (RFC 8878, 3.1.1)."""
    return MAGIC + bytes([descriptor]) + (b"" if window is None else bytes([window])) + size + blocks + checksum


def rle(nbytes: int, *, last: bool) -> bytes:
    """A block of one byte again and again; at most 128 KiB."""
    return struct.pack("<I", nbytes << 3 | 1 << 1 | last)[:3] + b"\0"


def bomb(nbytes: int) -> bytes:
    """Blocks that decode to `nbytes` zeros, 128 KiB each."""
    count = nbytes >> 17
    return b"".join(rle(1 << 17, last=number == count - 1) for number in range(count))


def checksum(content: bytes) -> bytes:
    return struct.pack("<I", xxhash.xxh64_intdigest(content) & 0xFFFFFFFF)


def asked(nbytes: int, stored: bytes) -> bytes:
    """A case for the sandbox."""
    return nbytes.to_bytes(8, "little") + stored


def hostile() -> Iterator[tuple[str, int, bytes]]:
    whole = codec.Zstd(1).encode(BLOCK)
    many = len(BLOCK)
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + bytes(8)
    for nbytes in (1 << 32, 1 << 40, 1 << 62, (1 << 64) - 1):
        yield f"a size of {nbytes}, as was asked for", nbytes, frame(0xE4, size=struct.pack("<Q", nbytes))
        yield f"a size of {nbytes}, not asked for", many, frame(0xE4, size=struct.pack("<Q", nbytes))
    yield "more zeros than the size says", 256, frame(0x64, size=bytes(2), blocks=bomb(1 << 30), checksum=checksum(bytes(256)))
    yield "fewer zeros than the size says", 1 << 17, frame(0xA4, size=struct.pack("<I", 1 << 17), blocks=rle(100, last=True))
    yield "blocks without a last one", 256, frame(0x64, size=bytes(2), blocks=rle(256, last=False), checksum=b"")
    yield "a block of the reserved kind", 256, frame(0x64, size=bytes(2), blocks=b"\x07\0\0")
    yield "a dictionary", 256, frame(0x65, size=b"\x07" + bytes(2), blocks=rle(256, last=True))
    yield "the reserved bit", 256, frame(0x6C, size=bytes(2), blocks=rle(256, last=True), checksum=checksum(bytes(256)))
    yield "a wrong checksum", many, whole[:-4] + bytes(4)
    yield "no size", many, zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(BLOCK)
    yield "no checksum", many, zstandard.ZstdCompressor().compress(BLOCK)
    yield "two frames", 2 * many, whole + whole
    yield "two frames for one", many, whole + whole
    yield "two frames that together are right", many, codec.Zstd(1).encode(BLOCK[:100]) + codec.Zstd(1).encode(BLOCK[100:])
    yield "a skippable frame alone", 8, skippable
    yield "a skippable frame before", many, skippable + whole
    yield "a skippable frame behind", many, whole + skippable
    yield "a frame of before zstd 1.0", 4, b"\x27\xb5\x2f\xfd" + bytes(16)
    yield "a frame without its magic", many, whole[4:]
    yield "nothing", many, b""
    yield "nothing, and nothing asked for", 0, b""
    yield "a window, for nothing asked for", 0, frame(0x04, window=0xFF)
    yield "a byte behind", many, whole + b"\0"


def test_hostile_frames_are_corrupt_and_cost_no_more_memory_than_the_block(tmp_path: Path) -> None:
    cases = {what: asked(nbytes, stored) for what, nbytes, stored in hostile()}
    # Where as much is asked for as is claimed, zstd asks for the memory, and gets none.
    allowed = {what: f"Corrupt{' for want of memory' if 'as was asked' in what else ''}" for what in cases}
    outcomes = sandbox.run("frame", cases, tmp_path)
    assert {what: told for what, told in outcomes.items() if told not in ("Corrupt", allowed[what])} == {}


def test_the_frames_would_be_read_if_they_were_what_they_say(tmp_path: Path) -> None:
    # That the hostile ones are refused means something only if the way they are made is right.
    zeros = frame(0xA4, size=struct.pack("<I", 1 << 20), blocks=bomb(1 << 20), checksum=checksum(bytes(1 << 20)))
    assert codec.Zstd(1).decode(zeros, 1 << 20) == bytes(1 << 20)
    assert sandbox.run("frame", {"x": asked(1 << 20, zeros)}, tmp_path) == {"x": sandbox.RETURNED}


def test_a_window_of_any_size_is_only_a_claim(tmp_path: Path) -> None:
    blocks = {"blocks": rle(256, last=True), "checksum": checksum(bytes(256))}
    cases = {f"{window:#x}": asked(256, frame(0x44, window=window, size=bytes(2), **blocks)) for window in (0, 0x60, 0xA8, 0xF8, 0xFF)}
    assert set(sandbox.run("frame", cases, tmp_path).values()) <= {sandbox.RETURNED, "Corrupt"}


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_damage_to_a_frame_is_corrupt_or_changes_nothing(data: st.DataObject) -> None:
    stored = bytearray(codec.Zstd(1).encode(BLOCK))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(stored)))
        stored[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    try:
        assert codec.Zstd(1).decode(bytes(stored), len(BLOCK)) == BLOCK
    except Corrupt:
        return


@settings(deadline=None, max_examples=150)
@given(stored=st.binary(max_size=60), nbytes=st.integers(0, 300), one=st.sampled_from([codec.Raw(), codec.Zstd(1)]))
def test_any_bytes_are_corrupt_or_as_many_bytes_as_were_asked_for(stored: bytes, nbytes: int, one: codec.Codec) -> None:
    for candidate in (stored, MAGIC + stored):
        try:
            assert len(one.decode(candidate, nbytes)) == nbytes
        except Corrupt:
            continue


def test_what_was_stored_cut_anywhere_is_corrupt(written: Written) -> None:
    shard = next(shard for shard in written.decoded.shards if shard.file)
    item, stored = shard.table.items[0], shard.stored[0]
    block = written.data[stored.offset : stored.offset + stored.lengths[0]]
    nbytes = (shard.table.items[1].at if len(shard.table.items) > 1 else shard.table.end) - item.at
    assert codec.block_hash(codec.Zstd(1).decode(block, nbytes)) == stored.hashes[:16]
    for length in range(len(block)):
        with pytest.raises(Corrupt):
            codec.Zstd(1).decode(block[:length], nbytes)


@settings(deadline=None, max_examples=150)
@given(
    at=st.sampled_from([*EDGES, -1]) | st.integers(-(1 << 70), 1 << 70),
    pkl_nbytes=st.sampled_from([0, 1, 140, 1 << 30, (1 << 30) + 1, -1]),
    nbytes=st.sampled_from([*EDGES, -1]) | st.integers(-(1 << 70), 1 << 70),
)
def test_a_container_of_any_size_is_placed_within_a_file_or_refused(at: int, pkl_nbytes: int, nbytes: int) -> None:
    try:
        raw_at, end = archive.layout(at, pkl_nbytes, nbytes)
    except InvalidRequest:
        return
    assert 0 <= at < raw_at <= raw_at + nbytes < end < 1 << 63
    if pkl_nbytes < 1000:
        before, after = archive.gaps(at, b"p" * pkl_nbytes, nbytes)
        assert (at + len(before), raw_at + nbytes + len(after)) == (raw_at, end)
