"""SIGKILL of the daemon at any moment: what was accepted comes back, what was not is absent."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptd.v1.manifest_pb2 import Record, Summary
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from invariants import appeared

NUMEL = 4 * 1024 * 1024


def state(step: int) -> dict[str, object]:
    """16 MiB whose every value depends on the step, and a small object."""
    return {"w": torch.arange(NUMEL, dtype=torch.int32) + step, "meta": {"step": step}}


def load(daemon: DaemonProcess, id: str) -> int:
    """Loads, compares every byte, returns the step."""
    loaded: dict[str, object] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "meta": {"step": -1}}
    dcp.load(loaded, checkpoint_id=id, storage_reader=DaemonStorageReader(address=daemon.address))
    step = loaded["meta"]["step"]  # type: ignore[index]
    assert torch.equal(loaded["w"], torch.arange(NUMEL, dtype=torch.int32) + step)  # type: ignore[arg-type]
    return int(step)


class Saver(threading.Thread):
    """Saves step after step until a save fails, or it is told to end."""

    def __init__(self, daemon: DaemonProcess, first: int) -> None:
        super().__init__()
        self.daemon_process = daemon
        self.step = first
        self.accepted: list[int] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        writer = DaemonStorageWriter(address=self.daemon_process.address)
        try:
            while not self.ended.is_set():
                dcp.save(state(self.step), checkpoint_id=f"run/step-{self.step}", storage_writer=writer)
                self.accepted.append(self.step)
                self.step += 1
        except BaseException as exc:  # noqa: BLE001 - DCP raises one; the test looks at it
            self.error = exc


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_was_accepted_survives_twenty_kills_at_random_moments(tmp_path: Path) -> None:
    seed = time.time_ns()
    print("seed", seed)  # shown if the test fails
    chance = random.Random(seed)
    store = tmp_path / "store"
    last = 0
    with DaemonProcess(str(store), memory="256MiB") as daemon:
        for _ in range(20):
            saver = Saver(daemon, last + 1)
            saver.start()
            time.sleep(chance.uniform(0.0, 0.5))
            daemon.restart()
            saver.ended.set()
            saver.join(60)
            assert not saver.is_alive()
            # None: the daemon was dead only between two saves.
            assert saver.error is None or isinstance(saver.error, CheckpointException)
            newest = max([last, *saver.accepted])
            listed = daemon.list()
            if newest:
                loaded = load(daemon, "run/latest")
                # One more than was reported may have been accepted: the answer was lost with the daemon.
                assert newest <= loaded <= newest + 1
                assert listed[f"run/step-{loaded}"]["state"] in ("accepted", "durable")
                last = loaded
            for step in saver.accepted[-3:]:
                assert load(daemon, f"run/step-{step}") == step
        for step in range(1, last + 1):
            wait(f"run/step-{step}", address=daemon.address, timeout=120)
        assert load(daemon, "run/latest") == last
    stock: dict[str, object] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "meta": {"step": -1}}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(store / "run" / f"step-{last}"))
    assert torch.equal(stock["w"], torch.arange(NUMEL, dtype=torch.int32) + last)  # type: ignore[arg-type]


def test_a_kill_at_each_object_of_a_flush_leaves_a_whole_checkpoint_or_none(tmp_path: Path) -> None:
    """The store stops after k of the three objects (data, manifest, .metadata); then the daemon is killed."""
    control = tmp_path / "control"
    for k in range(3):
        store = tmp_path / f"store-{k}"
        control.write_text(f'{{"hold_after": {k}}}')
        with DaemonProcess(f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
            dcp.save(state(7), checkpoint_id="step-7", storage_writer=DaemonStorageWriter(address=daemon.address))
            deadline = time.monotonic() + 30
            while len(appeared(store)) < k:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.3)
            assert not (store / "step-7" / ".metadata").exists()
            daemon.kill()
            control.write_text("{}")
            daemon.start()
            assert load(daemon, "step-7") == 7
            wait("step-7", address=daemon.address, timeout=60)
            stock: dict[str, object] = {"w": torch.zeros(NUMEL, dtype=torch.int32), "meta": {"step": -1}}
            dcp.load(stock, storage_reader=dcp.FileSystemReader(store / "step-7"))
            assert torch.equal(stock["w"], torch.arange(NUMEL, dtype=torch.int32) + 7)  # type: ignore[arg-type]


def test_a_daemon_killed_after_the_commit_does_not_upload_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store)) as daemon:
        dcp.save(state(3), checkpoint_id="step-3", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-3", address=daemon.address, timeout=60)
        files = sorted(path.name for path in store.rglob("*"))
        daemon.restart()
        assert load(daemon, "latest") == 3
        assert sorted(path.name for path in store.rglob("*")) == files


@pytest.mark.parametrize("junk", [b"", b"\xff" * 40, Record(summary=Summary(id="../x", attempt="0" * 24)).SerializeToString()])
@pytest.mark.parametrize("kind", ["accepted", "durable"])
def test_a_damaged_record_stops_no_start_and_takes_nothing_with_it(tmp_path: Path, kind: str, junk: bytes) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        dcp.save(state(3), checkpoint_id="step-3", storage_writer=DaemonStorageWriter(address=daemon.address))
        daemon.kill()
        damaged = daemon.shm_dir / f"{'0' * 24}.{kind}.record"
        damaged.write_bytes(junk)
        daemon.start()
        assert load(daemon, "step-3") == 3
        assert not damaged.exists()


@pytest.mark.parametrize(("accepted", "flushed"), [("none", "zstd:1"), ("zstd:1", "none")])
def test_what_was_accepted_under_another_codec_becomes_durable_whole(tmp_path: Path, accepted: str, flushed: str) -> None:
    control = tmp_path / "control"
    control.write_text('{"hold_after": 0}')
    state = {"t": torch.arange(3_000_000, dtype=torch.int32), "note": "text"}
    environment = {"FAULTY_CONTROL": str(control)}
    with DaemonProcess(f"faulty://{tmp_path}/store", "--codec", accepted, program=FAULTY, env=environment) as daemon:
        dcp.save(state, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        daemon.kill()
        control.write_text("{}")
        daemon.arguments[daemon.arguments.index("--codec") + 1] = flushed
        daemon.start()
        wait("step-1", address=daemon.address, timeout=60)
        assert daemon.cli("verify", "step-1").returncode == 0
        found = {"t": torch.zeros(3_000_000, dtype=torch.int32), "note": ""}
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "store" / "step-1"))
        assert torch.equal(found["t"], state["t"])


def test_a_daemon_on_another_store_makes_what_it_holds_durable_there(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "first")) as daemon:
        dcp.save({"t": torch.ones(1000)}, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
        daemon.kill()
        daemon.store = str(tmp_path / "second")
        daemon.start()
        wait("step-1", address=daemon.address, timeout=60)
        assert list(daemon.list()) == ["step-1"]
        assert (tmp_path / "second" / "step-1" / ".metadata").exists()
