"""A real daemon process for tests: started, killed, restarted; its files removed at the end."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

#: `program` of a daemon that also knows ``faulty://`` stores.
FAULTY = (str(Path(__file__).with_name("faulty_daemon.py")),)


class DaemonProcess:
    """``ckptd serve`` on a socket and a shm-dir of its own. Use as a context manager."""

    def __init__(
        self,
        store: str,
        *arguments: str,
        memory: str = "512MiB",
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "ckptd"),
        launcher: Sequence[str] = (),
    ) -> None:
        self.store = store
        self.home = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
        self.shm_dir = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
        self.socket = self.home / "ckptd.sock"
        self.address = f"unix:{self.socket}"
        self.log = self.home / "log"
        self.program = program
        self.launcher = launcher  # a command that runs the daemon's, in its place
        self.arguments = ["--memory", memory, *arguments]
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str] | None = None

    def start(self, *, timeout: float = 60.0) -> Self:
        """Returns when the daemon has printed its ready line; raises with its log if it ends or is too slow."""
        where = ["--listen", self.address, "--shm-dir", str(self.shm_dir)]
        self.process = self.launch(["serve", "--store", self.store, *where, *self.arguments])
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            readable, _, _ = select.select([self.process.stdout], [], [], 0.2)
            if readable:
                line = self.process.stdout.readline()
                if line.startswith("ready "):
                    return self
                if line == "":
                    break
        try:
            code = self.process.wait(2)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        raise RuntimeError(f"the daemon did not become ready (exit {code}):\n{self.log.read_text()}")

    def launch(self, arguments: list[str]) -> subprocess.Popen[str]:
        """Starts the process: its standard output is a pipe, its standard error the log."""
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*self.launcher, sys.executable, *self.program, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=self.env
            )

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs ``ckptd …`` against this daemon."""
        command = [sys.executable, "-m", "ckptd", *arguments, "--address", self.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.env, check=False)

    def list(self) -> dict[str, dict[str, Any]]:
        """``ckptd list --json`` by id."""
        done = self.cli("list", "--json")
        assert done.returncode == 0, done.stderr
        return {line["id"]: line for line in json.loads(done.stdout)}

    def until(self, identity: str, state: str, *, timeout: float = 100.0) -> dict[str, Any]:
        """Waits until the checkpoint is listed in that state: longer than the longest pause between two tries to make it durable."""
        deadline = time.monotonic() + timeout
        while True:
            line = self.list().get(identity)
            if line is not None and line["state"] == state:
                return line
            if time.monotonic() > deadline:
                raise TimeoutError(f"{identity} is {line}, not {state}; the daemon says:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, as a node's out-of-memory killer would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None

    def terminate(self, *, timeout: float = 60.0) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        return code

    def restart(self) -> Self:
        """SIGKILL, then a new daemon on the same socket and shm-dir."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        try:
            return self.start() if self.process is None else self
        except BaseException:
            self.remove()
            raise

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Kills it and removes all its files."""
        self.kill()
        shutil.rmtree(self.shm_dir, ignore_errors=True)
        shutil.rmtree(self.home, ignore_errors=True)
