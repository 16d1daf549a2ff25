"""Loads that may go back: to the last good one, loudly, and only because every newer one is damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import Corrupt, NotFound, Unavailable
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, channel, wait
from client.pairs import Pair
from daemons import FAULTY, DaemonProcess

NUMEL = 40_000


def value(step: int) -> torch.Tensor:
    return torch.full((NUMEL,), float(step))


def save(daemon: DaemonProcess, *ids: str, tensor: Callable[[int], torch.Tensor] = value) -> None:
    """Makes checkpoints durable one after another; each holds its step's value."""
    for id in ids:
        step = int(re.findall(r"\d+", id)[-1])
        writer = DaemonStorageWriter(id, address=daemon.address, overwrite=True)
        dcp.save({"t": tensor(step), "step": step}, storage_writer=writer)
        wait(id, address=daemon.address, timeout=60)


def loaded(daemon: DaemonProcess, id: str, *, numel: int = NUMEL) -> int:
    """The step of what is loaded with fallback; its values are looked at."""
    state = {"t": torch.zeros(numel), "step": -1}
    dcp.load(state, checkpoint_id=id, storage_reader=DaemonStorageReader(address=daemon.address, fallback=True))
    assert torch.equal(state["t"], torch.full((numel,), float(state["step"])))
    return state["step"]


def gone_back(daemon: DaemonProcess, id: str) -> tuple[int, list[str]]:
    """What is loaded, and what the user is told."""
    with pytest.warns(UserWarning, match="ckptd: ") as caught:
        step = loaded(daemon, id)
    return step, [str(one.message) for one in caught if str(one.message).startswith("ckptd: ")]


def refused(daemon: DaemonProcess, id: str) -> BaseException:
    """Why nothing is loaded; and nothing is."""
    state = {"t": torch.zeros(NUMEL), "step": -1}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, checkpoint_id=id, storage_reader=DaemonStorageReader(address=daemon.address, fallback=True))
    assert (state["step"], float(state["t"].abs().sum())) == (-1, 0.0)
    ((error, _),) = caught.value.failures.values()
    return error


def file(store: Path, id: str, pattern: str = "*.distcp") -> Path:
    (found,) = (store / id).glob(pattern)
    return found


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def times_read(daemon: DaemonProcess, id: str) -> int:
    return daemon.log.read_text().count(f"reading {id} back before it is loaded")


def test_what_was_whole_and_was_found_damaged_since_is_read_again(pair: Pair) -> None:
    save(pair.saving, "rot/step-1", "rot/step-2")
    assert loaded(pair.other, "rot/latest") == 2
    path = file(pair.store, "rot/step-2")
    flip(path)
    assert pair.other.cli("verify", "rot/step-2").returncode == 1
    assert gone_back(pair.other, "rot/latest")[0] == 1
    flip(path)
    assert pair.other.cli("verify", "rot/step-2").returncode == 0
    assert loaded(pair.other, "rot/latest") == 2


def test_the_last_good_one_is_loaded_and_the_damaged_one_named_with_the_place(pair: Pair) -> None:
    save(pair.saving, "a/step-1", "a/step-2", "a/step-3")
    path = file(pair.store, "a/step-3")
    flip(path)
    step, told = gone_back(pair.other, "a/latest")
    assert step == 2
    assert len(told) == 1
    assert told[0].startswith("ckptd: a/step-2 is loaded instead of a/latest, because a newer checkpoint is damaged: a/step-3: ")
    assert re.search(rf"a/step-3/{path.name}: block 0 of item \d \(bytes \d+ to \d+\) is damaged", told[0])
    log = pair.other.log.read_text()
    assert re.search(r"ERROR ckptd.fallback a load of a/latest goes back to a/step-2: a/step-3: .*block 0 of item", log)


