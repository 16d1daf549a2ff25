"""Verify as a daemon answers it: which checkpoints, what is only in memory, progress, and callers that go away."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.v1.daemon_pb2 import StatusRequest, VerifyReply, VerifyRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess

STOCK = "written by stock DCP, which keeps no checksums but the CRC-32 of records"


def save(daemon: DaemonProcess, id: str, *, durable: bool = True, numel: int = 1000) -> None:
    writer = DaemonStorageWriter(id, address=daemon.address, durable=durable, overwrite=True)
    dcp.save({"t": torch.rand(numel)}, storage_writer=writer)
    if durable:
        wait(id, address=daemon.address, timeout=60)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store)) as running:
        for id in ("step-1", "run-a/step-1", "run-a/step-2"):
            save(running, id)
        dcp.save({"t": torch.ones(10)}, checkpoint_id=store / "run-b" / "step-1")
        save(running, "run-a/step-3", durable=False)
        save(running, "run-c/step-1", durable=False)
        yield running


@pytest.fixture(scope="module")
def stub(daemon: DaemonProcess) -> Iterator[DaemonStub]:
    with grpc.insecure_channel(daemon.address) as channel:
        yield DaemonStub(channel)


def ends(stub: DaemonStub, request: VerifyRequest) -> list[VerifyReply]:
    """The last reply of each checkpoint; all of one come before those of the next."""
    replies = list(stub.Verify(request, timeout=60))
    ids = [reply.id for reply in replies]
    assert ids == [id for number, id in enumerate(ids) if id not in ids[:number] for _ in range(ids.count(id))]
    return [reply for reply in replies if reply.ended]


def told(replies: list[VerifyReply]) -> dict[str, str]:
    assert all(not reply.damage for reply in replies)
    return {reply.id: reply.note for reply in replies}


def test_all_are_verified_and_what_is_only_in_memory_is_named(stub: DaemonStub) -> None:
    assert told(ends(stub, VerifyRequest())) == {
        "step-1": "",
        "run-a/step-1": "",
        "run-a/step-2": "",
        "run-a/step-3": "accepted: nothing in the store yet",
        "run-b/step-1": STOCK,
        "run-c/step-1": "accepted: nothing in the store yet",
    }


def test_a_run_or_one_checkpoint_or_the_newest(stub: DaemonStub) -> None:
    def ids(request: VerifyRequest) -> set[str]:
        return {reply.id for reply in ends(stub, request)}

    assert ids(VerifyRequest(run="run-a")) == {"run-a/step-1", "run-a/step-2", "run-a/step-3"}
    assert ids(VerifyRequest(run="")) == {"step-1"}
    assert ids(VerifyRequest(run="none")) == set()
    assert ids(VerifyRequest(id="run-a/step-1")) == {"run-a/step-1"}
    assert ids(VerifyRequest(id="latest")) == {"step-1"}
    assert ids(VerifyRequest(id="run-a/latest")) == {"run-a/step-3"}
    assert ids(VerifyRequest(id="run-b/latest")) == {"run-b/step-1"}


@pytest.mark.parametrize(
    ("id", "status"),
    [
        ("step-9", grpc.StatusCode.NOT_FOUND),
        ("none/latest", grpc.StatusCode.NOT_FOUND),
        ("../step-1", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_is_not_there_is_an_error(stub: DaemonStub, id: str, status: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Verify(VerifyRequest(id=id), timeout=60))
    assert caught.value.code() is status


def test_the_last_reply_has_read_all_bytes(daemon: DaemonProcess, stub: DaemonStub) -> None:
    (end,) = ends(stub, VerifyRequest(id="step-1"))
    stored = sum(path.stat().st_size for path in (Path(daemon.store) / "step-1").rglob("*") if path.is_file())
    assert end.nbytes == end.total_nbytes == stored


def test_one_damaged_checkpoint_hides_no_other(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon, grpc.insecure_channel(daemon.address) as channel:
        for step in range(1, 4):
            save(daemon, f"step-{step}")
        (manifest,) = (tmp_path / "store" / "step-2" / ".ckptd").iterdir()
        manifest.write_bytes(b"")
        replies = list(DaemonStub(channel).Verify(VerifyRequest(), timeout=60))
        assert {reply.id for reply in replies if reply.ended} == {"step-1", "step-2", "step-3"}
        assert [(reply.id, manifest.name in reply.damage[0]) for reply in replies if reply.damage] == [("step-2", True)]


# -- what was found damaged is remembered ----------------------------------------------------------------------------


def load(daemon: DaemonProcess, id: str, *, fallback: bool = False) -> None:
    reader = DaemonStorageReader(id, address=daemon.address, fallback=fallback)
    dcp.load({"t": torch.zeros(1000)}, storage_reader=reader)


def find_by_verify(daemon: DaemonProcess) -> None:
    assert daemon.cli("verify", "run/latest").returncode == 1


def find_by_load(daemon: DaemonProcess) -> None:
    with pytest.raises(CheckpointException):
        load(daemon, "run/step-12")


def find_by_fallback(daemon: DaemonProcess) -> None:
    with pytest.warns(UserWarning, match="step-6"):
        load(daemon, "run/step-12", fallback=True)


def flip(path: Path) -> None:
    """One byte in the middle, and no size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def pruned(daemon: DaemonProcess, *arguments: str) -> dict[str, str]:
    """What a prune says of each."""
    done = daemon.cli("prune", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    return {one["id"]: one["reason"] for one in document["verdicts"]}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two good checkpoints, by a daemon whose memory is gone."""
    store = tmp_path_factory.mktemp("two")
    with DaemonProcess(str(store)) as daemon:
        save(daemon, "run/step-6")
        save(daemon, "run/step-12")
    return store


@pytest.mark.parametrize("name", ["*.distcp", ".metadata"])
@pytest.mark.parametrize("find", [find_by_verify, find_by_load, find_by_fallback])
def test_the_last_good_one_does_not_go_for_one_that_was_found_damaged(
    two: Path, tmp_path: Path, find: Callable[[DaemonProcess], None], name: str
) -> None:
    store = Path(shutil.copytree(two, tmp_path / "store"))
    flip(next((store / "run" / "step-12").glob(name)))
    with DaemonProcess(str(store)) as daemon:
        find(daemon)
        said = pruned(daemon, "--run", "run", "--keep-last", "1")
        assert said["run/step-6"] == "kept: the last one"
        assert said["run/step-12"].startswith("kept: damaged (found when it was read: run/step-12/")
        listed = daemon.list()
        assert set(listed) == {"run/step-6", "run/step-12"}
        assert "reason" not in listed["run/step-6"]
        assert "run/step-12/" in listed["run/step-12"]["reason"]


def test_a_newer_save_and_a_repair_are_judged_anew_and_the_daemons_own_rules_know_it(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store"), "--keep-last", "2") as daemon:
        for step in (1, 2):
            save(daemon, f"step-{step}")
        data = next((tmp_path / "store" / "step-2").glob("*.distcp"))
        good = data.read_bytes()
        flip(data)
        assert daemon.cli("verify", "step-2").returncode == 1
        assert daemon.list()["step-2"]["reason"].startswith("found when it was read: step-2/")
        save(daemon, "step-3")
        said = pruned(daemon)
        assert said["step-1"] == "kept: one of the last 2"
        assert said["step-2"].startswith("kept: damaged (")
        data.write_bytes(good)
        assert daemon.cli("verify", "--all").returncode == 0
        assert "reason" not in daemon.list()["step-2"]
        assert pruned(daemon, "--dry-run", "--keep-last", "2")["step-1"] == "deleted: no rule keeps it"
        flip(data)
        assert daemon.cli("verify", "--all").returncode == 1
        save(daemon, "step-2")
        assert pruned(daemon, "--dry-run", "--keep-last", "1")["step-2"] == "kept: the last one"


def bytes_read(daemon: DaemonProcess) -> int:
    """What the process has read from files, by the kernel's count."""
    return int(Path(f"/proc/{daemon.pid}/io").read_text().split()[1])


def test_a_caller_that_goes_away_stops_the_reading_and_holds_up_nobody(tmp_path: Path) -> None:
    control = tmp_path / "control"
    with DaemonProcess(str(tmp_path / "store"), "--codec", "none") as daemon:
        save(daemon, "step-1", numel=40_000_000)  # ten requests
    slow = DaemonProcess(f"faulty://{tmp_path / 'store'}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="64MiB")
    with slow, grpc.insecure_channel(slow.address) as channel:
        control.write_text(json.dumps({"read_hold_after": 1, "only": ".distcp"}))  # and three more are under way
        call = DaemonStub(channel).Verify(VerifyRequest(id="step-1"))
        before = bytes_read(slow)
        next(iter(call))
        call.cancel()
        with grpc.insecure_channel(slow.address) as other:  # by the time of its answer the daemon has heard of that
            DaemonStub(other).Status(StatusRequest(), timeout=30)
        control.write_text("{}")
        time.sleep(2)  # enough for all of it
        assert bytes_read(slow) - before < 80 * 2**20  # what was under way, and not all the 152 MiB
        assert list(DaemonStub(channel).Verify(VerifyRequest(id="step-1"), timeout=60))[-1].ended
        assert bytes_read(slow) - before > 150 * 2**20
