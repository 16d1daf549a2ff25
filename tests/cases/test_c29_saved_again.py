"""C29: to save an id again has one outcome: durable, it is refused before any byte moves or replaced whole; all else is superseded."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import WrongPhase
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import appeared, assert_accounts_balance, assert_whole_or_absent, status, stock_state

pytestmark = pytest.mark.filterwarnings("ignore:ckptd. checkpoint .* could not be made durable:UserWarning")


class Saving:
    """A daemon on a store that can be blocked; every test has a run of its own."""

    def __init__(self, home: Path) -> None:
        self.store = home / "store"
        self.control = home / "control"
        self.daemon = DaemonProcess(f"faulty://{self.store}", program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))

    def save(self, id: str, value: float, *, durable: bool = True, planner: Any = None, **options: Any) -> None:
        writer = DaemonStorageWriter(id, address=self.daemon.address, **options)
        dcp.save({"t": torch.full((1000,), value)}, storage_writer=writer, planner=planner)
        if durable:
            wait(id, address=self.daemon.address, timeout=60)

    def load(self, id: str) -> float:
        found = {"t": torch.zeros(1000)}
        dcp.load(found, storage_reader=DaemonStorageReader(id, address=self.daemon.address))
        assert bool((found["t"] == found["t"][0]).all())
        return float(found["t"][0])

    def in_store(self, id: str) -> float:
        """As stock reads it."""
        found = stock_state(self.store / id)["t"]
        assert bool((found == found[0]).all())
        return float(found[0])

    def abandoned(self, run: str) -> list[str]:
        """Ids of the run that `ckptd list` marks."""
        done = self.daemon.cli("list", "--run", run)
        assert done.returncode == 0, done.stderr
        return [line.split()[0].removeprefix(f"{run}/") for line in done.stdout.splitlines() if line.endswith("abandoned")]

    def ids(self, run: str) -> list[str]:
        return [id.removeprefix(f"{run}/") for id in self.daemon.list() if id.startswith(f"{run}/")]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    made = Saving(tmp_path_factory.mktemp("saving"))
    with made.daemon:
        yield made


@pytest.fixture
def saving(module: Saving) -> Iterator[Saving]:
    yield module
    module.tell()


class Counting(dcp.DefaultSavePlanner):
    """Counts the items that somebody wants the bytes of."""

    resolved = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.resolved += 1
        return super().resolve_data(write_item)


def cause(failed: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return next(iter(failed.value.failures.values()))[0]


@pytest.mark.parametrize("saved_by", ["ckptd", "stock"])
def test_what_is_durable_is_refused_before_any_byte_moves_unless_it_is_to_be_replaced(saving: Saving, saved_by: str) -> None:
    id = f"refused-{saved_by}/step-10"
    if saved_by == "ckptd":
        saving.save(id, 1.0)
    else:
        dcp.save({"t": torch.full((1000,), 1.0)}, storage_writer=dcp.FileSystemWriter(saving.store / id))
    before = assert_accounts_balance(saving.daemon, leases=status(saving.daemon).leases)  # nothing is on its way to be freed or made
    planner = Counting()
    with pytest.raises(CheckpointException) as refused:
        saving.save(id, 2.0, planner=planner)
    assert isinstance(cause(refused), WrongPhase)
    assert "overwrite=True" in str(cause(refused))
    assert planner.resolved == 0
    after = status(saving.daemon)
    assert (after.used, after.segments, after.open_shards) == (before.used, before.segments, 0)
    assert saving.load(id) == saving.in_store(id) == 1.0
    for value in (2.0, 3.0):
        saving.save(id, value, overwrite=True)
        assert saving.load(id) == saving.in_store(id) == value
    assert saving.ids(f"refused-{saved_by}") == ["step-10"]


def test_what_is_on_its_way_is_superseded(saving: Saving) -> None:
    saving.tell(hold_after=0)
    for value in (1.0, 2.0, 3.0):
        saving.save("way/step-10", value, durable=False)
        assert saving.load("way/step-10") == value
    assert saving.daemon.list()["way/step-10"]["state"] == "accepted"
    saving.tell()
    wait("way/step-10", address=saving.daemon.address, timeout=60)
    assert saving.load("way/step-10") == saving.in_store("way/step-10") == 3.0
    assert saving.ids("way") == ["step-10"]


def test_what_has_failed_is_saved_again(saving: Saving) -> None:
    saving.tell(only="failed/step-10", **{"raise": "EACCES"})
    saving.save("failed/step-10", 1.0, durable=False)
    saving.daemon.until("failed/step-10", "failed")
    saving.tell()
    saving.save("failed/step-10", 2.0)
    assert saving.load("failed/step-10") == saving.in_store("failed/step-10") == 2.0
    assert saving.daemon.list()["failed/step-10"]["state"] == "durable"


def test_what_was_deleted_is_saved_again(saving: Saving) -> None:
    saving.save("deleted/step-10", 1.0)
    assert saving.daemon.cli("delete", "deleted/step-10").returncode == 0
    saving.save("deleted/step-10", 2.0)
    assert saving.load("deleted/step-10") == saving.in_store("deleted/step-10") == 2.0


def test_what_dead_attempts_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """Of ckptd's own, at each object; a temporary file and directory; a half checkpoint of stock's; and what is nobody's."""
    saving = Saving(tmp_path)
    directory = saving.store / "step-10"
    with saving.daemon as daemon:
        for uploaded in (1, 2):
            saving.tell(hold_after=uploaded)
            saving.save("step-10", 1.0, durable=False)
            deadline = time.monotonic() + 30
            while len(appeared(directory)) < 2 * uploaded - 1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            daemon.kill()
            shutil.rmtree(daemon.shm_dir)
            saving.tell()
            daemon.start()
        foreign = [directory / "__0_0.distcp", directory / "notes.txt", directory / ".metadata.tmp"]
        for path in foreign:
            path.write_text("half")
        temporary = directory / f".ckptd-{secrets.token_hex(8)}.tmp"
        temporary.write_text("half")
        assert daemon.list()["step-10"]["state"] == "incomplete"
        saving.save("step-10", 2.0)
        assert saving.load("step-10") == saving.in_store("step-10") == 2.0
        done = daemon.cli("prune", "--orphan-age", "0s", "--delete-grace", "0s")
        assert done.returncode == 0, done.stderr
        assert [path.read_text() for path in foreign] == ["half"] * 3
        assert not temporary.exists()
        assert len(list(directory.glob("*.distcp"))) == 2  # its own, and stock's
        assert len(list(directory.glob(".ckptd/*.manifest"))) == 1
    assert assert_whole_or_absent(saving.store).keys() == {"step-10"}
    assert saving.in_store("step-10") == 2.0