def test_without_it_a_damaged_checkpoint_is_an_error(pair: Pair) -> None:
    save(pair.saving, "b/step-1", "b/step-2")
    flip(file(pair.store, "b/step-2"))
    with pytest.raises(CheckpointException) as caught:
        pair.load_from_store("b/latest", {"t": torch.zeros(NUMEL), "step": -1})
    assert all(isinstance(error, Corrupt) for error, _ in caught.value.failures.values())


def test_every_one_that_is_passed_over_is_named_newest_first(pair: Pair) -> None:
    save(pair.saving, "c/step-1", "c/step-2", "c/step-3", "c/step-4", "c/step-5")
    flip(file(pair.store, "c/step-5", ".ckptd/*.manifest"), 40)
    flip(file(pair.store, "c/step-4", ".metadata"), 30)
    file(pair.store, "c/step-3").unlink()
    file(pair.store, "c/step-2", ".ckptd/*.manifest").unlink()
    step, told = gone_back(pair.other, "c/latest")
    assert step == 1
    assert [re.findall(r"damaged: (c/step-\d): ", text) for text in told] == [["c/step-5"], ["c/step-4"], ["c/step-3"], ["c/step-2"]]


def test_from_a_named_one_it_goes_back_and_never_forward(pair: Pair) -> None:
    save(pair.saving, "d/step-1", "d/step-2", "d/step-3")
    flip(file(pair.store, "d/step-2"))
    assert gone_back(pair.other, "d/step-2")[0] == 1
    assert loaded(pair.other, "d/latest") == 3
    assert loaded(pair.other, "d/step-3") == 3


def test_before_means_accepted_before_whatever_the_step(pair: Pair) -> None:
    save(pair.saving, "e/step-10", "e/step-20", "e/step-15", "e/step-16")
    flip(file(pair.store, "e/step-16"))
    assert gone_back(pair.other, "e/latest")[0] == 15
    save(pair.saving, "f/step-10", "f/step-20", "f/step-15", "f/step-16")
    flip(file(pair.store, "f/step-16"))
    flip(file(pair.store, "f/step-15"))
    assert gone_back(pair.other, "f/latest")[0] == 20


def test_what_was_found_whole_and_is_damaged_later_is_an_error_of_the_load(pair: Pair) -> None:
    """It is remembered as whole; the load itself checks what it reads, and gives back nothing else."""
    save(pair.saving, "t/step-1", "t/step-2")
    assert channel.connect(pair.other.address).resolve_whole("t/latest").summary.id == "t/step-2"
    file(pair.store, "t/step-2").write_bytes(b"")
    assert isinstance(refused(pair.other, "t/latest"), Corrupt)


def test_other_runs_are_other_lines_of_checkpoints(pair: Pair) -> None:
    save(pair.saving, "u/step-1", "g/step-1", "step-1")
    flip(file(pair.store, "g/step-1"))
    error = refused(pair.other, "g/latest")
    assert isinstance(error, Corrupt)
    assert "u/step-1" not in str(error)


def test_if_all_are_damaged_nothing_is_loaded_and_all_are_named(pair: Pair) -> None:
    save(pair.saving, "h/step-1", "h/step-2")
    paths = [file(pair.store, f"h/step-{step}") for step in (1, 2)]
    for path in paths:
        path.write_bytes(path.read_bytes() + b"x")
    error = refused(pair.other, "h/latest")
    assert isinstance(error, Corrupt)
    assert "all of these are damaged: h/step-2, h/step-1 (" in str(error)
    assert all(path.name in str(error) for path in paths)


def test_nothing_is_no_damage(pair: Pair) -> None:
    save(pair.saving, "i/step-1")
    assert isinstance(refused(pair.other, "i/step-2"), NotFound)
    assert isinstance(refused(pair.other, "nothing/latest"), NotFound)


