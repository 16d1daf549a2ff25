"""The directory in shared memory that one daemon owns, and the commit records in it.

Everything that must outlive a SIGKILL of the daemon lies here under names that say what
it is: segments (``<token>.<state>``), commit records (``<attempt>.<state>.record``) and
the lock. Promises: the directory is ours alone (owner, mode 0700, one daemon at a time),
a record is whole or absent, and a file whose name is not of our pattern is never touched.
It never decides what stays. Calls block for microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
from typing import TYPE_CHECKING, Final

from ckptd.errors import ArenaFull, InvalidRequest, Unavailable
from ckptd.segment import State, parse_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RECORD: Final = re.compile(r"([0-9a-f]{24})\.(accepted|durable|failed)\.record")
_TEMPORARY: Final = ".tmp"
#: f_type of tmpfs, from linux/magic.h.
_TMPFS_MAGIC: Final = 0x01021994

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


class ShmDirectory:
    """Owns `path` from construction until `close`.

    Raises InvalidRequest if the directory cannot be made, belongs to somebody else, or is
    in use by another daemon.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"cannot make the shared-memory directory {path} ({error.strerror}): give another --shm-dir") from error
        self._claim()
        self._lock = self._take_lock()
        if not _is_tmpfs(path):
            _log.warning("%s is not on a tmpfs: segments go through a disk, and saves will be slow", path)

    def capacity(self) -> int:
        """Bytes that the file system can hold in all; a tmpfs without a limit counts as the machine's memory."""
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free(self) -> int:
        """Bytes that the file system has left for us."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def segments(self) -> list[tuple[str, State, Path]]:
        """Every file that is named like a segment: token, state, path."""
        parsed = [(parse_name(path.name), path) for path in self.path.iterdir()]
        return [(found[0], found[1], path) for found, path in parsed if found is not None]

    def records(self) -> list[tuple[str, str, bytes]]:
        """All commit records as (attempt, state, data), oldest attempt first."""
        return [(attempt, state, path.read_bytes()) for attempt, state, path in sorted(self._record_files())]

    def put_record(self, attempt: str, state: str, data: bytes) -> None:
        """Writes a record, whole or not at all. Raises ArenaFull if the file system is full."""
        target = self._record_path(attempt, state)
        temporary = target.with_name(target.name + _TEMPORARY)
        try:
            temporary.write_bytes(data)
            temporary.rename(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise ArenaFull(f"no room for a commit record of {len(data)} bytes in {self.path}: {error.strerror}") from error
            raise Unavailable(f"cannot write the commit record {target}: {error.strerror}") from error

    def move_record(self, attempt: str, old: str, new: str) -> None:
        """Changes a record's state in one step. Raises Unavailable if it cannot."""
        try:
            self._record_path(attempt, old).rename(self._record_path(attempt, new))
        except OSError as error:
            raise Unavailable(f"cannot mark attempt {attempt} in {self.path} as {new}: {error.strerror}") from error

    def drop_record(self, attempt: str) -> None:
        """Removes the attempt's record, whatever its state; none is fine."""
        for found, _, path in self._record_files():
            if found == attempt:
                path.unlink(missing_ok=True)

    def remove_temporaries(self) -> None:
        """Removes the records that a killed daemon had not finished writing."""
        for path in self.path.glob(f"*{_TEMPORARY}"):
            if _RECORD.fullmatch(path.name.removesuffix(_TEMPORARY)):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets another daemon have the directory. The files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> None:
        found, link = self.path.stat(), self.path.lstat()
        if not self.path.is_dir():
            raise InvalidRequest(f"{self.path} is not a directory: give another --shm-dir")
        own = os.geteuid()
        if {found.st_uid, link.st_uid} != {own}:
            raise InvalidRequest(f"{self.path} belongs to uid {found.st_uid}, this daemon runs as uid {own}: give another --shm-dir")
        if found.st_mode & 0o777 != 0o700:
            self.path.chmod(0o700)

    def _take_lock(self) -> int:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise InvalidRequest(f"another ckptd daemon uses {self.path}: stop it or give --shm-dir") from error
        return fd

    def _record_files(self) -> Iterator[tuple[str, str, Path]]:
        for path in self.path.iterdir():
            if found := _RECORD.fullmatch(path.name):
                yield found[1], found[2], path

    def _record_path(self, attempt: str, state: str) -> Path:
        name = f"{attempt}.{state}.record"
        if not _RECORD.fullmatch(name):
            raise ValueError(f"{name!r} would not be found again as a record")
        return self.path / name


def _is_tmpfs(path: Path) -> bool:
    # struct statfs starts with f_type; the rest only needs room.
    found = (ctypes.c_long * 64)()
    return _libc.statfs(os.fsencode(path), ctypes.byref(found)) == 0 and found[0] == _TMPFS_MAGIC
