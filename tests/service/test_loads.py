"""Loads: each byte leaves the store once, only what is needed is read, and damage is never returned as data."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import on_tmpfs_at_once

NUMEL = 3 * 1024 * 1024


def state() -> dict[str, Any]:
    """Random values, so that what is stored is about as large as what is saved: 4 x 12 MiB."""
    generator = torch.Generator().manual_seed(3)
    return {f"t{number}": torch.randn(NUMEL, generator=generator) for number in range(4)}


def blank() -> dict[str, Any]:
    return {key: torch.zeros(NUMEL) for key in state()}


def save(store: Path, *arguments: str) -> None:
    """A checkpoint that is only in the store."""
    with DaemonProcess(str(store), *arguments) as daemon:
        dcp.save(state(), checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)


def load(daemon: DaemonProcess, into: dict[str, Any]) -> dict[str, Any]:
    dcp.load(into, checkpoint_id="step-1", storage_reader=DaemonStorageReader(address=daemon.address))
    return into


def bytes_from(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = json.loads(daemon.cli("status", "--json").stdout)["bytes_from"]
    return found


def equal(found: dict[str, Any]) -> bool:
    return all(torch.equal(found[key], tensor) for key, tensor in state().items())


def test_readers_at_the_same_time_share_one_read_of_the_store(tmp_path: Path) -> None:
    save(tmp_path / "store")
    stored = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.distcp"))
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        found = [blank() for _ in range(4)]
        readers = [threading.Thread(target=load, args=(daemon, into)) for into in found]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert all(equal(into) for into in found)
        assert bytes_from(daemon)["store"] <= 1.05 * stored
        assert bytes_from(daemon)["memory"] > 0


def test_what_memory_holds_is_not_read_from_the_store(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        dcp.save(state(), checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
        assert equal(load(daemon, blank()))
        assert bytes_from(daemon) == {"memory": 4 * NUMEL * 4, "peer": 0, "store": 0}


def test_a_part_of_the_state_reads_only_its_blocks(tmp_path: Path) -> None:
    save(tmp_path / "store")
    stored = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.distcp"))
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        assert torch.equal(load(daemon, {"t2": torch.zeros(NUMEL)})["t2"], state()["t2"])
        assert bytes_from(daemon)["store"] < stored / 3


@pytest.mark.parametrize("codec", ["zstd:1", "none"])
def test_a_checkpoint_larger_than_the_memory_streams_through(tmp_path: Path, codec: str) -> None:
    save(tmp_path / "store", "--codec", codec)
    with DaemonProcess(str(tmp_path / "store"), memory="24MiB") as daemon:
        found = [blank() for _ in range(2)]
        readers = [threading.Thread(target=load, args=(daemon, into)) for into in found]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert all(equal(into) for into in found)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("pattern", ["*.distcp", "*.manifest", ".metadata"])
@pytest.mark.parametrize("damage", [flip, truncate, empty, remove])
def test_damage_is_an_error_that_names_the_object(tmp_path: Path, pattern: str, damage: Callable[[Path], None]) -> None:
    save(tmp_path / "store")
    (path,) = (tmp_path / "store").rglob(pattern)
    damage(path)
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        into = blank()
        with pytest.raises(CheckpointException, match=r"step-1"):
            load(daemon, into)
        assert daemon.cli("list").returncode == 0
        if pattern == "*.manifest":
            shown = daemon.cli("show", "step-1")
            assert shown.returncode == 1
            assert "step-1" in shown.stderr
        # What is damaged is not touched: the operator may still want it.
        assert path.exists() == (damage is not remove)


@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_two_data_files_in_each_others_place_are_found(tmp_path: Path, codec: str) -> None:
    """Uncompressed they have the same size and layout: only the hashes in the manifest tell them apart."""
    with DaemonProcess(str(tmp_path / "store"), "--codec", codec) as daemon:
        for step in (1, 2):
            dcp.save(
                {"t": torch.full((NUMEL,), float(step))},
                checkpoint_id=f"step-{step}",
                storage_writer=DaemonStorageWriter(address=daemon.address),
            )
            wait(f"step-{step}", address=daemon.address, timeout=60)
    first, second = ((tmp_path / "store" / f"step-{step}").glob("*.distcp") for step in (1, 2))
    one, two = next(first), next(second)
    shutil.move(one, tmp_path / "aside")
    shutil.move(two, one)
    shutil.move(tmp_path / "aside", two)
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        for step in (1, 2):
            with pytest.raises(CheckpointException, match="distcp"):
                dcp.load(
                    {"t": torch.zeros(NUMEL)}, checkpoint_id=f"step-{step}", storage_reader=DaemonStorageReader(address=daemon.address)
                )


def test_readers_and_a_save_share_a_memory_that_is_too_small_for_all(tmp_path: Path) -> None:
    save(tmp_path / "store")
    with DaemonProcess(str(tmp_path / "store"), memory="40MiB") as daemon:
        found = [blank() for _ in range(6)]
        failures: list[BaseException] = []

        def run(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
            try:
                call(*arguments, **options)
            except BaseException as exc:  # noqa: BLE001 - looked at below
                failures.append(exc)

        threads = [threading.Thread(target=run, args=(load, daemon, into)) for into in found]
        for number in range(4):
            writer = DaemonStorageWriter(f"other/step-{number}", address=daemon.address)
            threads.append(
                threading.Thread(target=run, args=(dcp.save, {"t": torch.ones(4 * 1024 * 1024)}), kwargs={"storage_writer": writer})
            )
        for thread in threads:
            thread.start()
        used = 0
        while any(thread.is_alive() for thread in threads):
            status = json.loads(daemon.cli("status", "--json").stdout)
            used = max(used, status["used"])
            assert on_tmpfs_at_once(daemon.shm_dir) <= status["memory"]
        assert failures == []
        assert used <= 40 * 1024 * 1024
        assert all(equal(into) for into in found)


def test_many_small_items_stream_through_a_small_memory(tmp_path: Path) -> None:
    values = {f"t{number}": torch.full((1250,), float(number)) for number in range(6000)}
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        dcp.save(values, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
    with DaemonProcess(str(tmp_path / "store"), memory="16MiB") as daemon:
        found = load(daemon, {key: torch.zeros(1250) for key in values})
        assert all(torch.equal(found[key], tensor) for key, tensor in values.items())


@pytest.mark.filterwarnings("ignore:ckptd:UserWarning")
def test_what_was_accepted_can_be_loaded_from_a_memory_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SAVE_TIMEOUT", "3")
    control = tmp_path / "control"
    control.write_text('{"raise": "ENOSPC"}')
    store = f"faulty://{tmp_path / 'store'}"
    with DaemonProcess(store, program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="32MiB") as daemon:
        accepted = []
        for number in range(100):
            writer = DaemonStorageWriter(f"step-{number}", address=daemon.address)
            try:
                dcp.save({"t": torch.full((500_000,), float(number))}, storage_writer=writer)
            except CheckpointException:
                break
            accepted.append(number)
        assert len(accepted) < 100
        for number in accepted:
            found = {"t": torch.zeros(500_000)}
            dcp.load(found, checkpoint_id=f"step-{number}", storage_reader=DaemonStorageReader(address=daemon.address))
            assert bool((found["t"] == number).all())


def test_ranks_that_read_different_parts_of_one_large_shard_stream_through(tmp_path: Path) -> None:
    values = {f"t{number}": torch.full((NUMEL,), float(number)) for number in range(8)}  # 96 MiB
    with DaemonProcess(str(tmp_path / "store"), "--codec", "none") as daemon:
        dcp.save(values, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
    with DaemonProcess(str(tmp_path / "store"), memory="32MiB") as daemon:
        found = [{key: torch.zeros(NUMEL)} for key in values]
        readers = [threading.Thread(target=load, args=(daemon, into)) for into in found]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert all(torch.equal(into[key], values[key]) for into in found for key in into)


def test_a_flipped_bit_in_an_uncompressed_file_is_found(tmp_path: Path) -> None:
    save(tmp_path / "store", "--codec", "none")
    (path,) = (tmp_path / "store").rglob("*.distcp")
    flip(path)
    with DaemonProcess(str(tmp_path / "store")) as daemon, pytest.raises(CheckpointException, match="checksum does not match"):
        load(daemon, blank())
