"""A clock that stands still while this process does: that others did not answer meanwhile says nothing about them.

Promises: never goes back, and never faster than the machine's monotonic clock. Somebody has to tick, once a second.
"""

from __future__ import annotations

import time
from typing import Final

#: So much time may pass between two ticks; what is more, the process was stopped, or starved.
STEP_SECONDS: Final = 3.0


class Awake:
    """Seconds that this process has been there for."""

    def __init__(self) -> None:
        self._ticked = time.monotonic()
        self._missed = 0.0

    def now(self) -> float:
        """The time, in seconds since no particular moment."""
        return min(time.monotonic(), self._ticked + STEP_SECONDS) - self._missed

    def tick(self) -> None:
        """The process is there."""
        now = time.monotonic()
        self._missed += max(0.0, now - self._ticked - STEP_SECONDS)
        self._ticked = now
