"""What saves learn from the store, which may be away: who waits for it, and who does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.errors import NotFound, Unavailable
from ckptd.learning import Learning
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.scan import Entry
from ckptd.store import Children

#: No test lasts so long: who waits does it for ever.
FOR_EVER = 3600.0


class Hanging(LocalStore):
    """A directory on a share that does not answer while `there` is not set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.there = threading.Event()
        self.asked = 0

    def children(self, directory: str = "") -> Children:
        self.asked += 1
        self.there.wait(20)  # so that a test that fails ends
        return super().children(directory)


@pytest.fixture
def store(tmp_path: Path) -> Hanging:
    return Hanging(tmp_path)


@contextmanager
def learns(store: Hanging) -> Iterator[Learning]:
    """What learns from the store; in the end that answers, whatever went wrong, so that no thread stays."""
    with ThreadPoolExecutor(4) as threads:
        try:
            yield Learning(Ledger(store), threads, lambda *_: None)
        finally:
            store.there.set()


async def until_known(learning: Learning) -> None:
    while not await learning.known("run"):  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)


async def nothing() -> None:
    raise NotFound("nothing of that name")


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.timeout(30)
def test_the_store_is_waited_for_once_and_asked_on_without_anybody_waiting(store: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waits = asyncio.wait, list[float]()

    async def in_vain(answers: list[asyncio.Future[Entry]], **patience: float) -> None:
        """However slow this machine is, a wait begins in time, and soon is over."""
        waits.append(patience["timeout"])
        await wait(answers, timeout=0.01)

    async def run() -> None:
        monkeypatch.setattr("ckptd.learning.LEARN_SECONDS", FOR_EVER)
        monkeypatch.setattr("ckptd.learning.asyncio.wait", in_vain)
        with learns(store) as learning:
            assert not await learning.known("run")
            assert not await learning.known("run")
            assert len(waits) == 1
            with pytest.raises(Unavailable, match="does not answer"):
                await learning.ask("run", never)
            assert store.asked == 1, "one question at a time"
            store.there.set()
            await until_known(learning)
            with pytest.raises(NotFound):
                await learning.ask("run", nothing)

    asyncio.run(run())


@pytest.mark.timeout(30)
def test_a_store_that_stops_to_answer_is_waited_for_once_more(store: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        with learns(store) as learning:
            store.there.set()
            monkeypatch.setattr("ckptd.learning.LEARN_SECONDS", FOR_EVER)
            await learning.known("run")
            store.there.clear()
            monkeypatch.setattr("ckptd.learning.LEARN_SECONDS", 0.01)
            with pytest.raises(Unavailable):
                await learning.ask("run", never)
            monkeypatch.setattr("ckptd.learning.LEARN_SECONDS", FOR_EVER)
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await learning.ask("run", never)
            store.there.set()
            await until_known(learning)

    asyncio.run(run())


@pytest.mark.timeout(30)
def test_a_save_that_comes_to_the_question_when_the_time_for_it_is_over_waits_for_nothing(
    store: Hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of many bytes lies between the beginning of a save and its commit."""

    async def run() -> None:
        with learns(store) as learning:
            monkeypatch.setattr("ckptd.learning.LEARN_SECONDS", 0.0)
            learning.begin("run")
            assert not await learning.known("run")
            assert "saves go on without it" in caplog.text
            monkeypatch.setattr("ckptd.learning.LEARN_SECONDS", FOR_EVER)
            with pytest.raises(Unavailable, match="does not answer"):
                await learning.ask("run", never)

    asyncio.run(run())
