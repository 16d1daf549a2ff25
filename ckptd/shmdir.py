"""The directory in shared memory that one daemon owns, and the commit records in it.

Everything that must outlive a SIGKILL of the daemon lies here under names that say what
it is: segments (``<token>.<state>``), commit records (``<attempt>.<state>.record``) and
the lock. Promises: the directory is ours alone (owner, mode 0700, one daemon at a time),
a record is whole or absent, and what is not of our pattern is never touched: neither a file
with another name, nor a directory, link or unreadable file with one of ours. It changes no
mode of a directory that was there before, and never decides what stays. Calls block for
microseconds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from ckptd.errors import ArenaFull, InvalidRequest, Unavailable
from ckptd.segment import State, parse_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RECORD: Final = re.compile(r"([0-9a-f]{24})\.(adopted|accepted|durable|failed)\.record")
_TEMPORARY: Final = ".tmp"
#: f_type of tmpfs, from linux/magic.h.
_TMPFS_MAGIC: Final = 0x01021994

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


class ShmDirectory:
    """Owns `path` from construction until `close`.

    Raises InvalidRequest if the directory cannot be made, belongs to somebody else, is open to
    others, or is in use by another daemon.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True)
            path.chmod(0o700)  # whatever the umask took away
        except FileExistsError:
            check(path)
        except OSError as error:
            raise InvalidRequest(f"cannot make the shared-memory directory {path} ({error.strerror}): give another --shm-dir") from error
        self._lock = self._take_lock()
        if not is_tmpfs(path):
            _log.warning("%s is not on a tmpfs: segments go through a disk, and saves will be slow", path)

    def capacity(self) -> int:
        """Bytes that the file system can hold in all."""
        return capacity(self.path)

    def free(self) -> int:
        """Bytes that the file system has left for us."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def segments(self) -> list[tuple[str, State, Path]]:
        """Every file that is named like a segment, and is one: token, state, path. Warns of what is none."""
        parsed = [(parse_name(path.name), path) for path in self.path.iterdir()]
        return [(found[0], found[1], path) for found, path in parsed if found is not None and _is_ours(path, warn=True)]

    def records(self) -> list[tuple[str, str, bytes]]:
        """All commit records that can be read as (attempt, state, data), oldest attempt first. Warns of the others."""
        found = []
        for attempt, state, path in sorted(self._record_files(warn=True)):
            try:
                found.append((attempt, state, path.read_bytes()))
            except OSError as error:
                _log.warning("%s is left alone: it cannot be read (%s)", path, error.strerror)
        return found

    def put_record(self, attempt: str, state: str, data: bytes) -> None:
        """Writes a record, whole or not at all. Raises ArenaFull if the file system is full."""
        target = self._record_path(attempt, state)
        temporary = target.with_name(target.name + _TEMPORARY)
        ours = False
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "wb") as file:
                ours = True
                file.write(data)
            temporary.rename(target)
        except OSError as error:
            if ours:
                temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise ArenaFull(f"no room for a commit record of {len(data)} bytes in {self.path}: {error.strerror}") from error
            raise Unavailable(f"cannot write the commit record {target}: {error.strerror}") from error

    def move_record(self, attempt: str, old: str, new: str, data: bytes | None = None) -> None:
        """Changes a record's state in one step; if somebody has removed it, writes `data` (if given) as the new one.

        Raises Unavailable if it cannot; with `data`, ArenaFull if the file system is full.
        """
        try:
            self._record_path(attempt, old).rename(self._record_path(attempt, new))
        except OSError as error:
            if data is not None and isinstance(error, FileNotFoundError):
                self.put_record(attempt, new, data)
                return
            raise Unavailable(f"cannot mark attempt {attempt} in {self.path} as {new}: {error.strerror}") from error

    def drop_record(self, attempt: str) -> None:
        """Removes the attempt's record, whatever its state; none is fine."""
        for found, _, path in self._record_files():
            if found == attempt:
                path.unlink(missing_ok=True)

    def remove_temporaries(self) -> None:
        """Removes the records that a killed daemon had not finished writing."""
        for path in list(self.path.glob(f"*{_TEMPORARY}")):
            if _RECORD.fullmatch(path.name.removesuffix(_TEMPORARY)) and _is_ours(path, warn=True):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets another daemon have the directory. The files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        path = self.path / "lock"
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise InvalidRequest(f"another ckptd daemon uses {self.path}: stop it or give --shm-dir") from error
            raise InvalidRequest(f"cannot lock {path} ({error.strerror}): remove it if it is not a daemon's, or give --shm-dir") from error
        return fd

    def _record_files(self, *, warn: bool = False) -> Iterator[tuple[str, str, Path]]:
        for path in list(self.path.iterdir()):
            if (found := _RECORD.fullmatch(path.name)) and _is_ours(path, warn=warn):
                yield found[1], found[2], path

    def _record_path(self, attempt: str, state: str) -> Path:
        name = f"{attempt}.{state}.record"
        if not _RECORD.fullmatch(name):
            raise ValueError(f"{name!r} would not be found again as a record")
        return self.path / name


def _is_ours(path: Path, *, warn: bool) -> bool:
    """Whether a file that has a name of our pattern can have been written by a daemon. Opens and follows nothing."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except OSError:  # gone meanwhile
        return False
    if kind == stat.S_IFREG and os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        return True
    if warn:
        what = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFREG: "a file that may not be read"}
        _log.warning("%s is left alone: it is %s, which ckptd did not make", path, what.get(kind, "a special file"))
    return False


def check(path: Path) -> None:
    """Checks a directory that was there before. Its mode is its owner's: a shared one must not be closed to its other users.

    Raises InvalidRequest if a daemon of this user cannot have it.
    """
    try:
        found, link = path.stat(), path.lstat()
    except OSError as error:
        raise InvalidRequest(f"cannot use the directory {path} ({error.strerror}): give another --shm-dir") from error
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"{path} is not a directory: give another --shm-dir")
    own = os.geteuid()
    if {found.st_uid, link.st_uid} != {own}:
        raise InvalidRequest(f"{path} belongs to uid {found.st_uid}, this daemon runs as uid {own}: give another --shm-dir")
    if found.st_mode & 0o777 != 0o700:
        if found.st_mode & stat.S_ISVTX:
            way_out = f"give a directory in it that does not exist yet, such as {path}/ckptd-{own}"
        else:
            way_out = "chmod 700 it if it is meant for ckptd, or give a directory that does not exist yet"
        raise InvalidRequest(
            f"{path} has mode {found.st_mode & 0o777:04o}, and a shared-memory directory must be its daemon's alone: {way_out}"
        )


def capacity(path: Path) -> int:
    """Bytes that the file system of an existing `path` can hold in all; a tmpfs without a limit counts as the machine's memory."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_tmpfs(path: Path) -> bool:
    """Whether an existing `path` lies on a tmpfs."""
    # struct statfs starts with f_type; the rest only needs room.
    found = (ctypes.c_long * 64)()
    return _libc.statfs(os.fsencode(path), ctypes.byref(found)) == 0 and found[0] == _TMPFS_MAGIC


def node_name(shm_dir: Path, fresh: str) -> str:
    """The daemon's random id: kept beside its memory, because receipts name it."""
    path = shm_dir / "node"
    try:
        return path.read_text(encoding="ascii").strip() or fresh
    except FileNotFoundError:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(fresh, encoding="ascii")
        temporary.rename(path)
        return fresh
