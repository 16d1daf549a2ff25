"""What a save has to know of the store before it is accepted, although the store may be away.

Promises: of each run the store is asked for its newest attempt, until it has answered; a save waits for the store once per
run, and once more each time that the store stops to answer, at most LEARN_SECONDS. All other asking goes on in the
background, one question per run at a time, and nobody waits for it. Lives on the loop; what blocks runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from ckptd import errors
from ckptd.ledger import Ledger
from ckptd.scan import Entry

log = logging.getLogger(__name__)
T = TypeVar("T")
#: How long a save waits for the store's answer.
LEARN_SECONDS: Final = 1.5


class Learning:
    """`learned` is told of the newest attempt of a run that the store has: (run, attempt)."""

    def __init__(self, ledger: Ledger, threads: Executor, learned: Callable[[str, str], None]) -> None:
        self._ledger = ledger
        self._threads = threads
        self._tell = learned
        self._asking: dict[str, asyncio.Future[Entry]] = {}
        self._known: set[str] = set()
        self._until: dict[str, float] = {}  # loop time when the first wait for an answer ends
        self._away: set[str] = set()  # has been waited for, in vain, since it last answered

    def begin(self, run: str) -> None:
        """Asks for the run's newest attempt, unless it is known, or asked for already."""
        loop = asyncio.get_running_loop()
        self._until.setdefault(run, loop.time() + LEARN_SECONDS)
        if run not in self._known and run not in self._asking:
            self._asking[run] = asked = loop.run_in_executor(self._threads, self._ledger.latest, run)
            asked.add_done_callback(lambda answer: self._answered(run, answer))

    async def known(self, run: str) -> bool:
        """Whether the store has told the run's newest attempt; since the first question it is given LEARN_SECONDS."""
        self.begin(run)
        if run not in self._known | self._away:
            patience = self._until[run] - asyncio.get_running_loop().time()
            await asyncio.wait([self._asking[run]], timeout=max(0.0, patience))
            if run not in self._known:
                self._wait_no_more(run)
        return run in self._known

    async def ask(self, run: str, question: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question that a save of the run has for the store. Unavailable, at once, while the store is away."""
        self.begin(run)
        if run in self._away:
            raise errors.Unavailable(f"the store {self._ledger.url} does not answer at present")
        try:
            async with asyncio.timeout(LEARN_SECONDS):
                return await question()
        except (TimeoutError, errors.Unavailable, errors.StoreError) as exc:
            self._known.discard(run)  # until it answers again, nobody else waits
            self.begin(run)
            self._wait_no_more(run)
            raise errors.Unavailable(f"the store {self._ledger.url} does not answer: {exc}") from exc

    def _answered(self, run: str, answer: asyncio.Future[Entry]) -> None:
        del self._asking[run]
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            if (newest := answer.result().attempt) is not None:
                self._tell(run, newest)
        elif not isinstance(error, errors.NotFound):  # the next save asks again
            log.warning("the newest checkpoint of run %r in the store is not known: %s", run, error)
            return
        self._known.add(run)
        self._away.discard(run)

    def _wait_no_more(self, run: str) -> None:
        if run not in self._away:
            self._away.add(run)
            log.warning("a save of run %r has waited for the store, which does not answer: saves go on without it until it does", run)
