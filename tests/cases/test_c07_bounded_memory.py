"""C07: memory has a cap: beyond it a save waits, or fails clearly; and nothing grows from save to save."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import ArenaFull
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, channel, wait
from daemons import FAULTY, DaemonProcess
from invariants import assert_accounts_balance, on_tmpfs_at_once

MiB = 1024 * 1024
CAP = 64 * MiB
#: What a daemon may hold besides its segments: interpreter, libraries, and the blocks that are being compressed.
OVERHEAD = 96 * MiB
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")


def noise(nbytes: int, step: int) -> torch.Tensor:
    """Which no codec makes smaller: the store takes as long as its rate says."""
    return torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), dtype=torch.int64, generator=torch.Generator().manual_seed(step))


def rss(pid: int | str) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


class Watch(threading.Thread):
    """The most that a daemon takes: its own memory, and what it has on tmpfs."""

    def __init__(self, daemon: DaemonProcess) -> None:
        super().__init__()
        self.pid, self.shm_dir = daemon.pid, daemon.shm_dir
        self.ended = threading.Event()
        self.rss = 0
        self.shared = 0

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.rss = max(self.rss, rss(self.pid))
            self.shared = max(self.shared, on_tmpfs_at_once(self.shm_dir))


@pytest.mark.parametrize(("rate", "patience"), [(16 * MiB, 30), pytest.param(4 * MiB, 1, marks=pytest.mark.slow)], ids=["wait", "fail"])
def test_saves_beyond_the_cap_wait_or_fail_clearly_and_all_that_are_accepted_become_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, patience: int
) -> None:
    """Five of 24 MiB back to back through 64 MiB (of which some is kept for metadata) into a slow store: the third finds it full."""
    monkeypatch.setenv("CKPTD_SAVE_TIMEOUT", str(patience))
    store, control = tmp_path / "store", tmp_path / "control"
    control.write_text(json.dumps({"bytes_per_second": rate}))
    with DaemonProcess(f"faulty://{store}", program=FAULTY, memory="64MiB", env={"FAULTY_CONTROL": str(control)}) as daemon:
        watch = Watch(daemon)
        watch.start()
        accepted, refused, took = [], [], []
        for step in range(5):
            began = time.monotonic()
            try:
                writer = DaemonStorageWriter(f"step-{step}", address=daemon.address)
                dcp.save({"t": noise(24 * MiB, step)}, storage_writer=writer, no_dist=True)
                accepted.append(step)
            except CheckpointException as failed:
                cause = next(iter(failed.failures.values()))[0]
                assert isinstance(cause, ArenaFull), cause
                assert "held by checkpoints that are not durable yet" in str(cause)
                refused.append(step)
            took.append(time.monotonic() - began)
        assert accepted[:2] == [0, 1]
        if patience < 24 * MiB / rate:
            assert refused
        else:
            assert accepted == list(range(5))
            assert sum(took) > 3 * 24 * MiB / rate  # two fit in: the last one has waited until the store had taken three
        for step in accepted:
            wait(f"step-{step}", address=daemon.address, timeout=60)
        watch.ended.set()
        watch.join()
        print(f"accepted {accepted}, refused {refused}; at most {watch.rss // MiB} MiB of its own, {watch.shared // MiB} MiB on tmpfs")
        assert watch.shared <= CAP
        assert watch.rss < CAP + OVERHEAD
        control.write_text("{}")
        for step in accepted:
            found = {"t": torch.zeros(24 * MiB // 8, dtype=torch.int64)}
            dcp.load(found, storage_reader=DaemonStorageReader(f"step-{step}", address=daemon.address), no_dist=True)
            assert torch.equal(found["t"], noise(24 * MiB, step))
        assert sorted(daemon.list()) == [f"step-{step}" for step in accepted]


def test_neither_daemon_nor_trainer_grows_from_the_10th_to_the_50th_save(tmp_path: Path) -> None:
    """Segments are mapped by the trainer and count in its memory, so that the cap has to be full by the 10th."""
    with DaemonProcess(str(tmp_path / "store"), "--codec", "none", "--keep-last", "2", "--delete-grace", "0s", memory="64MiB") as daemon:
        of_daemon, of_trainer = [], []
        with subprocess.Popen([sys.executable, __file__, daemon.address], stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            for line in trainer.stdout:
                of_trainer.append(int(line))
                of_daemon.append(rss(daemon.pid))
        assert trainer.returncode == 0
        # The daemon's allocators keep a few blocks of 4 MiB, one more or less from time to time: 200 saves later it is the same.
        for samples, slack in ((of_daemon, 16 * MiB), (of_trainer, 0)):
            # Over a few saves: one sample may be taken in the middle of a flush.
            early, late = sum(samples[7:13]) / 6, sum(samples[44:50]) / 6
            assert late <= 1.1 * early + slack, samples
        assert_accounts_balance(daemon)


def test_a_shard_larger_than_the_cap_is_refused_at_once_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SAVE_TIMEOUT", "600")  # so long it would wait for memory that can be had: the test would fail before
    with DaemonProcess(str(tmp_path / "store"), memory="64MiB") as daemon:
        with pytest.raises(CheckpointException) as failed:
            dcp.save({"t": torch.zeros(80 * MiB // 4)}, storage_writer=DaemonStorageWriter("step-1", address=daemon.address), no_dist=True)
        cause = next(iter(failed.value.failures.values()))[0]
        assert isinstance(cause, ArenaFull)
        assert "can never fit into 64.0 MiB of memory" in str(cause)
        assert "raise --memory" in str(cause)
        channel._daemons.pop(daemon.address).close()
        assert assert_accounts_balance(daemon).used == 0


def main() -> None:
    """A trainer that saves 8 MiB fifty times, and says after each what it has grown to."""
    warnings.simplefilter("ignore")
    writer = DaemonStorageWriter(address=sys.argv[1])
    state = {"t": torch.zeros(8 * MiB // 4)}
    for step in range(50):
        state["t"].fill_(step)
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        print(rss("self"), flush=True)


if __name__ == "__main__":
    main()
