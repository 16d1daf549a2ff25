"""What stock stored of an item, damaged: containers and streams of zstd frames are whole or Corrupt, and cost what they are."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import container, zstream
from ckptd.errors import Corrupt
from fuzz import sandbox
from fuzz.sandbox import exactly
from fuzz.test_frames import bomb, frame, rle
from fuzz.test_written import flips

END = struct.Struct("<IHHHHIIH")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")


def saved() -> bytes:
    stream = io.BytesIO()
    torch.save({"w": torch.arange(20), "b": torch.ones(3)}, stream)
    return stream.getvalue()


def whole(data: bytes) -> bool:
    """Whether a container is what it should be. Raises what is not Corrupt."""
    try:
        container.check(exactly(data), len(data))
        list(container.sizes(exactly(data), len(data)))
    except Corrupt:
        return False
    return True


def undone(data: bytes) -> bytes | None:
    """The content of a stream, None if it is Corrupt."""
    try:
        return b"".join(zstream.plain(exactly(data), 0, len(data)))
    except Corrupt:
        return None


def zipped(*records: tuple[bytes, bytes], **changes: int) -> bytes:
    """A zip with deflated records, and the last entry of its directory changed."""
    out, directory = b"", b""
    for number, (name, content) in enumerate(records):
        deflated = zlib.compressobj(1, zlib.DEFLATED, -15)
        body = deflated.compress(content) + deflated.flush()
        fields = {"crc": zlib.crc32(content), "stored": len(body), "nbytes": len(content), "at": len(out), "method": 8}
        if number == len(records) - 1:
            fields |= changes
        head = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 0x21, zlib.crc32(content), len(body), len(content), len(name), 0)
        sizes = (fields["crc"], fields["stored"], fields["nbytes"], len(name), 0)
        directory += CENTRAL.pack(0x02014B50, 20, 20, 0, fields["method"], 0, 0x21, *sizes, 0, 0, 0, 0, fields["at"]) + name
        out += head + name + body
    return out + directory + END.pack(0x06054B50, 0, 0, len(records), len(records), len(directory), len(out), 0)


def test_a_container_with_any_bit_flipped_is_corrupt_or_harmless() -> None:
    data = saved()
    assert whole(data)
    seen = [whole(damaged) for damaged in flips(data, step=5)]
    assert seen.count(False) > len(seen) // 2


def test_a_container_cut_anywhere_is_corrupt() -> None:
    data = saved()
    assert not any(whole(data[:length]) for length in range(len(data)))
    assert not any(whole(data[length:]) for length in range(1, len(data)))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_container_with_pieces_moved_and_replaced_is_corrupt_or_another(data: st.DataObject) -> None:
    damaged = bytearray(saved())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)) | st.integers(max(0, len(damaged) - 120), len(damaged)))
        start = data.draw(st.integers(0, len(damaged)))
        copied = bytes(damaged[start : start + data.draw(st.integers(0, 60))])
        edge = st.sampled_from(
            [b"\xff" * 2, b"\xff" * 4, b"\xff" * 8, b"\0" * 4, b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02"]
        )
        damaged[at : at + data.draw(st.integers(0, 8))] = data.draw(st.sampled_from([copied, b""]) | edge | st.binary(max_size=4))
    whole(bytes(damaged))


def test_hostile_containers_cost_what_they_are(tmp_path: Path) -> None:
    zeros = (b"archive/data/0", bytes(8 << 20))
    small = (b"archive/data.pkl", b"x" * 100)
    assert whole(zipped(small))
    many = zipped(*[(b"%d" % number, b"") for number in range(20_000)])
    end = many[-END.size :]
    cases = {
        "a bomb that says what it is": zipped(zeros),
        "a bomb that claims to be small": zipped(zeros, nbytes=100),
        "a record of four GiB": zipped(small, nbytes=0xFFFFFFFE),
        "a record beyond the end": zipped(small, at=0xFFFFFFF0),
        "a record that stores more than there is": zipped(small, stored=0xFFFFFFFE),
        "a record of an unknown method": zipped(small, method=99),
        "many records, of which the end says none": many[: -END.size] + END.pack(*[*END.unpack(end)[:4], 0, *END.unpack(end)[5:]]),
        "a directory of four GiB": many[: -END.size] + END.pack(*[*END.unpack(end)[:5], 0xFFFFFFFF, 0, 0]),
        "nothing": b"",
        "only an end": END.pack(0x06054B50, 0, 0, 65535, 65535, 0, 0, 0),
    }
    outcomes = sandbox.run("container", cases, tmp_path)
    assert outcomes == {**dict.fromkeys(cases, "Corrupt"), "a bomb that says what it is": sandbox.RETURNED}


def test_a_stream_with_any_bit_flipped_or_cut_is_corrupt_or_another() -> None:
    content = b"some bytes and some more of them" * 40
    options = zstandard.ZstdCompressor(write_checksum=True), zstandard.ZstdCompressor(write_content_size=False)
    data = b"".join(one.compress(content) for one in options)
    assert undone(data) == content * 2
    for damaged in flips(data):
        undone(damaged)
    for length in range(len(data)):
        assert undone(data[:length]) in (None, content, b"")


def test_hostile_streams_cost_what_they_are(tmp_path: Path) -> None:
    cases = {
        "a gigabyte of zeros": frame(0x00, window=0x60, blocks=bomb(1 << 29), checksum=b""),
        "zeros without an end": frame(0x00, window=0x60, blocks=rle(1 << 17, last=False) * 50_000, checksum=b""),
        "a size that is not there": frame(0xE0, size=struct.pack("<Q", 1 << 62), checksum=b""),
        "a window of terabytes": frame(0x00, window=0xF8, blocks=rle(100, last=True), checksum=b""),
        "a dictionary": frame(0x23, size=b"\x01\0\0\0\x64", blocks=rle(100, last=True), checksum=b""),
        "a skippable frame of four GiB": b"\x50\x2a\x4d\x18\xff\xff\xff\xff",
        "many empty frames": frame(0x20, size=b"\0", checksum=b"") * 50_000,
        "many skippable frames": b"\x5f\x2a\x4d\x18\0\0\0\0" * 50_000,
        "an empty block again and again": frame(0x00, window=0, blocks=b"\0\0\0" * 100_000 + b"\x01\0\0", checksum=b""),
    }
    outcomes = sandbox.run("stream", cases, tmp_path)
    assert {what: told for what, told in outcomes.items() if told not in (sandbox.RETURNED, "Corrupt")} == {}
    for what in ("a size that is not there", "a window of terabytes", "a dictionary", "a skippable frame of four GiB"):
        assert outcomes[what] == "Corrupt", what
