"""Codecs give back what they took, or say that it is damaged; they never believe a header."""

from __future__ import annotations

import random
import threading

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import codec
from ckptd.errors import Corrupt, InvalidRequest

CODECS = [codec.Raw(), codec.Zstd(1), codec.Zstd(3), codec.Zstd(22)]
BLOCK = bytes(random.Random(1).choices(range(8), k=3000))


@pytest.mark.parametrize("one", CODECS, ids=lambda one: one.name)
@settings(deadline=None)
@given(block=st.binary(max_size=2000))
def test_what_goes_in_comes_out(one: codec.Codec, block: bytes) -> None:
    for given_as in (block, bytearray(block), memoryview(block)):
        stored = one.encode(given_as)
        for held_as in (bytes(stored), bytearray(stored), memoryview(stored)):
            assert one.decode(held_as, len(block)) == block


@pytest.mark.parametrize(
    ("text", "name", "descriptors"),
    [
        ("none", "none", ()),
        ("zstd", "zstd:1", ("stream.zstd/1",)),
        ("zstd:1", "zstd:1", ("stream.zstd/1",)),
        ("zstd:10", "zstd:10", ("stream.zstd/1",)),
        ("zstd:22", "zstd:22", ("stream.zstd/1",)),
    ],
)
def test_spellings_are_read(text: str, name: str, descriptors: tuple[str, ...]) -> None:
    parsed = codec.parse(text)
    assert (parsed.name, parsed.descriptors) == (name, descriptors)
    assert codec.parse(parsed.name) == parsed


@pytest.mark.parametrize(
    "text", [*("zstd:" + end for end in ("", "0", "23", "-1", "01", "1.5", " 1", "1 ", "1\n", "\u0661")), "", "ZSTD", "gzip", "none:1"]
)
def test_other_spellings_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidRequest, match="use none, zstd, or zstd:LEVEL with a level from 1 to 22"):
        codec.parse(text)


def test_a_level_that_zstd_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="1 to 22"):
        codec.Zstd(23)


@pytest.mark.parametrize("one", CODECS, ids=lambda one: one.name)
@pytest.mark.parametrize("wrong", [0, 1, len(BLOCK) - 1, len(BLOCK) + 1, 1 << 40])
def test_another_length_than_was_encoded_is_corrupt(one: codec.Codec, wrong: int) -> None:
    with pytest.raises(Corrupt):
        one.decode(one.encode(BLOCK), wrong)


@pytest.mark.parametrize("block", [BLOCK[:100], b"", random.Random(2).randbytes(100)], ids=["text", "empty", "noise"])
def test_no_flip_changes_content_unnoticed(block: bytes) -> None:
    # A frame has a few bits that mean nothing: content is what counts.
    one = codec.Zstd(1)
    stored = one.encode(block)
    noticed = 0
    for at in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[at] ^= 1 << bit
            try:
                assert one.decode(damaged, len(block)) == block
            except Corrupt:
                noticed += 1
    assert noticed > 0.95 * 8 * len(stored)


@pytest.mark.parametrize("block", [BLOCK[:100], b"", random.Random(2).randbytes(100)], ids=["text", "empty", "noise"])
def test_every_truncation_and_addition_is_corrupt(block: bytes) -> None:
    one = codec.Zstd(1)
    stored = one.encode(block)
    for length in range(len(stored)):
        with pytest.raises(Corrupt):
            one.decode(stored[:length], len(block))
    for extra in (b"\0", one.encode(b""), stored, b"\x50\x2a\x4d\x18\x01\0\0\0x"):
        with pytest.raises(Corrupt):
            one.decode(stored + extra, len(block))


def test_two_frames_that_together_have_the_right_length_are_corrupt() -> None:
    one = codec.Zstd(1)
    with pytest.raises(Corrupt):
        one.decode(one.encode(BLOCK[:1000]) + one.encode(BLOCK[1000:]), len(BLOCK))


def test_a_frame_before_the_block_is_corrupt() -> None:
    one = codec.Zstd(1)
    for before in (one.encode(b""), b"\x50\x2a\x4d\x18\x01\0\0\0x"):
        with pytest.raises(Corrupt):
            one.decode(before + one.encode(BLOCK), len(BLOCK))


def test_a_skippable_frame_of_the_right_length_is_no_block() -> None:
    with pytest.raises(Corrupt):
        codec.Zstd(1).decode(b"\x50\x2a\x4d\x18\x04\0\0\0abcd", 4)


def test_a_frame_without_checksum_or_size_is_corrupt() -> None:
    for options in ({"write_checksum": False}, {"write_checksum": True, "write_content_size": False}):
        stored = zstandard.ZstdCompressor(level=1, **options).compress(BLOCK)
        with pytest.raises(Corrupt):
            codec.Zstd(1).decode(stored, len(BLOCK))


def test_content_beyond_the_claimed_size_is_corrupt() -> None:
    # A bomb: 64 MiB of zeros in one frame whose header is rewritten to claim 1,000,000 bytes.
    stored = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(bytes(64 << 20))
    assert zstandard.get_frame_parameters(stored).content_size == 64 << 20
    size = (64 << 20).to_bytes(4, "little")
    bomb = stored.replace(size, (1_000_000).to_bytes(4, "little"), 1)
    assert zstandard.get_frame_parameters(bomb).content_size == 1_000_000
    with pytest.raises(Corrupt):
        codec.Zstd(1).decode(bomb, 1_000_000)


def test_a_claim_of_terabytes_is_corrupt_even_if_they_are_asked_for() -> None:
    header = b"\x28\xb5\x2f\xfd" + b"\xe4" + (1 << 50).to_bytes(8, "little")
    with pytest.raises(Corrupt):
        codec.Zstd(1).decode(header + b"\x01\0\0" + b"\0" * 4, 1 << 50)


def test_threads_share_a_codec() -> None:
    one, failures = codec.Zstd(1), []

    def work(seed: int) -> None:
        block = bytes(random.Random(seed).choices(range(seed + 2), k=50_000))
        failures.extend(seed for _ in range(30) if one.decode(one.encode(block), len(block)) != block)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_raw_does_not_copy_on_the_way_in() -> None:
    block = bytearray(BLOCK)
    stored = codec.Raw().encode(block)
    block[0] = 99
    assert stored[0] == 99


def test_a_hash_is_the_canonical_xxh3_128() -> None:
    assert codec.block_hash(memoryview(BLOCK)) == xxhash.xxh3_128(BLOCK).digest()
    assert codec.block_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert len(codec.block_hash(BLOCK)) == codec.HASH_NBYTES