def test_after_going_back_the_new_branch_is_latest_and_what_the_rules_keep(saving: Saving) -> None:
    for step in (10, 20):
        saving.save(f"back/step-{step}", float(step))
    assert saving.load("back/latest") == 20.0
    assert saving.load("back/step-10") == 10.0  # the resume
    saving.save("back/step-15", 15.5)
    assert saving.load("back/latest") == 15.5
    assert saving.abandoned("back") == ["step-20"]
    dry = json.loads(saving.daemon.cli("prune", "--run", "back", "--keep-last", "1", "--dry-run", "--json").stdout)
    assert {one["id"]: one["kept"] for one in dry["verdicts"]} == {"back/step-10": False, "back/step-15": True, "back/step-20": False}
    # The step of the dead branch is reached again: refused, unless it is to be replaced; then it is the newest.
    with pytest.raises(CheckpointException) as refused:
        saving.save("back/step-20", 20.5)
    assert isinstance(cause(refused), WrongPhase)
    assert saving.load("back/latest") == 15.5
    saving.save("back/step-20", 20.5, overwrite=True)
    assert saving.load("back/latest") == saving.in_store("back/step-20") == 20.5
    assert saving.abandoned("back") == []
    done = saving.daemon.cli("prune", "--run", "back", "--keep-last", "2", "--delete-grace", "0s")
    assert done.returncode == 0, done.stderr
    assert saving.ids("back") == ["step-15", "step-20"]
