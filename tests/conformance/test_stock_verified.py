"""Checkpoints that stock DCP wrote, verified as far as they can be: damage is found, whole ones are whole, notes say the rest."""

from __future__ import annotations

import io
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId
from ckptd.verify import Progress, is_whole, verify
from ckptd_client import DaemonStorageWriter, wait
from daemons import DaemonProcess

STOCK = "written by stock DCP, which keeps no checksums but the CRC-32 of records"


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(300_000, generator=generator),
        "flat": torch.zeros(200_000),
        "half": torch.randn(40, generator=generator).to(torch.bfloat16),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False]),
        "note": {"step": 7},
    }


def save(directory: Path, *, zstd: bool = False, files: int = 1, values: dict[str, Any] | None = None) -> None:
    extensions = [ZStandard()] if zstd else None
    writer = FileSystemWriter(directory, thread_count=files, single_file_per_rank=files == 1, _extensions=extensions)
    dcp.save(values or state(), storage_writer=writer)


def last(root: Path, name: str = "step-1") -> tuple[list[str], Progress]:
    """All damage, and the last step."""
    ledger = Ledger(LocalStore(root))
    steps = list(verify(LocalStore(root), ledger, ledger.find(CheckpointId.parse(name))))
    return [text for step in steps for text in step.damage], steps[-1]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("zstd", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize("files", [1, 3])
def test_a_whole_one_is_read_to_its_last_byte(tmp_path: Path, zstd: bool, files: int) -> None:
    save(tmp_path / "step-1", zstd=zstd, files=files)
    damage, end = last(tmp_path)
    total = sum(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
    assert (damage, end.note, end.nbytes, end.total_nbytes) == ([], STOCK, total, total)
    ledger = Ledger(LocalStore(tmp_path))
    assert is_whole(LocalStore(tmp_path), ledger, ledger.find(CheckpointId.parse("step-1"))) == ()


@pytest.mark.parametrize("zstd", [False, True], ids=["plain", "zstd"])
def test_flipped_bits_of_data_are_found_and_the_item_named(tmp_path: Path, zstd: bool) -> None:
    """Every bit of a tensor's own bytes counts; few of the others in a zip mean nothing."""
    save(tmp_path / "step-1", zstd=zstd, values={"large": state()["large"]})
    (path,) = (tmp_path / "step-1").glob("*.distcp")
    choice = random.Random(6)
    nbytes = path.stat().st_size
    lead = 4096
    for at in [lead, nbytes - lead, *(choice.randrange(lead, nbytes - lead) for _ in range(40))]:
        bit = choice.randrange(8)
        flip(path, at, bit)
        damage, _ = last(tmp_path)
        assert [path.name in text and "'large' at (0,)" in text for text in damage] == [True], (at, bit)
        flip(path, at, bit)


@pytest.mark.parametrize("zstd", [False, True], ids=["plain", "zstd"])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda data: data[:-1], "is cut off"),
        (lambda _: b"", "is cut off"),
        (lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2), "is damaged"),
        (lambda data: bytes(len(data)), "is damaged"),
        (lambda data: data[1:] + data[:1], "is damaged"),
        (None, "is missing from the store"),
    ],
    ids=["cut", "emptied", "half zeros", "zeros", "shifted", "missing"],
)
def test_a_damaged_file_is_named(tmp_path: Path, zstd: bool, harm: Any, words: str) -> None:
    save(tmp_path / "step-1", zstd=zstd)
    (path,) = (tmp_path / "step-1").glob("*.distcp")
    if harm is None:
        path.unlink()
    else:
        path.write_bytes(harm(path.read_bytes()))
    damage, _ = last(tmp_path)
    assert damage
    assert all(f"step-1/{path.name}" in text for text in damage)
    assert any(words in text for text in damage)


def test_swapped_items_of_different_size_are_found(tmp_path: Path) -> None:
    save(tmp_path / "step-1", files=3)
    paths = sorted((tmp_path / "step-1").glob("*.distcp"), key=lambda path: path.stat().st_size)
    first, second = paths[-1].read_bytes(), paths[-2].read_bytes()
    paths[-1].write_bytes(second)
    paths[-2].write_bytes(first)
    damage, _ = last(tmp_path)
    assert all(any(path.name in text for text in damage) for path in paths[-2:])


