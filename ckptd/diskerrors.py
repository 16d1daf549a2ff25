"""What the operating system says of files, in our kinds of error and with what to do about it.

Everything that is not in the first table may pass, and is Unavailable. Touches nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from ckptd.errors import StoreError, Unavailable
from ckptd.segment import shown

#: What an operator has to change, by errno. Everything else may pass: a full disk, a quota, a stale mount, I/O errors.
_HINTS: Final = {
    errno.EACCES: "give the daemon's user access to it",
    errno.EPERM: "give the daemon's user access to it",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOENT: "a directory on the way to it is missing",
    errno.ENOTDIR: "something on the way to it is a file, not a directory",
    errno.EEXIST: "something on the way to it is a file, not a directory",
    errno.EISDIR: "a directory has the name of an object",
    errno.ELOOP: "there are too many symbolic links on the way to it",
    errno.ENAMETOOLONG: "its name is too long for this file system",
    errno.EINVAL: "the file system does not accept this name or operation",
    errno.EILSEQ: "the file system does not accept this name",
    errno.EFBIG: "the file system or a ulimit does not allow files of this size",
}
#: What passes sooner if an operator helps.
_PASSING: Final = {errno.ENOSPC: "free some space", errno.EDQUOT: "raise the quota or free some space"}


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turns the operating system's errors into ours."""
    try:
        yield
    except OSError as exc:
        text = f"{what}: {exc.strerror or exc}"
        hint = _HINTS.get(exc.errno or 0)
        if hint is not None:
            raise StoreError(f"{text}; {hint}") from exc
        hint = _PASSING.get(exc.errno or 0)
        raise Unavailable(f"{text}; {hint}" if hint else text) from exc


@contextlib.contextmanager
def counted(fd: int, needed: int | None) -> Iterator[None]:
    """Inside it, a full disk is told with how much was to be written, and how much is free without that file."""
    try:
        yield
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                disk = os.fstatvfs(fd)
                free = shown(disk.f_bavail * disk.f_frsize + os.fstat(fd).st_blocks * 512)
                wanted = "" if needed is None else f" for a file of up to {shown(needed)}"
                exc.strerror = f"{exc.strerror}{wanted} ({free} are free)"
        raise


@contextlib.contextmanager
def passing(what: str) -> Iterator[None]:
    """Inside it, what was there a moment ago and is not any more was removed by somebody who tidies up: it may be written again."""
    try:
        yield
    except FileNotFoundError as exc:
        raise Unavailable(f"{what}: somebody removed it, or the directory it is in, while it was written") from exc


def leads_nowhere(exc: OSError) -> bool:
    """Whether a name has gone, or is a symbolic link that ends at nothing or at itself."""
    return isinstance(exc, FileNotFoundError | NotADirectoryError) or exc.errno == errno.ELOOP
