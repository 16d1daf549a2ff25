"""One file of shared memory: its name, its pages, and the steps that change what it is.

A segment is a file in the shm-dir, named ``<token>.<state>``; its state changes by
rename and by nothing else. Pages are made here and only here, by the daemon, so that
a full file system is an error of a call and never a SIGBUS in somebody's copy loop.
The functions block: short ones (create, take_over) are for the event loop, those that
make or free pages (populate, remove) are for threads; both release the GIL. Nothing
here knows budgets, queues or what the bytes mean. Linux, 64 bit.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

if TYPE_CHECKING:
    from pathlib import Path

State = Literal["open", "sealed", "cache", "spare"]

#: Segments are multiples of this: what a huge page holds.
GRAIN: Final = 2 * 1024 * 1024
#: Pages are made in pieces of this size, so that the work can be abandoned in between.
PIECE: Final = 64 * 1024 * 1024

_NAME: Final = re.compile(r"([0-9a-f]{16})\.(open|sealed|cache|spare)")
_ZEROS: Final = bytes(1024 * 1024)
_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


@dataclass(slots=True, eq=False)
class Segment:
    """A segment as the arena knows it. Becomes stale when its token is dropped or evicted."""

    token: str
    #: The trainer process that writes, or wrote, it; "" once its lease has ended.
    owner: str
    #: Size of the file in bytes. A multiple of GRAIN, except of a cache.
    nbytes: int
    inode: int
    path: Path
    state: State
    #: Bytes of the budget it holds: its size, except of a sparse cache.
    charged: int
    #: Holds a metadata pickle, so may use the part of the budget that is kept back for those.
    metadata: bool = False
    #: Of a sparse cache: bytes granted to fetches that have not ended; part of `charged`.
    reserved: int = 0


def shown(nbytes: int) -> str:
    """A number of bytes for people."""
    if 0 < nbytes < 1024 * 1024:
        return f"{nbytes} bytes" if nbytes < 10240 else f"{nbytes / 1024:.1f} KiB"
    size = nbytes / 1024 / 1024
    for unit in ("MiB", "GiB"):
        if size < 10240:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def rounded(nbytes: int) -> int:
    """The size of a segment that holds `nbytes`: at least one GRAIN."""
    return max(1, -(-nbytes // GRAIN)) * GRAIN


def path_of(directory: Path, token: str, state: State) -> Path:
    """Where a segment of this token and state lies."""
    return directory / f"{token}.{state}"


def parse_name(name: str) -> tuple[str, State] | None:
    """Token and state of a file name, or None if it is not a segment's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return found[1], cast("State", found[2])


def create(path: Path, *, sparse_nbytes: int = 0) -> int:
    """Makes a new file without pages and returns its inode; with `sparse_nbytes`, one hole of that size."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if sparse_nbytes:
            os.ftruncate(fd, sparse_nbytes)
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def populate(path: Path, at: int, nbytes: int) -> None:
    """Makes the pages of bytes [at, at + nbytes) and writes zeros into them.

    Raises OSError (ENOSPC, ENOMEM) if there is no memory. posix_fallocate alone reserves
    pages but leaves clearing them to whoever touches them first: the writes keep that out
    of the trainer's copy, which they make half again as fast.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, at, nbytes)
        end = at + nbytes
        while at < end:
            at += os.pwrite(fd, _ZEROS[: end - at], at)
    finally:
        os.close(fd)


def take_over(path: Path, inode: int, target: Path) -> bool:
    """Renames a segment that no process maps; False if one does, or if the name leads elsewhere.

    Who maps a segment holds a shared lock for as long (``mapping.py`` of the client), so the
    exclusive one is proof. It is held across the rename: a client that opened the old name
    meanwhile gets its lock afterwards, and finds that the name has gone.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_ino != inode or not _lock(fd):
            return False
        path.rename(target)
        return True
    finally:
        os.close(fd)


def is_mapped(path: Path) -> bool:
    """Whether any process maps the segment; True if that cannot be told."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        return not _lock(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Unlinks a segment and frees its memory now, even if a process still maps it.

    Such a process then writes into nothing that anybody reads. The name goes first: no
    name ever leads to a segment with holes. A file that is already gone is fine.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        path.unlink(missing_ok=True)
        nbytes = os.fstat(fd).st_size
        if nbytes and not _lock(fd) and _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, nbytes) != 0:
            failed = ctypes.get_errno()
            raise OSError(failed, os.strerror(failed), str(path))
    finally:
        os.close(fd)


def whole_nbytes(path: Path) -> tuple[int, int] | None:
    """(inode, size) of a regular file all of whose bytes have pages; None if it is not such a file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    regular = (found.st_mode & 0o170000) == 0o100000
    return (found.st_ino, found.st_size) if regular and found.st_blocks * 512 >= found.st_size else None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
