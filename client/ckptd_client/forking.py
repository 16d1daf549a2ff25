"""Lets the process fork while a lease is open, without a second's pause.

Before a fork gRPC waits for the thread that polls its open streams, and that thread comes
back only when something arrives, or once a second: a DataLoader that starts eight workers
would stop the trainer for seconds. So, while a fork waits, something is made to arrive.

Promises: forks are as fast as without a lease (milliseconds); nothing happens between
forks, and nothing at all in the child. It never delays or refuses a fork.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

#: The nudge comes this long after the fork has begun: gRPC has begun to wait by then.
_PAUSE_SECONDS: Final = 0.001
#: Another one, if the fork still waits. Not soon: no call should be on its way when the fork happens.
_LONG_PAUSE_SECONDS: Final = 0.2


class Nudge:
    """Something that makes an event arrive on a channel that has been used already; done while this object lives."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        self.arrive = arrive
        _register()
        _watch.add(self)


class _Watch:
    """The thread that nudges, one per process and none before the first `Nudge`."""

    def __init__(self) -> None:
        self._nudges: WeakSet[Nudge] = WeakSet()
        self._forking = threading.Event()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, nudge: Nudge) -> None:
        with self._lock:
            self._nudges.add(nudge)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckptd-fork", daemon=True)
                self._thread.start()

    def begin(self) -> None:
        self._done.clear()
        self._forking.set()

    def end(self) -> None:
        self._forking.clear()
        self._done.set()

    def _run(self) -> None:
        while True:
            self._forking.wait()
            pause, answers = _PAUSE_SECONDS, []
            # The answers are held: a call that is dropped is cancelled from this thread, in the middle of the fork.
            while self._forking.is_set() and not self._done.wait(pause):
                answers.extend([nudge.arrive() for nudge in list(self._nudges)])
                pause = _LONG_PAUSE_SECONDS


_watch = _Watch()


@cache
def _register() -> None:
    # Not at import: what is registered last runs first, and gRPC registers itself, and waits, with its first channel.
    os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_start_anew)


def _begin() -> None:
    _watch.begin()


def _end() -> None:
    _watch.end()


def _start_anew() -> None:
    global _watch  # noqa: PLW0603 - the parent's thread may have held its locks, and is not here
    _watch = _Watch()
