"""C34: a store that throttles is waited for, an error is never "no checkpoints", no name is written over and over, ranks share listings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import StoreError
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from hosts import until
from joint import at_the_same_moment


class Throttled:
    """A daemon on a store that misbehaves when it is told to."""

    def __init__(self, home: Path) -> None:
        self.store = home / "store"
        self.control = home / "control"
        self.lists = home / "lists"
        self.daemon = DaemonProcess(f"faulty://{self.store}", program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))

    def save(self, id: str, value: float, **options: Any) -> None:
        dcp.save({"t": torch.full((1000,), value)}, storage_writer=DaemonStorageWriter(id, address=self.daemon.address, **options))

    def wait(self, *ids: str) -> None:
        for id in ids:
            wait(id, address=self.daemon.address, timeout=60)

    def load(self, id: str) -> float:
        found = {"t": torch.zeros(1000)}
        dcp.load(found, storage_reader=DaemonStorageReader(id, address=self.daemon.address))
        return float(found["t"][0])

    def alone(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line on the store itself, with no daemon."""
        command = [sys.executable, *FAULTY, *arguments, "--store", f"faulty://{self.store}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.daemon.env, check=False)

    def forget(self) -> None:
        """As on a new node: nothing but the store knows of a checkpoint."""
        self.daemon.kill()
        shutil.rmtree(self.daemon.shm_dir)
        self.daemon.start()


@pytest.fixture(scope="module")
def throttled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Throttled]:
    """Three durable checkpoints of one run."""
    made = Throttled(tmp_path_factory.mktemp("throttled"))
    with made.daemon:
        for step in (1, 2, 3):
            made.save(f"run/step-{step}", float(step))
            made.wait(f"run/step-{step}")
        yield made


@pytest.fixture(autouse=True)
def as_usual(throttled: Throttled) -> Iterator[None]:
    yield
    throttled.tell()


LISTED = ["run/step-1", "run/step-2", "run/step-3"]
ASKED: dict[str, Callable[[Throttled], subprocess.CompletedProcess[str]]] = {
    "the daemon": lambda throttled: throttled.daemon.cli("list", "--json", "--run", "run"),
    "the store": lambda throttled: throttled.alone("list", "--json", "--run", "run"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_listing_that_is_refused_three_times_is_a_listing(throttled: Throttled, asked: str) -> None:
    throttled.forget()
    throttled.tell(list_raises="503", list_times=3, list_log=str(throttled.lists))
    done = ASKED[asked](throttled)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["id"] for line in json.loads(done.stdout)] == LISTED
    assert len(throttled.lists.read_text().splitlines()) > 3


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("refusal", ["503", "EACCES"])
def test_a_listing_that_is_always_refused_is_an_error_and_not_an_empty_one(throttled: Throttled, asked: str, refusal: str) -> None:
    throttled.forget()
    throttled.tell(list_raises=refusal)
    done = ASKED[asked](throttled)
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"ckptd: cannot list .*\n", done.stderr), done.stderr


def test_a_store_whose_root_is_gone_is_an_error_and_not_an_empty_one(throttled: Throttled) -> None:
    throttled.forget()
    moved = throttled.store.rename(throttled.store.with_name("elsewhere"))
    try:
        for ask in ASKED.values():
            done = ask(throttled)
            assert (done.returncode, done.stdout) == (3, "")
            assert done.stderr.startswith("ckptd: ")
        with pytest.raises(CheckpointException) as caught:
            throttled.load("another/latest")
        assert [type(why) for why, _ in caught.value.failures.values()] == [StoreError]
    finally:
        moved.rename(throttled.store)
    assert throttled.load("run/latest") == 3.0


@pytest.mark.slow
def test_a_trainer_does_not_start_afresh_when_nobody_can_say_that_there_is_nothing(throttled: Throttled) -> None:
    throttled.tell(list_raises="503")
    trainer = subprocess.run(
        [sys.executable, "-m", "ckptd_worker.train", "--steps", "1", "--width", "16", "--layers", "1", "--run-name", "another"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "CKPTD_ADDRESS": throttled.daemon.address},
        check=False,
    )
    assert trainer.returncode == 3, trainer.stderr
    assert "cannot tell whether run another has a checkpoint, so not starting: Unavailable" in trainer.stderr
    assert trainer.stdout == ""
    assert not (throttled.store / "another").exists()


def test_no_name_in_the_store_is_written_twice_by_saves_of_three_ids(throttled: Throttled) -> None:
    throttled.tell(rewrite_seconds=3600)  # whatever is written again never commits
    log = throttled.daemon.log.stat().st_size
    for step in (1, 2, 3):
        throttled.save(f"three/step-{step}", float(step))
    throttled.wait("three/step-1", "three/step-2", "three/step-3")
    assert "429" not in throttled.daemon.log.read_text()[log:]
    assert throttled.load("three/latest") == 3.0


def test_saves_of_one_id_commit_although_its_name_may_not_be_written_again_so_soon(throttled: Throttled) -> None:
    for value in (1.0, 2.0, 3.0):
        throttled.tell(rewrite_seconds=3600)
        log = throttled.daemon.log.stat().st_size
        throttled.save("one/step-1", value, overwrite=True)
        if value > 1.0:
            until("it is refused", lambda log=log: "429" in throttled.daemon.log.read_text()[log:])
        throttled.tell()
        throttled.wait("one/step-1")
        assert throttled.load("one/step-1") == value
    throttled.forget()
    assert throttled.load("one/latest") == 3.0


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint quick/step-1 is not durable yet:UserWarning")  # a save that comes a little later
def test_of_saves_of_one_id_that_do_not_wait_for_each_other_the_last_one_commits(throttled: Throttled) -> None:
    throttled.tell(rewrite_seconds=1.0)
    for value in (1.0, 2.0, 3.0):
        throttled.save("quick/step-1", value, overwrite=True)
    throttled.wait("quick/step-1")
    throttled.forget()
    assert throttled.load("quick/latest") == 3.0


def lists_of_a_load(throttled: Throttled, ranks: int) -> int:
    """So many ranks of a fresh node load the newest checkpoint at once, from a store that takes its time; the number of listings."""
    throttled.forget()
    throttled.lists.unlink(missing_ok=True)
    throttled.tell(list_hangs=True, list_log=str(throttled.lists))
    with at_the_same_moment(ranks) as asked, ThreadPoolExecutor(ranks) as threads:
        loads = [threads.submit(throttled.load, "run/latest") for _ in range(ranks)]
        assert asked.wait(60)
        throttled.tell(list_log=str(throttled.lists))
        assert [load.result(60) for load in loads] == [3.0] * ranks
    return len(throttled.lists.read_text().splitlines())


def test_eight_ranks_that_load_together_list_as_often_as_two(throttled: Throttled) -> None:
    assert 0 < lists_of_a_load(throttled, 8) <= lists_of_a_load(throttled, 2)
