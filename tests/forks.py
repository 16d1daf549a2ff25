"""Daemon processes that start in a few hundredths of a second: forked from one that has imported everything.

The fork server runs `crashing_daemon`, so these daemons can also be told to kill themselves.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from daemons import DaemonProcess

_PROGRAM = Path(__file__).with_name("crashing_daemon.py")


class ForkServer:
    """Starts daemons for one test module; a context manager. All its daemons end with it.

    `modules`: what they need besides, and what takes long to import.
    """

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, str(_PROGRAM), "fork-server", *modules]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


class ForkedProcess:
    """What `DaemonProcess` needs of a ``Popen``."""

    def __init__(self, server: ForkServer, home: Path, arguments: list[str], env: dict[str, str]) -> None:
        pipe = home / "stdout"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(reading, True)
        self.stdout = os.fdopen(reading)
        self._server = server
        self._status: int | None = None
        self.pid = server.ask(arguments=arguments, env=env, stdout=str(pipe), stderr=str(home / "log"))

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; -9 if it was killed."""
        if self._status is None:
            if not self.ended(timeout):
                raise subprocess.TimeoutExpired("daemon", timeout or 0.0)
            self._status = self._server.ask(wait=self.pid)
        return self._status

    def ended(self, timeout: float | None = 0.0) -> bool:
        """Whether it ends within `timeout`: nobody else holds the other end of its output."""
        if self._status is not None:
            return True
        readable, _, _ = select.select([self.stdout], [], [], timeout)
        return bool(readable) and self.stdout.readline() == ""


class ForkedDaemon(DaemonProcess):
    """A `DaemonProcess` of a fork server. `environment` is what the daemon finds besides the server's own."""

    def __init__(self, server: ForkServer, store: str, *arguments: str, memory: str = "512MiB", env: dict[str, str] | None = None) -> None:
        super().__init__(store, *arguments, memory=memory)
        self.server = server
        self.environment = dict(env or {})

    def launch(self, arguments: list[str]) -> subprocess.Popen[str]:
        return cast("subprocess.Popen[str]", ForkedProcess(self.server, self.home, arguments, self.environment))

    def dead(self, timeout: float = 0.0) -> bool:
        """Whether it has ended, or does within `timeout` seconds."""
        return self.process is None or cast("ForkedProcess", self.process).ended(timeout)
