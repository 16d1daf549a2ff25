"""The daemon's segments in this process's address space.

A mapping holds a shared flock on its segment for exactly as long as it exists, because the
kernel keeps the open file description alive under it; so the daemon can tell whether anybody
may still write into, or read from, a segment before it gives it to somebody else. Hence
libc's mmap: Python's keeps a duplicate of the descriptor, which a forked child inherits and
with it the lock. Promises: what is mapped is the segment that was meant, whole, or LeaseLost
is raised; a forked child inherits neither pages nor lock; nothing is unmapped under a view.
It never touches a page that the daemon has not made. Linux, 64 bit.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptd.errors import InvalidRequest, LeaseLost, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd.v1 import daemon_pb2

_PROT_READ: Final = 0x1
_PROT_WRITE: Final = 0x2
_MAP_SHARED: Final = 0x01
_MAP_POPULATE: Final = 0x8000
_MADV_DONTFORK: Final = 10
#: The daemon holds its exclusive lock for microseconds; who holds one this long is not the daemon at work.
_LOCK_SECONDS: Final = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munmap.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

# A child forked between open and close would inherit the descriptor, and between mmap and madvise
# the pages; either keeps the lock for as long as the child lives. So no fork happens in between.
_no_fork = threading.Lock()
os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)


class Mapping:
    """One mapped segment. Not for the children of the process that made it: there the pages do not exist.

    Pages are unmapped when `close` has been called, or the mapping forgotten, and the last view is gone.
    """

    def __init__(self, address: int, nbytes: int, inode: int, *, writable: bool) -> None:
        self.nbytes = nbytes
        self.inode = inode
        self.writable = writable
        self._address = address
        # All views are slices of this one object: it lives until the last of them is gone, and then unmaps.
        self._whole: memoryview | None = None
        owner = (ctypes.c_char * nbytes).from_address(address)
        # At exit the kernel unmaps, after the last thread has ended.
        weakref.finalize(owner, _unmap, address, nbytes, os.getpid()).atexit = False
        self._whole = memoryview(owner).cast("B")

    @property
    def address(self) -> int:
        """Where the first byte is. Valid until `close`; a copy that takes longer holds a view."""
        if self._whole is None:
            raise ValueError("the mapping is closed")
        return self._address

    def view(self, at: int, nbytes: int) -> memoryview:
        """Bytes [at, at + nbytes) in place, for any consumer of buffers (torch.frombuffer, too).

        It looks writable even if the mapping is not, because torch warns of read-only buffers; a write
        then ends the process with SIGSEGV. Raises ValueError out of bounds or after `close`.
        """
        if self._whole is None:
            raise ValueError("the mapping is closed")
        if not 0 <= at <= at + nbytes <= self.nbytes:
            raise ValueError(f"bytes {at} to {at + nbytes} are not in a segment of {self.nbytes}")
        return self._whole[at : at + nbytes]

    def close(self) -> None:
        """Unmaps as soon as no view is left. Can be called again."""
        self._whole = None


class Mappings:
    """The segments that this process keeps mapped, by inode: a new mapping costs as much as a copy.

    Empty in a forked child, whatever its parent had. Not thread-safe.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._own())

    def obtain(self, segment: daemon_pb2.Segment, *, writable: bool = True) -> Mapping:
        """The mapping of what the daemon has just named; made if there is none. Raises what `open_mapping` raises.

        The name is not looked at again if the inode is mapped already: the lock has kept the daemon
        from giving it to anybody else.
        """
        own = self._own()
        found = own.get(segment.inode)
        if found is not None and found.nbytes >= segment.nbytes and (found.writable or not writable):
            return found
        made = open_mapping(segment.path, segment.inode, segment.nbytes, writable=writable)
        if found is not None:
            found.close()
        own[segment.inode] = made
        return made

    def keep_only(self, inodes: Iterable[int]) -> None:
        """Closes all mappings but these."""
        own, keep = self._own(), set(inodes)
        for inode in own.keys() - keep:
            own.pop(inode).close()

    def _own(self) -> dict[int, Mapping]:
        if self._pid != os.getpid():
            self._mappings, self._pid = {}, os.getpid()
        return self._mappings


def open_mapping(path: str | os.PathLike[str], inode: int, nbytes: int, *, writable: bool) -> Mapping:
    """Maps the first `nbytes` of the segment at `path`, if that is still the file `inode`.

    Raises LeaseLost if it is not, InvalidRequest if the daemon's memory is not visible here, and
    Unavailable if there is no address space for it.
    """
    if nbytes <= 0:
        raise InvalidRequest(f"{path}: a mapping of {nbytes} bytes")
    with _no_fork:
        fd = _open(Path(path), writable=writable)
        try:
            _share(fd, path)
            _check_that_it_is(Path(path), fd, inode, nbytes)
            protection = _PROT_READ | (_PROT_WRITE if writable else 0)
            # What is open for writing has all its pages, and one call for all their entries in the page table
            # is twice as fast as a fault for each. What is only read may have holes: populating would fill them.
            flags = _MAP_SHARED | (_MAP_POPULATE if writable else 0)
            address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
            if address == _MAP_FAILED:
                raise _refused("map", path, nbytes)
            if _libc.madvise(address, nbytes, _MADV_DONTFORK) != 0:
                refusal = _refused("keep from children", path, nbytes)
                _libc.munmap(address, nbytes)
                raise refusal
        finally:
            os.close(fd)
    return Mapping(address, nbytes, inode, writable=writable)


def _open(path: Path, *, writable: bool) -> int:
    try:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        # The daemon's lock lies beside its segments: without it this is another directory of the same name.
        if (path.parent / "lock").exists():
            raise _lost(path) from error
        raise InvalidRequest(
            f"the daemon's memory {path.parent} is not visible here (another container or host?): "
            "mount the daemon's --shm-dir at the same path, or start a daemon here"
        ) from error
    except PermissionError as error:
        raise InvalidRequest(f"the daemon's memory {path} is not ours to open: run trainer and daemon as the same user") from error
    except OSError as error:
        raise Unavailable(f"cannot open {path}: {error.strerror}") from error


def _share(fd: int, path: str | os.PathLike[str]) -> None:
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= until:
                raise Unavailable(f"{path} has been locked for {_LOCK_SECONDS:.0f} s: is the daemon stopped?") from error
            time.sleep(0.0005)
        else:
            return


def _check_that_it_is(path: Path, fd: int, inode: int, nbytes: int) -> None:
    opened = os.fstat(fd)
    try:
        named = path.stat()
    except FileNotFoundError as error:
        raise _lost(path) from error
    if not opened.st_ino == named.st_ino == inode or opened.st_dev != named.st_dev or opened.st_size < nbytes:
        raise _lost(path)


def _lost(path: Path) -> LeaseLost:
    return LeaseLost(f"the daemon has given {path.name} to somebody else: redo the whole save or load")


def _refused(doing: str, path: str | os.PathLike[str], nbytes: int) -> Unavailable:
    code = ctypes.get_errno()
    limits = "; look at ulimit -v and vm.max_map_count" if code == errno.ENOMEM else ""
    return Unavailable(f"cannot {doing} {nbytes} bytes of {path}: {os.strerror(code)}{limits}")


def _unmap(address: int, nbytes: int, pid: int) -> None:
    # In a child these addresses belong to nobody, or already to something else.
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)
