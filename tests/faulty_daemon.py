"""A daemon whose store misbehaves on demand: ``python faulty_daemon.py serve --store faulty:///dir …``.

The daemon is the real one; ``faulty://`` is a file system of fsspec's, a local directory
that looks into the JSON file named by FAULTY_CONTROL before each object appears:

    {"hold_after": k}         the first k objects appear, the next ones wait until this changes; each is noted in FAULTY_CONTROL.held
    {"raise": "EACCES"}       every write fails with that errno; with "only", those to paths that contain it
    {"full_after": n}         ENOSPC when so many bytes of a file have been written
    {"bytes_per_second": n}   no file is written faster
    {"delay_seconds": s}      every object takes that long to appear
    {"list_raises": "EIO"}    listings fail; with "list_times", so many in this process and no more
    {"list_log": FILE}        every listing is noted there, its path on a line
    {"list_hangs": true}      listings wait until this changes
    {"read_raises": "EIO"}    every read fails with that errno; with "only", those of paths that contain it
    {"read_delay_seconds": s} every read takes that long
    {"read_hold_after": k}    the first k reads since this was told go on, the next ones wait until it changes; with "only", as above
    {"rewrite_seconds": s}    a name that appeared less than that ago cannot be written again: 429, as GCS has it

In the place of an errno's name may stand an HTTP status: {"list_raises": "503"}.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

_lock = threading.Lock()
_appeared: list[str] = []
_appeared_at: dict[str, float] = {}
_lists_failed: list[str] = []
_read: list[str] = []
#: The last of what the control file has said.
_told: deque[dict[str, Any]] = deque([{}], maxlen=1)


class Answered(OSError):
    """What a service answered; shaped as botocore shapes its errors."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}, told by a test")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def control() -> dict[str, Any]:
    """What is told now; of a file that is just being written, what it said before."""
    try:
        _told.append(dict(json.loads(Path(os.environ["FAULTY_CONTROL"]).read_text())))
    except FileNotFoundError:
        _told.append({})
    except json.JSONDecodeError:
        pass
    return dict(_told[-1])


def fail_if_told(key: str) -> None:
    name = control().get(key)
    if name and name.isdigit():
        raise Answered(int(name))
    if name:
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number))


def is_held() -> bool:
    """Whether what is ready to appear has to wait."""
    return len(_appeared) >= int(control().get("hold_after", sys.maxsize))


def hold_read_if_told(path: str) -> None:
    """Counts the reads while that is told, and keeps those that come after the first ones."""
    with _lock:
        if "read_hold_after" not in control():
            _read.clear()
            return
        _read.append(path)
        number = len(_read)
    while number > control().get("read_hold_after", sys.maxsize):
        time.sleep(0.02)


def narrow(write: Callable[[Any], int]) -> Callable[[Any], int]:
    """A file's `write` that is slow, or finds the disk full, if that is told."""
    written = 0

    def writes(data: Any) -> int:
        nonlocal written
        told = control()
        nbytes = memoryview(data).nbytes
        if "full_after" in told and written + nbytes > told["full_after"]:
            written += write(memoryview(data)[: max(0, told["full_after"] - written)])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(nbytes / told.get("bytes_per_second", float("inf")))
        written += nbytes
        return write(data)

    return writes


class FaultyFileSystem(LocalFileSystem):
    protocol = ("faulty",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "r" not in mode and str(control().get("only", "")) in path:
            fail_if_told("raise")
        if "r" in mode and str(control().get("only", "")) in path:
            fail_if_told("read_raises")
            time.sleep(float(control().get("read_delay_seconds", 0)))
            hold_read_if_told(path)
        opened = super()._open(path, mode, **kwargs)
        if "r" not in mode:
            opened.write = narrow(opened.write)
        return opened

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        told = control()
        with _lock:
            if "list_log" in told:
                with open(told["list_log"], "a") as log:
                    log.write(f"{path}\n")
            failing = "list_raises" in told and len(_lists_failed) < told.get("list_times", sys.maxsize)
            if failing:
                _lists_failed.append(path)
        if failing:
            fail_if_told("list_raises")
        if told.get("list_hangs"):  # a listing that was under way before it was told is none of those: no test waits for it
            while control().get("list_hangs"):
                time.sleep(0.02)
        return super().ls(path, detail, **kwargs)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        counted = not Path(path2).name.startswith(".ckptd-") and ".ckptd-" not in path2
        if counted:
            time.sleep(float(control().get("delay_seconds", 0)))
            if is_held():
                with _lock, open(f"{os.environ['FAULTY_CONTROL']}.held", "a") as held:
                    held.write(f"{path2}\n")
            while is_held():
                time.sleep(0.02)
            with _lock:
                if path2 in _appeared_at and time.monotonic() - _appeared_at[path2] < control().get("rewrite_seconds", 0):
                    raise Answered(429)
        super().mv(path1, path2, **kwargs)
        if counted:
            with _lock:
                _appeared.append(path2)
                _appeared_at[path2] = time.monotonic()


if __name__ == "__main__":
    fsspec.register_implementation("faulty", FaultyFileSystem)
    from ckptd.cli.main import main

    raise SystemExit(main(sys.argv[1:]))