def test_a_tensor_that_is_shorter_than_metadata_says_is_found(tmp_path: Path) -> None:
    """A whole container of another tensor, in the right place and of the right length."""
    save(tmp_path / "step-1", values={"t": torch.arange(1000)})
    (path,) = (tmp_path / "step-1").glob("*.distcp")
    torch.save(torch.arange(500), path)
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = path.stat().st_size
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(metadata))
    damage, _ = last(tmp_path)
    assert [text.endswith("is damaged: it holds 4000 bytes of a tensor of 8000") for text in damage] == [True]


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_metadata_that_cannot_be_read_is_damage(tmp_path: Path, keep: int) -> None:
    save(tmp_path / "step-1")
    path = tmp_path / "step-1" / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    damage, _ = last(tmp_path)
    assert [text.startswith("step-1/.metadata is damaged: ") for text in damage] == [True]


def test_records_without_a_checksum_are_counted_in_a_note(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "step-1", values={"t": torch.ones(10)})
        (path,) = (tmp_path / "step-1").glob("*.distcp")
        with zipfile.ZipFile(path) as zipped:
            records = len(zipped.infolist())
    finally:
        torch.serialization.set_crc32_options(before)
    damage, end = last(tmp_path)
    assert damage == []
    assert end.note == f"{STOCK}; records without a CRC-32, whose bytes could not be checked: {records}"


class OwnFormat(DefaultSavePlanner):
    """Writes objects as it likes, as planners may."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        return found if isinstance(found, torch.Tensor) else io.BytesIO(b"an object in a format of its own")


def test_objects_in_a_format_of_their_own_are_counted_in_a_note(tmp_path: Path) -> None:
    dcp.save({"note": "own", "t": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "step-1"), planner=OwnFormat())
    damage, end = last(tmp_path)
    assert damage == []
    assert end.note == f"{STOCK}; items that are not what torch.save writes today, whose bytes could not be checked: 1"


def test_our_own_without_its_manifest_is_read_like_stocks(tmp_path: Path) -> None:
    """What a copy without the dot directory is: whole, and without a checksum of the tensors' bytes."""
    with DaemonProcess(str(tmp_path / "store"), "--codec", "none") as daemon:
        dcp.save(state(), storage_writer=DaemonStorageWriter("step-1", address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
    (tmp_path / "copied" / "step-1").mkdir(parents=True)
    for path in (tmp_path / "store" / "step-1").glob("*.distcp"):
        shutil.copy(path, tmp_path / "copied" / "step-1")
    ours = pickle.loads((tmp_path / "store" / "step-1" / ".metadata").read_bytes())
    ours.storage_meta = None
    (tmp_path / "copied" / "step-1" / ".metadata").write_bytes(pickle.dumps(ours))
    damage, end = last(tmp_path / "copied")
    assert (damage, end.note) == ([], f"{STOCK}; records without a CRC-32, whose bytes could not be checked: 5")


def test_bytes_that_no_item_owns_are_a_note(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    (path,) = (tmp_path / "step-1").glob("*.distcp")
    path.write_bytes(path.read_bytes() + b"12345")
    damage, end = last(tmp_path)
    assert (damage, end.note) == ([], f"{STOCK}; bytes that belong to no item: 5")


def test_an_item_larger_than_what_is_kept_is_read_in_pieces(tmp_path: Path) -> None:
    """70 MiB behind zstd: more than one request, and more than is kept of what was decoded."""
    values = {"t": torch.randint(0, 3, (70 * 1024 * 1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(8))}
    for name, zstd in (("plain", False), ("zstd", True)):
        save(tmp_path / name, zstd=zstd, values=values)
        (path,) = (tmp_path / name).glob("*.distcp")
        assert last(tmp_path, name)[0] == []
        flip(path, path.stat().st_size // 3)
        assert ["'t' at (0,)" in text for text in last(tmp_path, name)[0]] == [True]
