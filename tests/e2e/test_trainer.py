"""The reference trainer under a real torchrun and a real daemon: killed, resumed at another world size, refused."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import pytest

from ckptd_worker.children import Child
from daemons import FAULTY, DaemonProcess
from hosts import Hosts
from worlds import MEETING, meeting_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SMALL = ["--width", "64", "--layers", "2", "--save-every", "4"]
#: Within that any trainer has started, and gone its few steps: a launch of several imports torch in each of them.
PATIENCE_SECONDS = 200
pytestmark = pytest.mark.timeout(500)
LOSS = re.compile(r"\[train\] step (\d+) loss (\S+)")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts a trainer at so many workers; kills what is left of it at the end."""
    children: list[Child] = []

    def start(workers: int, *arguments: str, **env: str) -> Child:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
        child = Child(
            f"trainer at {workers}",
            [sys.executable, *launch, "-m", "ckptd_worker.train", *SMALL, *arguments],
            log=tmp_path / f"trainer{len(children)}.log",
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path), **env},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()


def losses(child: Child) -> dict[int, float]:
    """Step to mean loss over the global batch, as printed."""
    return {int(found[1]): float(found[2]) for line in child.lines() if (found := LOSS.match(line))}


def steps_of(child: Child, word: str) -> list[int]:
    """Steps of the checkpoints that the trainer says it `word`: "saved" or "resumed"."""
    return [int(found[1]) for line in child.lines() if (found := re.match(rf"\[train\] {word} gpt/step-(\d+) ", line))]


def test_a_trainer_killed_at_2_workers_goes_on_at_3_and_computes_the_same(tmp_path: Path, start: Callable[..., Child]) -> None:
    with DaemonProcess(str(tmp_path / "store"), memory="128MiB") as daemon:
        first = start(2, "--steps", "10000", CKPTD_ADDRESS=daemon.address)
        first.until(
            "two checkpoints and two more steps",
            lambda: len(steps_of(first, "saved")) >= 2 and max(losses(first)) % 4 >= 2,
            timeout=PATIENCE_SECONDS,
            every=0.002,
        )
        first.kill()
        assert "[train] run gpt has no checkpoint: starting afresh at 2 workers" in first.lines()
        last = steps_of(first, "saved")[-1]
        before = losses(first)

        second = start(3, "--steps", str(max(before) + 3), CKPTD_ADDRESS=daemon.address)
        second.finish(timeout=PATIENCE_SECONDS)
        (resumed,) = steps_of(second, "resumed")
        after = losses(second)

    assert resumed >= last > 0
    assert min(after) == resumed + 1
    assert steps_of(second, "saved")[-1] == max(after) == max(before) + 3
    # The same weights, moments and samples: the steps that were lost give the same losses again.
    again = before.keys() & after.keys()
    assert {step: after[step] for step in again} == pytest.approx({step: before[step] for step in again}, abs=5e-3)
    assert 5.3 < before[1] < 5.8  # ln 256: it knows nothing yet
    assert max(after.values()) < before[1] - 0.5


def test_a_trainer_does_not_start_afresh_when_no_daemon_answers(tmp_path: Path, start: Callable[..., Child]) -> None:
    trainer = start(1, "--steps", "2", CKPTD_ADDRESS=f"unix:{tmp_path}/nobody.sock", CKPTD_CONNECT_TIMEOUT="1")

    assert trainer.process.wait(PATIENCE_SECONDS) == 3
    assert not losses(trainer)
    assert any("cannot tell whether run gpt has a checkpoint" in line for line in trainer.lines())


def test_a_trainer_that_waits_for_durability_outlives_a_killed_daemon(tmp_path: Path, start: Callable[..., Child]) -> None:
    with DaemonProcess(str(tmp_path / "store"), memory="128MiB") as daemon:
        trainer = start(1, "--steps", "4", CKPTD_ADDRESS=daemon.address)
        trainer.until("the last save is accepted", lambda: steps_of(trainer, "saved") == [4], timeout=PATIENCE_SECONDS, every=0.001)
        daemon.restart()

        trainer.finish(timeout=PATIENCE_SECONDS)
    assert any(line.startswith("[train] gpt/step-4 is durable") for line in trainer.lines())
    assert (tmp_path / "store" / "gpt" / "step-4" / ".metadata").exists()


@pytest.mark.slow
def test_workers_on_a_new_node_go_on_from_what_only_another_nodes_memory_has(tmp_path: Path, start: Callable[..., Child]) -> None:
    control = tmp_path / "control"
    control.write_text('{"raise": "ENOSPC"}')
    store = f"faulty://{tmp_path / 'store'}"
    with Hosts(2, store, memory="128MiB", peers=False, program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        first = start(1, "--steps", "10000", CKPTD_ADDRESS=hosts[0].address)
        first.until("a checkpoint", lambda: bool(steps_of(first, "saved")), timeout=PATIENCE_SECONDS, every=0.002)
        first.kill()
        last = steps_of(first, "saved")[-1]
        place = meeting_place()
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port), **MEETING}
        second, other = (
            start(1, "--steps", str(last + 2), RANK=str(rank), CKPTD_ADDRESS=hosts[1 - rank].address, **meeting) for rank in range(2)
        )
        second.until("it has resumed", lambda: bool(steps_of(second, "resumed")), timeout=PATIENCE_SECONDS)
        control.write_text("{}")
        second.finish(timeout=PATIENCE_SECONDS)
        other.finish(timeout=PATIENCE_SECONDS)
    assert steps_of(second, "resumed") >= [last]
