"""Lets the process fork while a lease is open, without a second's pause.

Before a fork gRPC waits for the thread that polls its open streams, and that thread comes
back only when something arrives, or once a second: a DataLoader that starts eight workers
would stop the trainer for seconds. So, while gRPC waits, something is made to arrive.

Promises: forks are about as fast as without a lease; nothing happens between forks, and
nothing at all in the child. No thread of ours is inside gRPC at the moment of the fork: a
lock that it held there would be held in the child for ever.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

#: The nudge comes this long after the fork has begun: gRPC waits by then.
_PAUSE_SECONDS: Final = 0.001
#: Another one, if it still waits.
_LONG_PAUSE_SECONDS: Final = 0.2
#: A nudge takes far less; a fork is never held up longer than this by one that is stuck.
_STUCK_SECONDS: Final = 1.0


class Nudge:
    """Something that makes an event arrive on a channel that has been used already; done while this object lives."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        self.arrive = arrive
        _register_first()
        _watch.add(self)


class _Watch:
    """The thread that nudges, one per process and none before the first `Nudge`."""

    def __init__(self) -> None:
        self._nudges: WeakSet[Nudge] = WeakSet()
        self._waiting = threading.Event()
        self._over = threading.Event()
        #: Held while a nudge is given, and across the fork itself.
        self._inside = threading.Lock()
        self._thread: threading.Thread | None = None
        self._answers: list[object] = []
        self._held = False

    def add(self, nudge: Nudge) -> None:
        with self._inside:
            self._nudges.add(nudge)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckptd-fork", daemon=True)
                self._thread.start()

    def begin(self) -> None:
        """A fork begins; gRPC is about to wait."""
        self._over.clear()
        self._waiting.set()

    def hold(self) -> None:
        """GRPC waits no longer; the fork itself comes next."""
        self._waiting.clear()
        self._over.set()
        self._held = self._inside.acquire(timeout=_STUCK_SECONDS)

    def end(self) -> None:
        """The fork is over, in the parent."""
        if self._held:
            self._inside.release()

    def _run(self) -> None:
        while True:
            self._waiting.wait()
            pause = _PAUSE_SECONDS
            while not self._over.wait(pause) and self._waiting.is_set():
                with self._inside:
                    if self._waiting.is_set():
                        # Held until the next fork: a call that is dropped unanswered is cancelled, which is work inside gRPC.
                        self._answers = [nudge.arrive() for nudge in list(self._nudges)]
                pause = _LONG_PAUSE_SECONDS


_watch = _Watch()


def _begin() -> None:
    _watch.begin()


def _hold() -> None:
    _watch.hold()


def _end() -> None:
    _watch.end()


def _start_anew() -> None:
    global _watch  # noqa: PLW0603 - the parent's thread may have held its locks, and is not here
    _watch = _Watch()


# What is registered last runs first, before a fork. gRPC registers itself, and its waiting, with its first channel: `_hold`
# comes after it, `_begin` before it. Should gRPC have been there already, `_hold` follows `_begin` at once: no nudge, no harm.
os.register_at_fork(before=_hold, after_in_parent=_end, after_in_child=_start_anew)


@cache
def _register_first() -> None:
    os.register_at_fork(before=_begin)
