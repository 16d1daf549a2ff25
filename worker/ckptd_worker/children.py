"""Processes that the demo starts, kills on purpose, and never leaves behind.

A torchrun agent puts its workers into sessions of their own, so killing a process group
is not enough: `kill` takes the whole tree, read from /proc. Every child's output goes to
one log file, which is also how the demo sees what the child does. Nothing here knows
what the children are for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Unexpected(Exception):
    """Something did not go as it must: the message says what."""


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it ended meanwhile
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for known in found:
        found.extend(parents.get(known, ()))
    return found[1:]


class Child:
    """A running command whose output goes to `log`. `name` is what messages call it."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(  # noqa: S603 - commands of the demo's own
                command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def lines(self) -> list[str]:
        """The whole lines it has printed so far."""
        return self.log.read_text(errors="replace").split("\n")[:-1]

    def until(self, what: str, condition: Callable[[], object], *, timeout: float = 60.0, every: float = 0.02) -> None:
        """Polls `condition` each `every` seconds until it is true.

        Raises Unexpected if the child ends before, or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            code = self.process.poll()
            if code is not None and not condition():
                raise Unexpected(f"{self.name} ended with exit status {code} before: {what}")
            if time.monotonic() > deadline:
                raise Unexpected(f"{self.name} took more than {timeout:.0f} s until: {what}")
            time.sleep(every)

    def finish(self, *, timeout: float = 90.0) -> None:
        """Waits for exit status 0; raises Unexpected for any other, or after `timeout` seconds."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as exc:
            raise Unexpected(f"{self.name} was not done after {timeout:.0f} s") from exc
        if code != 0:
            raise Unexpected(f"{self.name} ended with exit status {code}")

    def kill(self) -> int:
        """SIGKILL to it and all its descendants at once; returns how many processes that were."""
        if self.process.poll() is not None:
            return 0
        self.process.send_signal(signal.SIGSTOP)  # or it would start new ones meanwhile
        doomed = [self.process.pid, *descendants(self.process.pid)]
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        return len(doomed)
