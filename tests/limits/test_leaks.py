"""Many saves, loads and trainers that come and go leave nothing behind: no memory, descriptors, threads or segments."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from daemons import DaemonProcess
from invariants import assert_accounts_balance, on_tmpfs_at_once

TRAINER = str(Path(__file__).with_name("saving_trainer.py"))
MIB = 1024 * 1024


def held_by(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def assert_steady(samples: Sequence[dict[str, int]], slack: dict[str, int]) -> None:
    """The last tenth holds as much as the second one, but for `slack`: the first saves fill pools and caches."""
    tenth = max(3, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]
    for name, more in slack.items():
        before, after = (statistics.median(sample[name] for sample in part) for part in (early, late))
        assert after <= before + more, (name, before, after)


class Sampling(threading.Thread):
    """Looks at the tmpfs all the time."""

    def __init__(self, look: Callable[[], int]) -> None:
        super().__init__()
        self.look = look
        self.highest = 0
        self.looks = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.002):
            self.highest = max(self.highest, self.look())
            self.looks += 1


def trainer(daemon: DaemonProcess, first: int, count: int, *, kill: bool) -> list[dict[str, int]]:
    """What one trainer says of itself after each save; killed after the last one, or left to end."""
    process = subprocess.Popen([sys.executable, TRAINER, daemon.address, str(first), str(count), "16"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        samples = [json.loads(process.stdout.readline()) for _ in range(count)]
        if kill:
            process.kill()
        assert process.wait(90) == (-9 if kill else 0)
    return samples


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_grows_over_many_saves_with_trainers_that_come_and_go(tmp_path: Path) -> None:
    each = 100
    memory = 24 * MIB
    arguments = ("--keep-last", "2", "--delete-grace", "0s", "--orphan-age", "0s")
    with DaemonProcess(str(tmp_path / "store"), *arguments, memory=str(memory)) as daemon:
        of_daemon = []
        sampling = Sampling(lambda: on_tmpfs_at_once(daemon.shm_dir))
        sampling.start()
        try:
            for number in range(5):
                of_trainer = trainer(daemon, 1 + number * each, each, kill=number % 2 == 0)
                assert_steady(of_trainer, {"rss": 8 * MIB, "threads": 2, "fds": 2, "mappings": 2})
                of_daemon.append(held_by(daemon.pid))
        finally:
            sampling.ended.set()
            sampling.join()
        assert sampling.looks > 100
        assert 0 < sampling.highest <= memory
        for name, slack in {"rss": 16 * MIB, "threads": 8, "fds": 4}.items():
            # The second trainer's end against the last one's: threads of pools and gRPC's buffers come with the first.
            assert of_daemon[-1][name] <= of_daemon[1][name] + slack, (name, of_daemon)
        daemon.until(f"run/step-{5 * each}", "durable")
        assert_accounts_balance(daemon)
        assert len(list(daemon.shm_dir.iterdir())) < 40
        assert len(daemon.list()) <= 3


@pytest.mark.timeout(400)
def test_five_thousand_tensors_under_256_descriptors(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 256 && exec "$@"', "--"]
    with DaemonProcess(str(tmp_path / "store"), launcher=limited) as daemon:
        assert "Max open files            256" in Path(f"/proc/{daemon.pid}/limits").read_text()
        for first in (5, 10):  # what the second one loads was saved by itself; in between the store is all there is
            command = [*limited, sys.executable, TRAINER, daemon.address, str(first), "1", "5000"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            assert json.loads(done.stdout)["fds"] < 64
            assert daemon.terminate() == 0
            for path in daemon.shm_dir.iterdir():
                path.unlink()
            daemon.start()
            assert daemon.cli("verify", f"run/step-{first}").returncode == 0
