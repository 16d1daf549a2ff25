"""A tombstone says what it said or is Corrupt, and never names what no deletion may touch."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import manifest, tombstone
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.v1.manifest_pb2 import Manifest, Summary, Tombstone

WHOLE = Tombstone(
    id="run/step-7",
    save_id=f"{'1' * 24}-{'2' * 16}.manifest",
    deleted_us=1_700_000_000_000_000,
    files=["__0_0123456789abcdef.distcp", f".ckptd/{'1' * 24}-{'2' * 16}.manifest", ".ckptd/pin", "__0_0.distcp", "sub/dir/file ünï.bin"],
)
FORBIDDEN = [
    *("", "/", "a/", "/a", "a//b", "..", ".", "../step-8/.metadata", "a/../../b", "a/./b", "a\0b", "/etc/passwd"),
    *(".metadata", "b/.metadata", ".ckptd", ".ckptd/a/b", "b/.ckptd/x", "b/.ckptd"),
    "\ud800.distcp",
]


def framed(found: Tombstone) -> bytes:
    """What `encode` writes, without its checks."""
    whole = b"ckptd/x\n" + found.SerializeToString(deterministic=True)
    return whole + xxhash.xxh3_128_digest(whole)


def test_it_gives_back_what_it_was_given() -> None:
    assert tombstone.decode(tombstone.encode(WHOLE)) == WHOLE
    assert tombstone.encode(WHOLE) == framed(WHOLE)
    assert tombstone.decode(tombstone.encode(Tombstone())) == Tombstone()


def test_every_flipped_bit_cut_and_extra_byte_is_damage() -> None:
    whole = tombstone.encode(WHOLE)
    for at in range(len(whole)):
        for bit in (1, 128):
            with pytest.raises(Corrupt):
                tombstone.decode(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        with pytest.raises(Corrupt):
            tombstone.decode(whole[:at])
    for damaged in (whole + b"\0", b"\0" + whole, whole + whole):
        with pytest.raises(Corrupt):
            tombstone.decode(damaged)


def test_other_files_of_ours_are_no_tombstones() -> None:
    with pytest.raises(Corrupt):
        tombstone.decode(manifest.encode(Manifest(summary=Summary(id="a"))))


def test_what_is_framed_but_no_message_is_damage() -> None:
    whole = b"ckptd/x\n" + b"\xff" * 20
    with pytest.raises(Corrupt, match="parsed"):
        tombstone.decode(whole + xxhash.xxh3_128_digest(whole))


@pytest.mark.parametrize("file", FORBIDDEN, ids=ascii)
def test_names_that_no_deletion_may_touch_are_refused_on_both_sides(file: str) -> None:
    assert not tombstone.may_list(file)
    if "\ud800" in file:  # cannot even be put into a message
        return
    found = Tombstone(id="a", files=["__0_0.distcp", file])
    with pytest.raises(InvalidRequest):
        tombstone.encode(found)
    with pytest.raises(Corrupt):
        tombstone.decode(framed(found))


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("./a\0-") | st.characters(codec="utf-8"), max_size=12))
def test_a_name_that_may_be_listed_stays_inside_and_is_no_metadata(file: str) -> None:
    if tombstone.may_list(file):
        parts = file.split("/")
        assert "" not in parts
        assert not {".", ".."} & {*parts}
        assert parts[-1] != ".metadata"
        assert tombstone.decode(tombstone.encode(Tombstone(files=[file]))).files == [file]
    else:
        with pytest.raises(InvalidRequest):
            tombstone.encode(Tombstone(files=[file]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_damage(data: bytes) -> None:
    for whole in (data, b"ckptd/x\n" + data):
        with pytest.raises(Corrupt):
            tombstone.decode(whole)


def test_names_sort_by_time_are_never_the_same_and_tell_the_kinds_apart() -> None:
    early, late = tombstone.name(9), tombstone.name(16)
    assert early < late
    assert tombstone.name(9) != early
    assert early.startswith(f"{9:016x}-")
    debris = tombstone.debris_name(9)
    assert [tombstone.is_tombstone(name) for name in (early, debris, "pin", f"x{early}", f"{early}.tmp")] == [True, *[False] * 4]
    assert [tombstone.is_list(name) for name in (early, debris, "pin", f"x{early}", f"{debris}.tmp")] == [True, True, *[False] * 3]
