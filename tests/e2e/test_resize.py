"""An elastic job whose nodes come and go, each with a daemon of its own: it goes on from the newest step there is, bit by bit.

What each worker runs is resize_program.py, which compares what it loads; here stands which step that must be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents import Agents
from daemons import FAULTY
from hosts import Host, Hosts
from invariants import assert_whole_or_absent

PROGRAM = Path(__file__).with_name("resize_program.py")


class Job:
    """The job on its hosts: what it is told, and what it has logged."""

    def __init__(self, hosts: Hosts, agents: Agents, home: Path) -> None:
        self.hosts = hosts
        self.agents = agents
        self.home = home
        self._read = 0

    def tell(self, **plan: Any) -> None:
        """The plan from now on; resize_program.py says what one is. What was logged before it is not looked at any more."""
        self._read = len(self._log())
        (self.home / "plan.new").write_text(json.dumps(plan))
        (self.home / "plan.new").rename(self.home / "plan")

    def join(self, *numbers: int) -> None:
        """Agents start on these hosts, and daemons where none runs."""
        for number in numbers:
            if not self.hosts[number].running:
                self.hosts[number].start()
            self.agents.start(self.hosts[number])

    def lines(self, event: str, *, ever: bool = False, **fields: Any) -> list[dict[str, Any]]:
        """What was logged since the plan was made, or ever."""
        found = [json.loads(line) for line in self._log()[0 if ever else self._read :]]
        return [line for line in found if line["event"] == event and fields.items() <= line.items()]

    def _log(self) -> list[str]:
        log = self.home / "log"
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def resumed(self, world: int) -> int:
        """Waits until all ranks of a world of that size have gone on from a checkpoint, as they found it bit by bit; its step."""

        def whole() -> list[int]:
            steps: dict[str, list[int]] = {}
            for line in self.lines("resumed", world=world):
                steps.setdefault(line["generation"], []).append(line["step"])
            return next((found for found in steps.values() if len(found) == world), [])

        found: list[int] = self.agents.until(f"{world} ranks have resumed", whole, timeout=150)
        assert len(set(found)) == 1, f"a mixture of steps: {found}\n{self.agents.said()}"
        return found[0]

    def saved(self, step: int, world: int) -> None:
        """Waits until the save of that step has returned on all ranks."""
        self.agents.until(
            f"step {step} is saved by {world}", lambda: len(self.lines("saved", step=step, world=world)) >= world, timeout=150
        )

    def listed(self, step: int, states: Collection[str], *, by: Host) -> None:
        """Waits until that host lists the step in one of these states."""

        def is_so() -> bool:
            found = by.daemon.list().get(f"job/step-{step}")
            return found is not None and found["state"] in states

        self.agents.until(f"host {by.number} lists step {step} as {' or '.join(states)}", is_so)

    def host_of(self, rank: int, world: int) -> Host:
        """Where that rank of the last world of that size is."""
        daemon = self.lines("resumed", ever=True, rank=rank, world=world)[-1]["daemon"]
        return next(host for host in self.hosts if host.address == daemon)


class Faulty:
    """A store that all daemons see, and that can be told to fail."""

    def __init__(self, home: Path) -> None:
        self.control = home / "control"
        self.tell()
        #: Arguments of `Hosts`.
        self.daemons = {"store": f"faulty://{home}/store", "program": FAULTY, "env": {"FAULTY_CONTROL": str(self.control)}}

    def tell(self, **troubles: Any) -> None:
        """From now on it has these troubles, and no others; faulty_daemon.py knows which there are."""
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps(troubles))
        new.rename(self.control)


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    return Faulty(tmp_path)


@pytest.fixture
def job_on(tmp_path: Path) -> Callable[..., Any]:
    """A job on so many hosts; the rest goes to `Hosts`."""

    @contextmanager
    def job_on(count: int, **more: Any) -> Iterator[Job]:
        store = more.pop("store", tmp_path / "store")
        with Hosts(count, store, **more) as hosts, Agents(hosts, [str(PROGRAM), str(tmp_path)], home=tmp_path) as agents:
            yield Job(hosts, agents, tmp_path)

    return job_on


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_goes_on_from_its_newest_step_at_2_4_3_and_1_nodes(tmp_path: Path, faulty: Faulty, job_on: Callable[..., Any]) -> None:
    faulty.tell(hold_after=0)  # nothing reaches the store
    with job_on(4, replicas=1, running=2, **faulty.daemons) as job:
        job.tell(worlds=[2], until=3)
        job.join(0, 1)
        assert job.resumed(2) == 0
        job.saved(3, 2)

        # Two nodes join, whose daemons have nothing: what they need comes out of the memory of the others.
        job.tell(worlds=[4], until=5)
        job.join(2, 3)
        assert job.resumed(4) == 3
        for number in (2, 3):
            assert job.hosts[number].bytes_from()["peer"] > 0
        job.saved(5, 4)

        # The node of the coordinator is lost with its memory: all that is left of its shard is another's copy.
        lost = job.host_of(0, 4)
        job.listed(5, ["replicated"], by=next(host for host in job.hosts if host is not lost))
        job.tell(worlds=[3], until=7)
        lost.lose(wipe=True)
        assert job.resumed(3) == 5
        job.saved(7, 3)
        assert job.hosts.bytes_from()["store"] == 0

        # Two at once are more than one copy is good for: what counts then is the store.
        faulty.tell()
        last, *others = [host for host in job.hosts if host.running]
        job.listed(7, ["durable"], by=last)
        job.tell(worlds=[1], until=8)
        for host in others:
            host.lose(wipe=True)
        assert job.resumed(1) == 7
        job.saved(8, 1)

        job.listed(8, ["durable"], by=last)
        job.tell(end=True)
        job.agents.finish()
    found = assert_whole_or_absent(tmp_path / "store")
    assert {"job/step-7", "job/step-8"} <= found.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_that_come_and_go_in_the_middle_of_saves_cost_no_step_that_others_hold(tmp_path: Path, job_on: Callable[..., Any]) -> None:
    with job_on(3, replicas=1, running=2) as job:
        job.tell(worlds=[2], until=sys.maxsize)
        job.join(0, 1)
        job.saved(4, 2)

        # Whoever was interrupted in a save may have had it accepted or not.
        job.join(2)
        resumed = job.resumed(3)
        assert max(line["step"] for line in job.lines("saved")) <= resumed <= max(line["step"] for line in job.lines("saving"))

        job.tell(worlds=[3], until=sys.maxsize)
        job.saved(resumed + 3, 3)
        lost = job.host_of(0, 3)
        job.listed(resumed + 3, ["replicated", "durable"], by=next(host for host in job.hosts if host is not lost))
        lost.lose(wipe=True)
        again = job.resumed(2)
        assert resumed + 3 <= again <= max(line["step"] for line in job.lines("saving"))

        job.tell(worlds=[2], until=again + 1)
        job.saved(again + 1, 2)
        job.tell(end=True)
        job.agents.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_c27_a_node_lost_with_the_only_copy_takes_the_job_back_to_the_newest_whole_step(
    tmp_path: Path, faulty: Faulty, job_on: Callable[..., Any]
) -> None:
    with job_on(3, **faulty.daemons) as job:
        job.tell(worlds=[3], until=2)
        job.join(0, 1, 2)
        assert job.resumed(3) == 0
        job.saved(2, 3)
        job.listed(2, ["durable"], by=job.hosts[0])

        # From now on nothing reaches the store. A worker that crashes loses nothing: all of step 4 is in memory.
        faulty.tell(hold_after=0)
        job.tell(worlds=[3], until=4, crash=[4, 1])
        assert job.resumed(3) == 4

        # Of steps 3 and 4 a third is gone; two thirds of them, and a third of step 2, would load just as well.
        lost = job.host_of(1, 3)
        job.tell(worlds=[2], until=5)
        lost.lose(wipe=True)
        assert job.resumed(2) == 2
        job.saved(5, 2)

        faulty.tell()
        left = next(host for host in job.hosts if host.running)
        job.listed(5, ["durable"], by=left)
        job.tell(end=True)
        job.agents.finish()
    assert {"job/step-2", "job/step-5"} <= assert_whole_or_absent(tmp_path / "store").keys()
