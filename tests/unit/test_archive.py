"""The container around raw bytes: where it puts them, and that stock readers accept it."""

from __future__ import annotations

import io
import secrets
import shutil
import struct
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptd import archive
from ckptd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30


def pkl_of(nbytes: int) -> bytes:
    """What torch.save says about a uint8 tensor of `nbytes` elements."""
    out = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.uint8), out)
    with zipfile.ZipFile(out) as stock:
        pkl = stock.read("archive/data.pkl")
    # numel of the storage, then offset 0, then the size: all BININT1, made LONG1 here.
    wide = b"\x8a\x08" + struct.pack("<q", nbytes)
    assert pkl.count(b"K\x01") == 3
    return pkl.replace(b"K\x01", wide, 2)


@pytest.fixture
def shm() -> Iterator[Path]:
    directory = Path("/dev/shm") / f"ckptd-test-{secrets.token_hex(8)}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@settings(deadline=None)
@given(at=st.integers(0, 1 << 50), pkl=st.binary(max_size=300), nbytes=st.integers(0, 1 << 45))
@example(at=0, pkl=b"", nbytes=0)
@example(at=(1 << 40) + 1, pkl=b"x" * 150, nbytes=(1 << 32) - 1)
def test_layout_and_gaps_agree(at: int, pkl: bytes, nbytes: int) -> None:
    raw_at, end = archive.layout(at, len(pkl), nbytes)
    before, after = archive.gaps(at, pkl, nbytes)
    assert raw_at == at + len(before)
    assert end == raw_at + nbytes + len(after)
    assert raw_at % archive.ALIGNMENT == 0


@pytest.mark.parametrize("distance", [-300, -200, -150, -128, -64, -1, 0, 1, 64, 300])
def test_layout_and_gaps_agree_around_the_zip64_limit(distance: int) -> None:
    nbytes = (1 << 32) + distance
    for at in range(64):
        before, after = archive.gaps(at, b"p" * 140, nbytes)
        assert (at + len(before), at + len(before) + nbytes + len(after)) == archive.layout(at, 140, nbytes)


@settings(deadline=None)
@given(at=st.integers(0, 1 << 40), pkl=st.binary(min_size=1, max_size=300), raw=st.binary(max_size=300))
def test_a_container_is_a_zip_with_stored_records_at_offsets_of_its_own(at: int, pkl: bytes, raw: bytes) -> None:
    before, after = archive.gaps(at, pkl, len(raw))
    with zipfile.ZipFile(io.BytesIO(before + raw + after)) as container:
        assert container.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
        assert container.read("archive/data.pkl") == pkl
        assert container.read("archive/version") == b"3\n"
        data = container.getinfo("archive/data/0")
        assert (data.file_size, data.compress_size, data.compress_type, data.CRC) == (len(raw), len(raw), zipfile.ZIP_STORED, 0)


@pytest.mark.parametrize("at", [0, 1, 63, 64, 4097, 5 * GIB + 3])
@pytest.mark.parametrize("nbytes", [0, 1, 64, 4096, 300_001])
def test_stock_loads_a_container_from_any_place_in_a_shard(at: int, nbytes: int) -> None:
    raw = bytes(range(256)) * (nbytes // 256 + 1)
    before, after = archive.gaps(at, pkl_of(nbytes), nbytes)
    loaded = torch.load(io.BytesIO(before + raw[:nbytes] + after), weights_only=True, map_location="cpu", mmap=False)
    assert loaded.numpy().tobytes() == raw[:nbytes]


def test_containers_one_after_another_each_load_from_their_slice() -> None:
    shard, spans = bytearray(), []
    for nbytes in (5, 0, 1000, 77):
        at = len(shard)
        before, after = archive.gaps(at, pkl_of(nbytes), nbytes)
        shard += before + bytes([nbytes % 256]) * nbytes + after
        spans.append((at, archive.layout(at, len(pkl_of(nbytes)), nbytes)[1], nbytes))
        assert len(shard) == spans[-1][1]
    for at, end, nbytes in spans:
        loaded = torch.load(io.BytesIO(shard[at:end]), weights_only=True)
        assert loaded.tolist() == [nbytes % 256] * nbytes


def test_the_same_container_at_another_place_differs_only_in_padding() -> None:
    first, second = archive.gaps(0, pkl_of(10), 10), archive.gaps(64 * 1001, pkl_of(10), 10)
    assert first == second


@pytest.mark.parametrize(("at", "pkl_nbytes", "nbytes"), [(-1, 1, 1), (0, -1, 1), (0, 1, -1), (0, GIB + 1, 1)])
def test_impossible_sizes_are_refused(at: int, pkl_nbytes: int, nbytes: int) -> None:
    with pytest.raises(InvalidRequest, match="no container has"):
        archive.layout(at, pkl_nbytes, nbytes)


def sparse_container(path: Path, nbytes: int) -> None:
    """A container whose raw bytes are a hole but for the last eight."""
    pkl = pkl_of(nbytes)
    before, after = archive.gaps(0, pkl, nbytes)
    with path.open("wb") as file:
        file.write(before)
        file.seek(len(before) + nbytes - 8)
        file.write(b"the end.")
        file.write(after)
    assert path.stat().st_size == archive.layout(0, len(pkl), nbytes)[1]


# Sizes on both sides of every 32-bit limit: of the record, and of where the directory starts.
LARGE = [4 * GIB + distance for distance in (-600, -420, -300, -1, 0, 1, 4096)]


@pytest.mark.parametrize("nbytes", LARGE)
def test_stock_maps_a_container_around_4_gib(shm: Path, nbytes: int) -> None:
    path = shm / "container"
    sparse_container(path, nbytes)
    loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    assert loaded.shape == (nbytes,)
    assert bytes(loaded[-8:].tolist()) == b"the end."
    with zipfile.ZipFile(path) as container:
        assert container.getinfo("archive/data/0").file_size == nbytes


@pytest.mark.slow
def test_stock_reads_a_container_past_4_gib_through_a_file_object(shm: Path) -> None:
    path = shm / "container"
    sparse_container(path, 4 * GIB + 5)
    with path.open("rb") as file:
        loaded = torch.load(file, weights_only=True, map_location="cpu", mmap=False)
    assert bytes(loaded[-8:].tolist()) == b"the end."
    assert path.stat().st_blocks * 512 < GIB
