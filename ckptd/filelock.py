"""A store's files where a look comes before the deed: opened only if they are files, replaced or removed only as what was looked at.

The latter among the writers of all nodes that share the directory.

Promises: of those who come through here, one at a time looks at a file and then renames another over it or removes it,
whatever stops them in between; the lock goes with its holder's process. It is `flock` on a file beside, not on the directory:
NFS hands a file's lock to its server, where all nodes meet, and keeps a directory's to the one node. That file has a temporary
name of ours, is there only while it is held, and is swept like others if its holder was killed. Where a file system has no
locks, looking is all that is done, and the caller is told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ckptd.errors import StoreError, Unavailable
from ckptd.store import ABSENT, Changed

#: One for all files of a directory; a random name is never this one.
LOCK_NAME: Final = f".ckptd-{'0' * 16}.tmp"
#: A holder looks and renames, which takes no time: one that holds it for longer hangs, or is stopped.
WAIT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.01
#: What flock says where a file system, or an NFS server, does not offer it.
_NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


def version_of(status: os.stat_result) -> str:
    """What is another one after each rename over the file, and after each write into it that its times tell."""
    return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"


class NoFile(StoreError):
    """What has an object's name is neither a file nor a directory."""


def open_file(path: Path, *, directory: int | None = None) -> int:
    """Opens a regular file for reading. What is none is not opened: that could block, or do something.

    `directory`: the one that it is in, open. Raises NoFile, and OSError: IsADirectoryError for a directory.
    """
    name = path if directory is None else path.name
    try:
        mode = os.stat(name, dir_fd=directory).st_mode
    except OSError:  # opening it has the last word: then an NFS client asks its server
        mode = stat.S_IFREG
    _check_mode(path, mode)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:  # not waiting for a FIFO that has come into its place just now
        fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=directory)
    except BlockingIOError:  # another machine caches the file, and is told to let go of it
        fd = os.open(name, flags, dir_fd=directory)
    try:
        _check_mode(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def rename_over(temporary: Path, target: Path, replacing: str) -> bool:
    """Renames if the version of `target` is `replacing` (or it is ABSENT). Returns whether that was done under a lock.

    Raises Changed; Unavailable if another holds the lock and does not give it up; OSError.
    """
    with _lock(target.parent) as locked:
        _check(target, replacing)
        os.rename(temporary, target)
    return locked


def unlink_only(target: Path, version: str) -> None:
    """Removes `target` if its version is this; fine if it is missing. Raises as `rename_over` does."""
    with _lock(target.parent):
        _check(target, version, or_absent=True)
        target.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Holds the directory's lock; False if there are no locks here."""
    path = directory / LOCK_NAME
    fd, locked = _acquire(path)
    try:
        yield locked
    finally:
        with contextlib.suppress(OSError):
            if _leads_to(path, fd):
                os.unlink(path)
        os.close(fd)


def _acquire(path: Path) -> tuple[int, bool]:
    """The lock's file, open; whether the lock is held by that."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        # For writing, as NFS asks of who wants to be alone.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            locked = _flock(fd, path, deadline)
            if not locked or _leads_to(path, fd):
                return fd, locked
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # whoever held it has removed it


def _flock(fd: int, path: Path, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            if time.monotonic() > deadline:
                raise Unavailable(f"another writer has held {path} for more than {WAIT_SECONDS:g} s: is one stopped?") from exc
            time.sleep(_PAUSE_SECONDS)
        except OSError as exc:
            if exc.errno == errno.ESTALE:  # removed on another node; the name will tell
                return True
            if exc.errno in _NO_LOCKS:
                return False
            raise
        else:
            return True


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise NoFile(f"{path} is no file: move the FIFO, socket or device away that has the name of an object")


def _check(target: Path, version: str, *, or_absent: bool = False) -> None:
    """Raises Changed unless `version` is what is there."""
    # Opened, not only looked at: then an NFS client asks its server what directory and file are by now.
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_file(target, directory=directory)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ELOOP):  # links that lead nowhere are listed as nothing, too
            raise
        present = ABSENT
    else:
        try:
            present = version_of(os.fstat(fd))
        finally:
            os.close(fd)
    finally:
        os.close(directory)
    if present != version and not (or_absent and present == ABSENT):
        raise Changed(f"{target} is not what it was: look again")
