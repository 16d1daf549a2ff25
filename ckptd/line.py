"""The line of those who wait for memory: strictly first come, first served.

Promises: whoever stands in it leaves it with an outcome, by deadline or by cancellation,
never by being forgotten, and says so in the log if it takes long. Who gets what, and
when, is the arena's affair. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptd.errors import ArenaFull, CkptdError, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ckptd.segment import Segment

#: Tokens of segments, as things stand.
Tokens: TypeAlias = "Callable[[], Collection[str]]"
#: Who waits longer than this is written into the log.
PATIENCE_SECONDS: Final = 1.0
#: A segment may be this much (in bytes) larger than twice what is asked for, and still be reused for it.
WASTE_NBYTES: Final = 64 * 1024 * 1024

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Waiter:
    """A request for room: for a new segment, or for `nbytes` more of a cache."""

    nbytes: int
    owner: str = ""
    metadata: bool = False
    cache: Segment | None = None
    #: The segment, and whether its pages are still to be made.
    granted: asyncio.Future[tuple[Segment, bool]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Tokens of what is not evicted for it, although it would be for others.
    sparing: Tokens = tuple
    #: Tokens of what the save that it is for holds already, and needs beside it.
    beside: Tokens = tuple

    def fits(self, segment: Segment) -> bool:
        """Whether a segment may serve: of its kind, large enough, and not a waste."""
        if self.cache is not None or segment.state == "cache" or segment.metadata != self.metadata:
            return False
        return self.nbytes <= segment.nbytes <= 2 * self.nbytes + WASTE_NBYTES


class Line:
    """Iterating gives who waits, the first first; the line may change meanwhile."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.copy())

    def head(self) -> Waiter | None:
        """Whose turn it is."""
        return self._waiters[0] if self._waiters else None

    def ahead_of(self, waiter: Waiter) -> int:
        """How many came earlier."""
        return self._waiters.index(waiter)

    def join(self, waiter: Waiter) -> None:
        """Stands at the end."""
        self._waiters.append(waiter)

    def settle(self, waiter: Waiter, outcome: tuple[Segment, bool] | CkptdError) -> bool:
        """Ends a wait; True, for it can always be done once."""
        self._waiters.remove(waiter)
        if isinstance(outcome, CkptdError):
            waiter.granted.set_exception(outcome)
        else:
            waiter.granted.set_result(outcome)
        return True

    async def wait(self, waiter: Waiter, deadline: float | None, shortage: Callable[[Waiter], tuple[str, str]]) -> None:
        """Returns once the wait is settled; it is by then, as ArenaFull, at `deadline` (loop time; None: never).

        `shortage` says what there is no room for and why, and what to do. Cancelled, the waiter has left the line
        or has been granted something.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        patient_until = began + PATIENCE_SECONDS
        try:
            for until in (patient_until if deadline is None else min(patient_until, deadline), deadline):
                await asyncio.wait([waiter.granted], timeout=None if until is None else max(0.0, until - loop.time()))
                if waiter.granted.done():
                    return
                if deadline is not None and loop.time() >= deadline:
                    break
                _log.warning("%s; waiting", shortage(waiter)[0])
        except asyncio.CancelledError:
            if not waiter.granted.done():
                self._waiters.remove(waiter)
            raise
        why, advice = shortage(waiter)
        self.settle(waiter, ArenaFull(f"{why} (waited {loop.time() - began:.3g} s); {advice}"))


def cache_lost(token: str) -> LeaseLost:
    """What a request for memory of a cache hears that is gone."""
    return LeaseLost(f"cache {token} is not held any more: load again")
