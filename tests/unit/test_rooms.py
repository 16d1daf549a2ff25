"""What the rooms of one daemon, put together, do as time passes: it passes at the tests' pleasure."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import selectors
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptd import errors, peers, restore, whereabouts
from ckptd.attempt import Attempt
from ckptd.config import Settings
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, mint_attempt, mint_token
from ckptd.restore import LOG_AGAIN_SECONDS
from ckptd.ring import LOST_SECONDS
from ckptd.rooms import Rooms, put_together
from ckptd.sighting import Sighting
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record, Summary
from hosts import free_port, loopback, until

#: Of a `Hasty` loop: so many of its seconds pass in one.
SPEED = 200


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the rooms have their store: nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture
def rooms(store: Path, shm_dir: Path) -> Iterator[Rooms]:
    """A daemon's that keeps the last checkpoint of each run."""
    settings = Settings(store=str(store), listen=(), advertise="127.0.0.1:1", memory=2**24, shm_dir=shm_dir, keep_last=1)
    made = put_together(settings, LocalStore(store))
    yield made
    made.node.close()
    for pool in made.pools:
        pool.shutdown()


class Clock:
    """Stands in for the module `time`: it can be put forward."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the rooms that find out who is there, and what is meant, measure time with."""
    clock = Clock()
    for room in (peers, restore, whereabouts):
        monkeypatch.setattr(room, "time", clock)
    return clock


def failed(rooms: Rooms) -> Attempt:
    """A save that this node took part in and that cannot become durable; the node that holds its other part is away."""
    own = {"node": rooms.node.name, "address": rooms.node.address}
    (elsewhere,) = loopback(1)
    away = Receipt(token=mint_token(), rank=1, node="elsewhere", address=f"{elsewhere.ip}:{free_port(elsewhere.ip)}")
    name = mint_attempt(time.time_ns() // 1000, None)
    rooms.node.apply(
        rooms.node.catalog.accept(
            Record(
                summary=Summary(id="run/step-2", attempt=name),
                shards=[Receipt(token=mint_token(), rank=0, **own), away],
                metadata=Receipt(token=mint_token(), rank=0, **own),
                durable=True,
            )
        )
    )
    rooms.node.catalog.failed(name, "no room in the store")
    return rooms.node.catalog.attempts[name]


def run(rooms: Rooms, work: Coroutine[Any, Any, None]) -> None:
    """In a loop, at whose end the rooms call nobody any more."""

    async def then_close() -> None:
        try:
            await work
        finally:
            await rooms.peers.close()

    asyncio.run(then_close())


# -- loads ----------------------------------------------------------------------------------------------------------


def test_a_node_that_holds_a_part_of_what_failed_is_waited_for_and_not_for_ever(rooms: Rooms, store: Path, clock: Clock) -> None:
    store.mkdir()
    failed(rooms)

    async def resolve() -> None:
        for clock.ahead_seconds in (0.0, LOST_SECONDS / 2):
            with pytest.raises(errors.Unavailable, match=r"run/step-2: .*no room in the store.*retry in some seconds"):
                await rooms.restore.resolve("run")
        clock.ahead_seconds = LOST_SECONDS + 1.0
        with pytest.raises(errors.NotFound, match=r"run/step-2: .*no room in the store"):  # a job may start from nothing
            await rooms.restore.resolve("run")

    run(rooms, resolve())


def test_the_log_says_the_same_of_what_cannot_be_read_once_a_minute(rooms: Rooms, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    attempt = failed(rooms)

    def load(seen: Mapping[str, Sighting], reason: str) -> list[str]:
        """What of an older checkpoint's load comes into the log."""
        caplog.clear()
        attempt.reason = reason
        line = rooms.restore.with_what_is_newer(Checkpoint(summary=Summary(id="run/step-1")), "0", seen)
        assert reason in line.not_reached[0]  # who loads is told each time
        return [record.getMessage() for record in caplog.records if reason in record.getMessage()]

    async def loads() -> None:
        seen = await rooms.restore.whereabouts.survey("run")
        first, second, other = (f"node elsewhere has not answered for {text}" for text in ("9 s", "10 s", "long"))
        assert len(load(seen, first)) == 1
        assert not load(seen, first)
        assert not load(seen, second)
        assert len(load(seen, other)) == 1
        clock.ahead_seconds = LOG_AGAIN_SECONDS / 2
        assert not load(seen, other)
        clock.ahead_seconds = LOG_AGAIN_SECONDS + 1.0
        assert len(load(seen, second)) == 1
        assert not load(seen, first)

    run(rooms, loads())


# -- what is not needed any more ------------------------------------------------------------------------------------


class Hasty(asyncio.SelectorEventLoop):
    """A loop for which `SPEED` seconds pass in one."""

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            return super().select(timeout and timeout / SPEED)

    def __init__(self) -> None:
        super().__init__(self.Selector())

    def time(self) -> float:
        return SPEED * super().time()


class Failures(logging.Handler):
    """When upkeep failed, in the loop's time, and the pause after it that the log has; both in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = asyncio.Queue[tuple[float, float]]()

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"could not be looked after, again in (\d+) s", record.getMessage()):
            self.seen.put_nowait((asyncio.get_running_loop().time(), float(found[1])))


@pytest.fixture
def failures() -> Iterator[Failures]:
    listening = Failures()
    log = logging.getLogger("ckptd.upkeep")
    log.addHandler(listening)
    yield listening
    log.removeHandler(listening)


def test_upkeep_that_fails_pauses_twice_as_long_each_time_up_to_a_minute_until_it_works(
    rooms: Rooms, store: Path, failures: Failures
) -> None:
    async def fails(times: int) -> list[float]:
        """The pauses after the next failures."""
        failures.seen = asyncio.Queue()
        rooms.node.backlog.became_durable(CheckpointId("run", "step-1"))
        seen = [await failures.seen.get() for _ in range(times + 1)]
        for (failed_at, pause), (then, _) in itertools.pairwise(seen):
            assert then - failed_at >= pause
        return [pause for _, pause in seen[:times]]

    async def look() -> None:
        looking = asyncio.create_task(rooms.upkeep.forever())
        assert await fails(8) == [1, 2, 4, 8, 16, 32, 60, 60]
        await asyncio.to_thread(store.mkdir)
        await asyncio.to_thread(until, "it has worked", lambda: not rooms.node.catalog.troubles)
        await asyncio.to_thread(store.rmdir)
        assert await fails(2) == [1, 2]
        looking.cancel()

    with asyncio.Runner(loop_factory=Hasty) as loop:
        loop.run(look())
