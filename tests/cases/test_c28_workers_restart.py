"""C28: workers die and come back while the daemon still stores what they saved: nothing is lost, mixed up or left over."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter
from daemons import FAULTY, DaemonProcess
from invariants import assert_accounts_balance, assert_promises_kept, assert_whole_or_absent, status

WORLD = 2
NUMEL = 300_000


class Workers:
    """Ranks that are forked from a process which has imported everything, so that they can die and come back in no time."""

    def __init__(self, address: str, home: Path) -> None:
        self.address = address
        self.home = home
        self.nursery = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pids: list[int] = []
        self.number = 0
        self.answers: dict[int, Any] = {}

    def start(self, **task: Any) -> None:
        """New workers, each with this task; see `work`."""
        self.number += 1
        self.answers = {}
        assert self.nursery.stdin is not None
        meeting = str(self.home / f"meeting-{self.number}")
        self.nursery.stdin.write(json.dumps({"address": self.address, "number": self.number, "meeting": meeting, **task}) + "\n")
        self.nursery.stdin.flush()
        while not self.pids:
            self.listen()

    def listen(self) -> None:
        """What a worker says, or the nursery; a worker of before may have said something before it was killed."""
        assert self.nursery.stdout is not None
        number, said = json.loads(self.nursery.stdout.readline())
        if number == self.number and "pids" in said:
            self.pids = said["pids"]
        elif number == self.number:
            self.answers[said["rank"]] = said["value"]

    def done(self) -> list[Any]:
        """What each has found and done; they live on."""
        while len(self.answers) < WORLD:
            self.listen()
        return [self.answers[rank] for rank in range(WORLD)]

    def kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        os.killpg(self.nursery.pid, signal.SIGKILL)
        with self.nursery:
            pass


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """Each object takes its time, so that a flush outlives the workers whose save it is."""
    path = tmp_path / "control"
    path.write_text('{"delay_seconds": 0.2}')
    return path


@pytest.fixture
def daemon(tmp_path: Path, control: Path) -> Iterator[DaemonProcess]:
    arguments = ("--open-timeout", "3s")
    env = {"FAULTY_CONTROL": str(control)}
    with DaemonProcess(f"faulty://{tmp_path}/store", *arguments, program=FAULTY, memory="32MiB", env=env) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cycles", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_killed_workers_have_saved_becomes_durable_and_their_successors_go_on_at_once(
    tmp_path: Path, daemon: DaemonProcess, control: Path, cycles: int
) -> None:
    slowly = control.read_text()
    control.write_text('{"hold_after": 0}')
    segments: list[int] = []
    with Workers(daemon.address, tmp_path) as workers:
        for cycle in range(cycles):
            workers.start(load="run/latest" if cycle else "", save=f"run/step-{10 * (cycle + 1)}", value=cycle + 1)
            assert workers.done() == [cycle or None] * WORLD  # what they have found is the last one, whether it is durable or not
            if cycle == 0:
                assert not (tmp_path / "store/run/step-10/.metadata").exists()
            workers.kill()
            control.write_text(slowly)
            segments.append(status(daemon).segments)
        workers.start(load="run/latest")
        assert workers.done() == [cycles] * WORLD
        workers.kill()

        def load(id: str) -> int:
            workers.start(load=id)
            found = set(workers.done())
            workers.kill()
            return int(found.pop())

        accepted = {f"run/step-{10 * (cycle + 1)}": cycle + 1 for cycle in range(cycles)}
        last_two = dict(list(accepted.items())[-2:])
        assert_promises_kept(last_two, load, lambda id: daemon.until(id, "durable"))
        for id in accepted:
            daemon.until(id, "durable")
        balanced = assert_accounts_balance(daemon)
        assert balanced.leases == 0
        # The memory keeps what was accepted, as much of it as there is room for; what only dead workers could use is gone.
        deadline = time.monotonic() + 30
        while left := [path.name for path in daemon.shm_dir.iterdir() if path.suffix in (".open", ".spare")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert 0 < len(sealed(daemon)) <= cycles * (WORLD + 1), sorted(daemon.shm_dir.iterdir())
    if cycles > 8:
        assert statistics.median(segments[-4:]) <= statistics.median(segments[4:8]), segments
    for id, state in assert_whole_or_absent(tmp_path / "store").items():
        assert all(torch.equal(state[f"t{rank}"], part(rank, accepted[id])) for rank in range(WORLD))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_worker_killed_in_its_copy_leaves_nothing_and_the_step_is_saved_by_the_next(
    tmp_path: Path, daemon: DaemonProcess, at_once: bool
) -> None:
    with Workers(daemon.address, tmp_path) as workers:
        workers.start(save="run/step-10", value=1, dies=1, go=str(tmp_path / "go"))
        deadline = time.monotonic() + 60
        # One has handed over, which is kept as long as the other one writes; then that one is dead.
        for has_happened in (lambda: sealed(daemon), lambda: not Path(f"/proc/{workers.pids[1]}").exists()):
            while not has_happened():
                assert time.monotonic() < deadline, status(daemon)
                time.sleep(0.02)
            (tmp_path / "go").touch()
        workers.kill()
        if not at_once:
            deadline = time.monotonic() + 30
            while status(daemon).segments:  # nobody comes back for it
                assert time.monotonic() < deadline, status(daemon)
                time.sleep(0.1)
            assert_accounts_balance(daemon)
            assert daemon.list() == {}
        workers.start(save="run/step-10", value=2)
        assert workers.done() == [None] * WORLD
        workers.kill()
        daemon.until("run/step-10", "durable")
        workers.start(load="run/step-10")
        assert workers.done() == [2] * WORLD
        workers.kill()
        assert_accounts_balance(daemon)


def sealed(daemon: DaemonProcess) -> set[str]:
    """Tokens of what has been handed over and is held."""
    return {path.stem for path in daemon.shm_dir.glob("*.sealed")}


# --- what the workers run ------------------------------------------------------------------------------------------


def part(rank: int, value: int) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.int32) * (rank + 1) + value


class Dying(dcp.DefaultSavePlanner):
    """Is killed in the middle of its copy, when a file is there."""

    def __init__(self, go: Path) -> None:
        super().__init__()
        self.go = go
        self.seen: set[str] = set()

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn in self.seen:  # the first time it is only looked at
            while not self.go.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.add(write_item.index.fqn)
        return super().resolve_data(write_item)


def work(rank: int, task: dict[str, Any]) -> int | None:
    """Loads, if told so, and says which value it found after comparing all of it; then saves, if told so."""
    dist.init_process_group("gloo", init_method=f"file://{task['meeting']}", rank=rank, world_size=WORLD)
    value = None
    if task.get("load"):
        found: dict[str, Any] = {f"t{number}": torch.zeros(NUMEL, dtype=torch.int32) for number in range(WORLD)} | {"value": -1}
        dcp.load(found, storage_reader=DaemonStorageReader(task["load"], address=task["address"]))
        value = int(found["value"])
        assert all(torch.equal(found[f"t{number}"], part(number, value)) for number in range(WORLD))
    if task.get("save"):
        state = {f"t{rank}": part(rank, task["value"]), "value": task["value"]}
        planner = Dying(Path(task["go"])) if task.get("dies") == rank else dcp.DefaultSavePlanner()
        dcp.save(state, storage_writer=DaemonStorageWriter(task["save"], address=task["address"]), planner=planner)
    return value


def main() -> None:
    """The process that workers are forked from."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        task = json.loads(line)
        pids = []
        for rank in range(WORLD):
            if (pid := os.fork()) == 0:
                answer: Any = None
                try:
                    answer = work(rank, task)
                except BaseException as exc:  # noqa: BLE001 - the test is told of all
                    answer = repr(exc)
                os.write(1, (json.dumps([task["number"], {"rank": rank, "value": answer}]) + "\n").encode())
                while True:
                    signal.pause()
            pids.append(pid)
        print(json.dumps([task["number"], {"pids": pids}]), flush=True)


if __name__ == "__main__":
    main()