def test_ranks_that_ask_together_share_one_reading_and_what_is_whole_is_read_once(pair: Pair) -> None:
    save(pair.saving, "j/step-1")
    found: list[int] = []
    ranks = [threading.Thread(target=lambda: found.append(loaded(pair.other, "j/latest"))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert found == [1] * 4
    assert loaded(pair.other, "j/step-1") == 1
    assert times_read(pair.other, "j/step-1") == 1
    save(pair.saving, "j/step-1")  # another attempt of the id
    assert loaded(pair.other, "j/step-1") == 1
    assert times_read(pair.other, "j/step-1") == 2


def test_damage_is_not_remembered_when_it_has_been_repaired(pair: Pair) -> None:
    save(pair.saving, "k/step-1", "k/step-2")
    path = file(pair.store, "k/step-2")
    flip(path)
    assert gone_back(pair.other, "k/latest")[0] == 1
    flip(path)
    assert loaded(pair.other, "k/latest") == 2


def test_what_memory_holds_is_good_without_being_read(pair: Pair) -> None:
    save(pair.saving, "l/step-1", "l/step-2")
    flip(file(pair.store, "l/step-2"))
    flip(file(pair.store, "l/step-2", ".ckptd/*.manifest"))
    file(pair.store, "l/step-2", ".metadata").unlink()
    file(pair.store, "l/step-1").unlink()
    assert loaded(pair.saving, "l/latest") == 1
    assert times_read(pair.saving, "l/step-1") == 0


def test_what_is_only_accepted_is_the_newest_all_the_same(pair: Pair) -> None:
    save(pair.saving, "m/step-1")
    writer = DaemonStorageWriter("m/step-2", address=pair.saving.address, durable=False)
    dcp.save({"t": value(2), "step": 2}, storage_writer=writer)
    assert loaded(pair.saving, "m/latest") == 2
    assert loaded(pair.other, "m/latest") == 1  # it knows only the store


def test_what_is_only_in_memory_stands_where_it_was_accepted(pair: Pair) -> None:
    save(pair.saving, "w/step-1")
    writer = DaemonStorageWriter("w/step-2", address=pair.other.address, durable=False)
    dcp.save({"t": value(2), "step": 2}, storage_writer=writer)
    save(pair.saving, "w/step-3")
    file(pair.store, "w/step-3").unlink()
    assert gone_back(pair.other, "w/latest")[0] == 2


def test_stock_checkpoints_take_part(pair: Pair) -> None:
    save(pair.saving, "n/step-1")
    for step in (2, 3):
        dcp.save({"t": value(step), "step": step}, checkpoint_id=str(pair.store / "n" / f"step-{step}"))
    flip(file(pair.store, "n/step-3"))
    step, told = gone_back(pair.other, "n/latest")
    assert step == 2
    assert re.search(r"n/step-3/__0_0.distcp: '\w+'( at \(0,\))? \(bytes \d+ to \d+\) is damaged", told[0])
    save(pair.saving, "v/step-1")
    dcp.save({"t": value(2), "step": 2}, checkpoint_id=str(pair.store / "v" / "step-2"))
    flip(file(pair.store, "v/step-2"))
    assert gone_back(pair.other, "v/latest")[0] == 1


def test_the_warning_is_shown_each_time(pair: Pair) -> None:
    save(pair.saving, "o/step-1", "o/step-2")
    file(pair.store, "o/step-2").unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            assert loaded(pair.other, "o/latest") == 1
    told = [str(one.message) for one in caught if "ckptd: " in str(one.message)]
    assert len(told) == 2
    assert told[0] == told[1]


# --- stores and daemons that go away -----------------------------------------------------------------------------


class Faulty:
    """A daemon with an empty memory on a store that can be told to fail."""

    def __init__(self, store: Path, control: Path) -> None:
        self.control = control
        self.daemon = DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="64MiB")

    def tell(self, **what: Any) -> None:
        self.control.write_text(json.dumps(what))

    def until_read(self, id: str) -> None:
        deadline = time.monotonic() + 30
        while not times_read(self.daemon, id):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def faulty(pair: Pair, tmp_path: Path) -> Iterator[Faulty]:
    found = Faulty(pair.store, tmp_path / "control")
    with found.daemon:
        yield found


def test_a_store_that_cannot_be_read_is_an_error_and_no_reason_to_go_back(pair: Pair, faulty: Faulty) -> None:
    save(pair.saving, "p/step-1", "p/step-2")
    for only in ("p/step-2/__", "p/step-2/.ckptd", "p/step-2/.metadata"):
        faulty.tell(read_raises="EIO", only=only)
        assert isinstance(refused(faulty.daemon, "p/latest"), Unavailable), only
    faulty.tell(list_raises="EIO")
    assert isinstance(refused(faulty.daemon, "p/latest"), Unavailable)
    faulty.tell()
    assert loaded(faulty.daemon, "p/latest") == 2


def test_a_daemon_that_dies_over_it_is_noticed(pair: Pair, faulty: Faulty) -> None:
    save(pair.saving, "q/step-1")
    faulty.tell(read_delay_seconds=60, only="q/step-1/__")
    errors: list[BaseException] = []
    rank = threading.Thread(target=lambda: errors.append(refused(faulty.daemon, "q/latest")))
    rank.start()
    faulty.until_read("q/step-1")
    faulty.daemon.kill()
    rank.join()
    assert [type(error) for error in errors] == [Unavailable]


def test_a_daemon_that_hangs_over_it_is_noticed(pair: Pair, faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    save(pair.saving, "r/step-1")
    monkeypatch.setattr(channel, "_ALIVE_SECONDS", 0.2)
    faulty.tell(read_delay_seconds=1, only="r/step-1/__")
    assert loaded(faulty.daemon, "r/latest") == 1  # slow, and alive
    save(pair.saving, "r/step-2")
    monkeypatch.setattr(channel, "_CALL_SECONDS", 2.0)
    faulty.tell(read_delay_seconds=60, only="r/step-2/__")
    errors: list[BaseException] = []
    rank = threading.Thread(target=lambda: errors.append(refused(faulty.daemon, "r/latest")))
    rank.start()
    faulty.until_read("r/step-2")
    os.kill(faulty.daemon.pid, signal.SIGSTOP)
    rank.join()
    os.kill(faulty.daemon.pid, signal.SIGCONT)
    assert [type(error) for error in errors] == [Unavailable]


def test_nothing_is_read_on_for_a_rank_that_has_gone(pair: Pair, faulty: Faulty) -> None:
    save(pair.saving, "s/step-1", tensor=lambda _: torch.rand(12_000_000))  # several requests
    faulty.tell(read_hold_after=0, only="s/step-1/__")
    daemon = channel.connect(faulty.daemon.address)
    call = daemon._stub.Resolve.future(channel.daemon_pb2.ResolveRequest(id="s/latest", fallback=True))
    faulty.until_read("s/step-1")
    call.cancel()
    daemon.hello()  # comes behind it on the same connection
    faulty.tell(read_delay_seconds=1, only="s/step-1/__")
    deadline = time.monotonic() + 30
    while "nobody waits for s/step-1 any more" not in faulty.daemon.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_copy_is_judged_by_its_own_files(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        dcp.save({"t": torch.ones(1000)}, checkpoint_id="run/step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("run/step-1", address=daemon.address, timeout=60)
        for copy in ("copy", "hurt"):
            shutil.copytree(tmp_path / "store" / "run" / "step-1", tmp_path / "store" / copy / "step-5")
        reader = DaemonStorageReader("copy/latest", address=daemon.address, fallback=True)
        dcp.load({"t": torch.zeros(1000)}, storage_reader=reader)
        assert reader.read_metadata().storage_meta.checkpoint_id == "copy/step-5"
        file = next((tmp_path / "store" / "hurt" / "step-5").glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointException, match="damaged"):
            dcp.load({"t": torch.zeros(1000)}, storage_reader=DaemonStorageReader("hurt/step-5", address=daemon.address, fallback=True))
