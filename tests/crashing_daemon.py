"""A daemon that kills itself before or after one of its effects on the outside.

The daemon is the real one; in its process only, the operating system's calls that change what others
see (and what a later daemon finds) are counted at their seam: files made, sized, written, renamed and
removed, pages made and given back, fsync. An effect is named by what it does to which kind of file and
by how often that has happened, as ``rename step-1/*.distcp #2``: tokens are random and threads are not
in step, so that a plain number would mean another effect in each run.

    CRASH_LOG=FILE              every effect is written there, one name a line
    CRASH_AT='before NAME'      SIGKILL instead of the effect
    CRASH_AT='after NAME'       SIGKILL when it has happened, before anything is made of it
    STOP_AT='before NAME'       SIGSTOP there; it goes on when somebody sends SIGCONT

``faulty://`` stores work as in `faulty_daemon`. ``python crashing_daemon.py serve …`` is one daemon;
``python crashing_daemon.py fork-server MODULE…`` starts one per line that it reads, see `serve_forks`. That takes a
fiftieth of a second instead of one: everything is imported, these modules too, and nothing of gRPC or asyncio is running yet.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

_TOKEN = re.compile(r"[0-9a-f]{16,24}")
_ATTEMPT_AND_TOKEN = re.compile(r"[0-9a-f]{24}-[0-9a-f]{16}")


class Effects:
    """Counts effects by name, notes them, and kills this process at the one that `crash_at` names."""

    def __init__(self, roots: list[str], crash_at: str = "", log: str = "", stop_at: str = "") -> None:
        self._roots = roots
        self._crash_at = crash_at
        self._stop_at = stop_at
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._write = os.write
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if log else -1

    def during(self, what: str, path: Any, call: Callable[[], Any]) -> Any:
        """Makes the call, which is an effect if `path` lies below one of the roots."""
        shown = self._shown(path)
        if shown is None:
            return call()
        with self._lock:
            self._seen[what, shown] += 1
            name = f"{what} {shown} #{self._seen[what, shown]}"
        self._at(f"before {name}")
        result = call()
        if self._log >= 0:
            self._write(self._log, f"{name}\n".encode())
        self._at(f"after {name}")
        return result

    def _at(self, moment: str) -> None:
        if moment == self._crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == self._stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _shown(self, path: Any) -> str | None:
        """The path relative to its root, without what is random; None if it lies elsewhere."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            except OSError:
                return None
        whole = os.path.abspath(os.fsdecode(path))
        for root in self._roots:
            if whole == root or whole.startswith(f"{root}/"):
                return _TOKEN.sub("*", _ATTEMPT_AND_TOKEN.sub("*", whole.removeprefix(root).removeprefix("/"))) or "/"
        return None


def install(effects: Effects) -> None:
    """Puts the counter between this process's Python code and the operating system."""
    at_path = {"rename": 1, "replace": 1, "link": 1, "unlink": 0, "remove": 0, "mkdir": 0, "rmdir": 0, "truncate": 0}
    at_fd = ("ftruncate", "posix_fallocate", "write", "pwrite")
    for name, position in at_path.items():
        _wrap(effects, os, name, position)
    for name in at_fd:
        _wrap(effects, os, name, 0)

    real_open = os.open

    def opening(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if not flags & os.O_CREAT or os.path.lexists(path):
            return real_open(path, flags, *arguments, **options)
        made: int = effects.during("create", path, lambda: real_open(path, flags, *arguments, **options))
        return made

    os.open = opening  # type: ignore[assignment]

    real_builtin = builtins.open

    def opening_file(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wxa"):
            return real_builtin(file, mode, *arguments, **options)
        return effects.during("create", file, lambda: real_builtin(file, mode, *arguments, **options))

    builtins.open = io.open = opening_file  # type: ignore[assignment]

    from ckptd import blocks, segment

    for room, called in ((segment, "_libc"), (blocks, "_LIBC")):
        setattr(room, called, _Libc(effects, getattr(room, called)))


def _wrap(effects: Effects, module: ModuleType, name: str, position: int) -> None:
    real = getattr(module, name)

    def called(*arguments: Any, **options: Any) -> Any:
        return effects.during(name, arguments[position], lambda: real(*arguments, **options))

    setattr(module, name, called)


class _Libc:
    """libc as the rooms of memory use it: the one call that changes something is punching holes."""

    def __init__(self, effects: Effects, real: ctypes.CDLL) -> None:
        self._effects = effects
        self._real = real

    def fallocate(self, fd: int, *arguments: Any) -> Any:
        return self._effects.during("punch", fd, lambda: self._real.fallocate(fd, *arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def serve(arguments: list[str], env: dict[str, str]) -> int:
    """Runs ``ckptd`` with these arguments; counts only if the environment asks for it."""
    import fsspec

    from ckptd.cli.main import main
    from faulty_daemon import FaultyFileSystem

    fsspec.register_implementation("faulty", FaultyFileSystem)
    if {"CRASH_AT", "CRASH_LOG", "STOP_AT"} & env.keys():
        roots = [_option(arguments, "--shm-dir"), re.sub(r"^\w+://", "", _option(arguments, "--store"))]
        told = (env.get(name, "") for name in ("CRASH_AT", "CRASH_LOG", "STOP_AT"))
        install(Effects([os.path.abspath(root) for root in roots], *told))
    return main(arguments)


def _option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def serve_forks(modules: list[str]) -> None:
    """Starts daemons: reads ``{"arguments", "env", "stdout", "stderr"}``, a JSON document a line, answers with the pid.

    ``{"wait": pid}`` is answered with that child's exit status once it has ended (as `os.waitstatus_to_exitcode`
    gives it). Ends with its standard input, and takes its children with it.
    """
    import ckptd.daemon  # noqa: F401 - what takes long to import
    import faulty_daemon  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    children = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], 0)
            children.discard(pid)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            _become_daemon(request)
        else:
            children.add(answer)
        print(answer, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _become_daemon(request: dict[str, Any]) -> None:
    """In a child of the fork server: never returns."""
    status = 70
    try:
        for number, path, flags in ((1, request["stdout"], os.O_WRONLY), (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
            fd = os.open(path, flags, 0o600)
            os.dup2(fd, number)
            os.close(fd)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.environ.update(request["env"])
        status = serve(request["arguments"], request["env"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["fork-server"]:
        serve_forks(sys.argv[2:])
    else:
        raise SystemExit(serve(sys.argv[1:], dict(os.environ)))
