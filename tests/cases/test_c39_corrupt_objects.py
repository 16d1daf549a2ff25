"""C39: a short, longer, swapped, lost or flipped object is never data: load and `verify` name it, and going back has to be asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch.distributed.checkpoint.api import CheckpointException

from ckptd import codec
from ckptd.errors import Corrupt
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess

NUMEL = 50_000


@dataclass
class Daemons:
    """One that saves; and one that has only the store, as after a node was replaced."""

    store: Path
    saving: DaemonProcess
    fresh: DaemonProcess


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store)) as saving, DaemonProcess(str(store), memory="64MiB") as fresh:
        yield Daemons(store, saving, fresh)


def save(daemons: Daemons, id: str, step: int) -> Path:
    """A checkpoint of one shard; returns where that lies."""
    generator = torch.Generator().manual_seed(step)
    state = {"t": torch.rand(NUMEL, generator=generator), "step": torch.tensor(step)}
    dcp.save(state, storage_writer=DaemonStorageWriter(id, address=daemons.saving.address))
    wait(id, address=daemons.saving.address, timeout=60)
    (shard,) = (daemons.store / id).glob("*.distcp")
    return shard


def load(daemons: Daemons, id: str, *, fallback: bool = False) -> int:
    """The step that is loaded; its values are looked at."""
    state = {"t": torch.zeros(NUMEL), "step": torch.tensor(-1)}
    dcp.load(state, checkpoint_id=id, storage_reader=DaemonStorageReader(address=daemons.fresh.address, fallback=fallback))
    step = int(state["step"])
    assert torch.equal(state["t"], torch.rand(NUMEL, generator=torch.Generator().manual_seed(step)))
    return step


def verified(daemons: Daemons, *arguments: str) -> tuple[int, dict[str, list[str]]]:
    """Exit status of `ckptd verify`, and the damage by checkpoint."""
    done = daemons.fresh.cli("verify", *arguments, "--json")
    assert done.stderr == ""
    return done.returncode, {one["id"]: one["damage"] for one in json.loads(done.stdout)["checkpoints"]}


def flip(path: Path, _: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    return path


def cut_by_one(path: Path, _: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1])
    return path


def append(path: Path, _: Path) -> Path:
    path.write_bytes(path.read_bytes() + b"\0")
    return path


def swap(path: Path, other: Path) -> Path:
    """With the shard of the checkpoint before; both are damaged then."""
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)
    return path


def empty(path: Path, _: Path) -> Path:
    path.write_bytes(b"")
    return path


def delete(path: Path, _: Path) -> Path:
    path.unlink()
    return path


def flip_in_metadata(path: Path, other: Path) -> Path:
    return flip(path.with_name(".metadata"), other)


def flip_in_manifest(path: Path, other: Path) -> Path:
    (manifest,) = (path.parent / ".ckptd").glob("*.manifest")
    return flip(manifest, other)


HARMS: list[Callable[[Path, Path], Path]] = [flip, cut_by_one, append, swap, empty, delete, flip_in_metadata, flip_in_manifest]


@pytest.mark.parametrize("harm", HARMS, ids=[harm.__name__ for harm in HARMS])
def test_it_is_named_by_load_and_verify_and_passed_over_only_if_asked(daemons: Daemons, harm: Callable[[Path, Path], Path]) -> None:
    run = harm.__name__.replace("_", "-")
    save(daemons, f"{run}/step-1", 1)
    before = save(daemons, f"{run}/step-2", 2)
    shard = save(daemons, f"{run}/step-3", 3)
    assert verified(daemons, "--run", run) == (0, {f"{run}/step-1": [], f"{run}/step-2": [], f"{run}/step-3": []})
    harmed = str(harm(shard, before).relative_to(daemons.store))

    for id in (f"{run}/step-3", f"{run}/latest"):
        with pytest.raises(CheckpointException) as caught:
            load(daemons, id)
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, Corrupt)
        assert harmed in str(error)

    status, damage = verified(daemons, "--run", run)
    assert status == 1
    assert any(harmed in text for text in damage[f"{run}/step-3"])
    assert damage[f"{run}/step-1"] == []

    with pytest.warns(UserWarning, match="a newer checkpoint is damaged: ") as warned:
        assert load(daemons, f"{run}/latest", fallback=True) == (1 if harm is swap else 2)
    assert any(f"damaged: {run}/step-3: " in str(one.message) and harmed in str(one.message) for one in warned)


def test_a_missing_checksum_is_a_failure_of_its_own() -> None:
    """A frame that zstd would accept, written without one."""
    block = bytes(range(256)) * 16
    whole = codec.Zstd(1).encode(block)
    bare = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(block)
    assert codec.Zstd(1).decode(whole, len(block)) == block
    assert zstandard.ZstdDecompressor().decompress(bare) == block
    with pytest.raises(Corrupt, match="no checksum"):
        codec.Zstd(1).decode(bare, len(block))
