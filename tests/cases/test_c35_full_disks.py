"""C35: a full disk, quota or shared memory is an error that says how much was needed; what was saved before stays, nothing partial does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.v1.daemon_pb2 import StatusRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, channel, wait
from daemons import FAULTY, DaemonProcess
from hosts import until
from invariants import assert_accounts_balance, assert_whole_or_absent
from mounts import small_tmpfs

MiB = 1024 * 1024
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")


def state(nbytes: int, step: int) -> dict[str, Any]:
    """Noise, which no codec makes smaller, so that what is stored is as much as what is saved."""
    noise = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), dtype=torch.int64, generator=torch.Generator().manual_seed(step))
    return {"t": noise, "step": step}


def save(daemon: DaemonProcess, step: int, nbytes: int = 8 * MiB) -> None:
    dcp.save(state(nbytes, step), storage_writer=DaemonStorageWriter(f"step-{step}", address=daemon.address), no_dist=True)


def load(daemon: DaemonProcess, step: int, nbytes: int = 8 * MiB) -> None:
    """Raises unless every bit is as it was saved."""
    found = {"t": torch.zeros(nbytes // 8, dtype=torch.int64), "step": -1}
    dcp.load(found, storage_reader=DaemonStorageReader(f"step-{step}", address=daemon.address), no_dist=True)
    assert found["step"] == step
    assert torch.equal(found["t"], state(nbytes, step)["t"])


def files(store: Path) -> list[str]:
    return sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())


def assert_stuck(daemon: DaemonProcess, step: int, why: str = "No space left on device") -> None:
    """It is accepted and can be loaded, and whoever saves or asks is told why it is not durable."""
    until("it has been tried", lambda: "reason" in daemon.list()[f"step-{step}"])
    with pytest.raises(TimeoutError, match=f"not durable after 2 s .*{why}"):
        wait(f"step-{step}", address=daemon.address, timeout=2)
    load(daemon, step)
    listed = daemon.list()[f"step-{step}"]
    assert listed["state"] == "accepted"
    assert re.search(why, listed["reason"])
    waited = daemon.cli("wait", f"step-{step}", "--timeout", "10ms")
    assert waited.returncode == 1
    assert re.search(f"not durable after 0.01 s: .*{why}", waited.stderr)
    assert "No space left on device" in json.loads(daemon.cli("status", "--json").stdout)["warning"]


@pytest.mark.parametrize("nbytes", [0, 3 * MiB])
def test_a_store_that_is_full_after_some_bytes_of_a_file_loses_nothing_and_keeps_nothing_partial(tmp_path: Path, nbytes: int) -> None:
    store, control = tmp_path / "store", tmp_path / "control"
    with DaemonProcess(f"faulty://{store}", "--grace", "1s", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        save(daemon, 1)
        wait("step-1", address=daemon.address, timeout=60)
        before = files(store)
        control.write_text(json.dumps({"full_after": nbytes}))
        save(daemon, 2)
        assert_stuck(daemon, 2)
        load(daemon, 1)
        # Who has to end in the middle of a try may have no time to tidy up after it: from here on none gets so far as to make a file.
        control.write_text(json.dumps({"raise": "ENOSPC"}))
        until("no try is under way", lambda: files(store) == before)
        assert daemon.terminate() == 0
        assert files(store) == before
        control.write_text("{}")
        daemon.start()
        wait("step-2", address=daemon.address, timeout=60)
        save(daemon, 3)
        wait("step-3", address=daemon.address, timeout=60)
        daemon.terminate()
        daemon.start()  # all from the store
        for step in (1, 2, 3):
            load(daemon, step)
        assert len(files(store)) == 3 * len(before)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """18 MiB, three of them taken, hold one checkpoint of 8 MiB, not two; somebody makes room, and nothing has to be done besides."""
    with small_tmpfs("18m") as disk, DaemonProcess(str(disk / "store")) as daemon:
        (disk / "theirs").write_bytes(bytes(3 * MiB))
        save(daemon, 1)
        wait("step-1", address=daemon.address, timeout=60)
        before = files(disk)
        save(daemon, 2)
        assert_stuck(daemon, 2, r"No space left on device for a file of up to 8\.0 MiB \(\d\.\d MiB are free\)")
        load(daemon, 1)
        deadline = time.monotonic() + 30  # between two tries
        while files(disk) != before:
            assert time.monotonic() < deadline, files(disk)
        (disk / "theirs").unlink()
        wait("step-2", address=daemon.address, timeout=60)
        daemon.kill()
        stored = assert_whole_or_absent(disk / "store")
        assert {id: state["step"] for id, state in stored.items()} == {"step-1": 1, "step-2": 2}


def test_retention_makes_room_on_a_full_disk(tmp_path: Path) -> None:
    with (
        small_tmpfs("24m") as disk,
        DaemonProcess(str(disk / "store"), "--keep-last", "1", "--delete-grace", "0s") as daemon,
    ):
        for step in range(1, 6):
            save(daemon, step)
            wait(f"step-{step}", address=daemon.address, timeout=60)
        load(daemon, 5)


def test_shared_memory_that_is_full_fails_the_save_on_all_ranks_with_the_numbers(tmp_path: Path) -> None:
    """Two ranks of 10 MiB through 16: the first gets its memory, the second does not, and neither keeps any."""
    with DaemonProcess(str(tmp_path / "store"), "--open-timeout", "2s", memory="16MiB") as daemon:
        save(daemon, 1, 4 * MiB)
        wait("step-1", address=daemon.address, timeout=60)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, daemon.address]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, env={**os.environ, "CKPTD_SAVE_TIMEOUT": "2"}, check=False
        )
        assert done.returncode == 0, done.stderr
        for rank in (0, 1):
            assert re.search(rf"rank {rank}: \[[01]\] ArenaFull: no room for 10.0 MiB: the shards .* need 20.0 MiB", done.stdout)
        load(daemon, 1, 4 * MiB)
        save(daemon, 2, 4 * MiB)
        load(daemon, 2, 4 * MiB)
        assert sorted(daemon.list()) == ["step-1", "step-2"]
        channel._daemons.pop(daemon.address).close()
        assert_accounts_balance(daemon)


def test_a_shm_dir_of_1_mib_is_refused_and_one_that_others_fill_is_no_sigbus(tmp_path: Path) -> None:
    """More of this in tests/limits/test_small_tmpfs.py."""
    with small_tmpfs("1m") as shm_dir:
        daemon = DaemonProcess(str(tmp_path / "store"), memory="16MiB")
        try:
            daemon.shm_dir.rmdir()
            daemon.shm_dir = shm_dir
            with pytest.raises(RuntimeError, match=r"is more than the 1\.0 MiB"):
                daemon.start()
        finally:
            daemon.remove()


class Together(dcp.DefaultSavePlanner):
    """Copies when the other rank waits for memory: what is sealed is kept as long as somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn in self.seen:  # the first time it is only looked at
            with grpc.insecure_channel(sys.argv[1]) as connection:
                until("the other rank waits", lambda: DaemonStub(connection).Status(StatusRequest(), timeout=60).waiting)
        self.seen.add(write_item.index.fqn)
        return super().resolve_data(write_item)


def main() -> None:
    """Each of two ranks: saves 10 MiB, and says what it was told."""
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    try:
        state = {f"t{rank}": torch.ones(10 * MiB // 4 - 10_000)}
        dcp.save(state, storage_writer=DaemonStorageWriter("step-9", address=sys.argv[1]), planner=Together())
    except CheckpointException as failed:
        told = (f"[{number}] {type(why).__name__}: {why}" for number, (why, _) in failed.failures.items())
        os.write(1, f"rank {rank}: {'; '.join(told)}\n".encode())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
