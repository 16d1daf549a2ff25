"""A store that fails or hangs stops neither saves nor loads of what memory holds; and what is promised stays promised."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptd.errors import CkptdError, Unavailable, WrongPhase
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess

OUTAGES = [{"list_raises": "EIO", "raise": "EIO"}, {"list_hangs": True}]


class Faulty:
    """A daemon on a store that misbehaves when it is told to."""

    def __init__(self, home: Path) -> None:
        self.control = home / "control"
        self.store = home / "store"
        self.daemon = DaemonProcess(f"faulty://{self.store}", program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))

    def save(self, id: str, value: float, **options: Any) -> None:
        writer = DaemonStorageWriter(address=self.daemon.address, **options)
        dcp.save({"t": torch.full((1000,), value)}, checkpoint_id=id, storage_writer=writer)

    def load(self, id: str) -> float:
        found = {"t": torch.zeros(1000)}
        dcp.load(found, checkpoint_id=id, storage_reader=DaemonStorageReader(address=self.daemon.address))
        return float(found["t"][0])

    def wait(self, id: str) -> None:
        wait(id, address=self.daemon.address, timeout=60)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    made = Faulty(tmp_path)
    with made.daemon:
        yield made


@pytest.mark.parametrize("outage", OUTAGES, ids=["fails", "hangs"])
def test_saves_are_accepted_and_loaded_while_the_store_is_away_and_durable_when_it_is_back(faulty: Faulty, outage: dict[str, Any]) -> None:
    faulty.tell(**outage)
    faulty.save("run/step-1", 1.0)
    assert faulty.load("run/step-1") == 1.0
    faulty.tell()
    faulty.wait("run/step-1")
    assert faulty.load("run/latest") == 1.0


@pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")
@pytest.mark.parametrize("outage", OUTAGES, ids=["fails", "hangs"])
def test_saving_twice_while_the_store_is_away_replaces_nothing_that_was_durable_before(faulty: Faulty, outage: dict[str, Any]) -> None:
    faulty.save("run/step-1", 1.0)
    faulty.wait("run/step-1")
    faulty.daemon.terminate()  # from here on the store alone knows of it
    faulty.tell(**outage)
    faulty.daemon.start()
    faulty.save("run/step-1", 2.0)
    faulty.save("run/step-1", 3.0)
    faulty.tell()
    with pytest.raises(CkptdError, match="durable already"):
        faulty.wait("run/step-1")
    found = {"t": torch.zeros(1000)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(faulty.store / "run" / "step-1"))
    assert float(found["t"][0]) == 1.0


def test_a_directory_that_is_moved_away_is_waited_for_and_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with DaemonProcess(str(store)) as daemon:

        def save(id: str) -> None:
            dcp.save({"t": torch.ones(1000)}, checkpoint_id=id, storage_writer=DaemonStorageWriter(address=daemon.address))

        save("run/step-1")
        wait("run/step-1", address=daemon.address, timeout=60)
        store.rename(away)
        save("other/step-1")
        for asked in ("run/latest", "run/step-2"):
            shown = daemon.cli("show", asked)
            assert shown.returncode == 3
            assert "has been there and is not any more" in shown.stderr
        assert not store.exists()
        away.rename(store)
        wait("other/step-1", address=daemon.address, timeout=60)
        assert daemon.cli("show", "run/latest").returncode == 0


def test_the_newest_checkpoint_is_not_guessed_while_the_store_is_away(faulty: Faulty) -> None:
    faulty.tell(list_raises="EIO", **{"raise": "EIO"})
    faulty.save("run/step-1", 1.0)
    with pytest.raises(CheckpointException, match=r"run/step-1: load it by its id") as caught:
        faulty.load("run/latest")
    assert all(isinstance(why[0], Unavailable) for why in caught.value.failures.values())


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint step-1:UserWarning")
def test_an_id_that_turns_out_to_be_durable_is_not_replaced_without_leave(faulty: Faulty) -> None:
    faulty.save("step-1", 1.0)
    faulty.wait("step-1")
    faulty.daemon.kill()
    shutil.rmtree(faulty.daemon.shm_dir)  # nothing but the store knows of it now
    faulty.daemon.start()
    faulty.tell(list_hangs=True)
    faulty.save("step-1", 2.0)
    faulty.tell()
    with pytest.raises(WrongPhase, match="overwrite=True"):
        faulty.wait("step-1")
    faulty.save("step-1", 3.0, overwrite=True)
    faulty.wait("step-1")
    assert faulty.load("step-1") == 3.0


def test_wait_does_not_take_an_older_checkpoint_for_the_save_that_was_lost(faulty: Faulty) -> None:
    faulty.save("step-1", 1.0)
    faulty.wait("step-1")
    faulty.tell(hold_after=3)
    faulty.save("step-1", 2.0, overwrite=True)
    faulty.daemon.kill()
    shutil.rmtree(faulty.daemon.shm_dir)  # as a reboot does
    faulty.tell()
    faulty.daemon.start()
    with pytest.raises(WrongPhase, match="is gone"):
        faulty.wait("step-1")
    assert faulty.load("step-1") == 1.0


def test_a_save_for_memory_only_does_not_stop_one_that_is_to_become_durable(faulty: Faulty) -> None:
    faulty.tell(hold_after=0)
    faulty.save("step-1", 1.0)
    with pytest.raises(CheckpointException, match="on its way to the store"):
        faulty.save("step-1", 2.0, durable=False)
    faulty.tell()
    faulty.daemon.until("step-1", "durable")
    assert faulty.load("step-1") == 1.0


def test_a_removed_segment_of_a_durable_checkpoint_is_read_from_the_store(faulty: Faulty) -> None:
    faulty.save("step-1", 1.0)
    faulty.wait("step-1")
    for path in faulty.daemon.shm_dir.glob("*.sealed"):
        path.unlink()
    assert faulty.load("step-1") == 1.0
    faulty.tell(hold_after=3)
    faulty.save("step-2", 2.0)
    for path in faulty.daemon.shm_dir.glob("*.sealed"):
        path.unlink()
    with pytest.raises(CheckpointException, match="step-2"):
        faulty.load("step-2")
    with pytest.raises(WrongPhase, match="removed from the shm-dir"):
        faulty.wait("step-2")
    with pytest.warns(UserWarning, match=r"step-1 is loaded as latest, .* step-2 was accepted later, .*its memory was removed"):
        assert faulty.load("latest") == 1.0


@pytest.mark.filterwarnings("ignore:ckptd. (checkpoint|the shard):UserWarning")
def test_a_save_that_a_newer_one_has_outrun_keeps_its_memory_while_there_is_room_and_loses_it_with_a_word(tmp_path: Path) -> None:
    made = Faulty(tmp_path)
    made.daemon.arguments = ["--memory", "128MiB"]
    with made.daemon as daemon:

        def save(id: str, mib: int) -> None:
            state = {"t": torch.ones(mib * 1024 * 1024 // 4)}
            dcp.save(state, checkpoint_id=id, storage_writer=DaemonStorageWriter(address=daemon.address))

        made.tell(**{"raise": "EIO", "only": "best"})
        save("run/best", 20)
        for step in range(1, 5):  # each might have the memory of what was outrun, and there is room beside it
            save(f"run/step-{step}", 20)
            made.wait(f"run/step-{step}")
        assert daemon.list()["run/best"]["state"] == "accepted"
        assert "lost its memory" not in daemon.log.read_text()
        save("run/step-5", 105)  # nothing else makes room, not even the newest durable one; a try to write that runs just now ends first
        assert daemon.log.read_text().count("run/best was accepted, is not durable and has lost its memory: its memory was needed") == 1
        made.wait("run/step-5")


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint:UserWarning")
@pytest.mark.parametrize("outage", OUTAGES, ids=["fails", "hangs"])
def test_saves_of_a_run_wait_once_for_a_store_that_is_away(faulty: Faulty, outage: dict[str, Any]) -> None:
    faulty.save("run/step-1", 1.0)
    faulty.tell(**outage)
    for step in range(2, 8):
        faulty.save(f"run/step-{step}", float(step))
        faulty.save(f"other/step-{step}", float(step))
    waits = [line for line in faulty.daemon.log.read_text().splitlines() if "has waited for the store" in line]
    assert sorted(line.partition("a save of run ")[2].split()[0] for line in waits) == ["'other'", "'run'"]
    faulty.tell()
    faulty.wait("run/step-7")
    faulty.wait("other/step-7")


def test_wait_asks_the_store_when_memory_remembers_only_what_was_superseded(faulty: Faulty) -> None:
    faulty.tell(delay_seconds=1.0)
    faulty.save("step-1", 1.0)
    faulty.save("step-1", 2.0, overwrite=True)  # ends the first
    faulty.tell()
    faulty.wait("step-1")
    big = {"t": torch.ones(40 * 1024 * 1024)}
    for step in (2, 3, 4):  # takes the memory of step-1
        dcp.save(big, checkpoint_id=f"step-{step}", storage_writer=DaemonStorageWriter(address=faulty.daemon.address))
        faulty.wait(f"step-{step}")
    faulty.wait("step-1")
    assert faulty.daemon.cli("wait", "step-1", "--timeout", "10s").returncode == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_while_the_store_hangs_ends_within_the_grace_and_keeps_what_is_accepted(tmp_path: Path, signals: int) -> None:
    faulty = Faulty(tmp_path)
    faulty.daemon.arguments += ["--grace", "1s"]
    with faulty.daemon as daemon:
        faulty.tell(hold_after=0)
        faulty.save("step-1", 1.0)
        for _ in range(signals - 1):
            os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.terminate() == 0
        faulty.tell()
        daemon.start()
        assert faulty.load("step-1") == 1.0
        faulty.daemon.until("step-1", "durable")
