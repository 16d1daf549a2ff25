"""A store in a directory of this machine's file system, with the discipline that fsspec lacks.

Promises: a file appears under its name only when all its bytes are on disk, and put returns
when the directories that lead to it are, too (sibling temporary file, fsync, rename, fsync
of each directory up to the root); a failed put leaves nothing; of two conditional puts on any two
nodes one sees the other's. Symbolic links to directories
are followed when listing; links that lead nowhere, what is neither a file nor a directory, and a file
system's own `lost+found` are nothing, and whatever else cannot be read is an error. Opens files only:
a FIFO would hang whoever reads. Never expands patterns, never leaves
the root. Makes no directory in the place of one that was unmounted or moved away: that one is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

from ckptd.diskerrors import counted, leads_nowhere, passing, translated
from ckptd.errors import Corrupt, NotFound, StoreError, Unavailable
from ckptd.filelock import NoFile, open_file, rename_over, unlink_only, version_of
from ckptd.store import Buffer, Children, Object, Source, check_key, check_prefix, is_temporary, reading, temporary_name

log = logging.getLogger(__name__)
#: What `fsck` keeps for itself in the root of a file system, which a store's root may be.
_LOST_AND_FOUND: Final = "lost+found"
#: The kernel moves at most 2 GiB less a page per call.
_CHUNK_NBYTES: Final = 1 << 30

#: An entry of a directory, and what stat says of it; None if it is a directory.
_Found: TypeAlias = tuple[os.DirEntry[str], os.stat_result | None]


class LocalStore:
    """Objects are files below `path`; a key is a relative path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(os.path.expanduser(path)))
        self._locks = True
        #: Where the file system is mounted that the store was on when it was probed.
        self._mount: Path | None = None

    @property
    def url(self) -> str:
        return str(self._root)

    @property
    def conditional(self) -> bool:
        return self._locks

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        target = self._root / check_key(key)
        what = f"cannot write {target}"
        with translated(what):
            fd, temporary = self._create_beside(target)
        nbytes = 0
        try:
            with reading(source) as pieces:
                for piece in pieces:
                    with translated(what), counted(fd, nbytes_hint):
                        nbytes += _write_all(fd, piece)
            with translated(what), passing(what), counted(fd, nbytes_hint):
                os.fsync(fd)
                if replacing is None:
                    os.rename(temporary, target)
                else:
                    self._locks = rename_over(temporary, target, replacing)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        with translated(what), passing(what):
            directory = target.parent
            # All the way up, not only what this call made: another thread may have made a parent and not synced it yet.
            while directory != self._root:
                _sync_directory(directory)
                directory = directory.parent
            _sync_directory(self._root)
        return nbytes

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._root / check_key(key)
        if end is not None and start >= end:
            return b""
        with translated(f"cannot read {path}"):
            try:
                fd = open_file(path)
                try:
                    data = _read_range(fd, start, end)
                finally:
                    os.close(fd)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NoFile) as exc:
                self._check_root()
                raise NotFound(f"{key} is not in the store {self.url}" + (f": {exc}" if isinstance(exc, NoFile) else "")) from exc
        if end is not None and len(data) != end - start:
            raise Corrupt(f"{key} in {self.url} is too short: it has no bytes from {start + len(data)} to {end}")
        return data

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        directory, _, start = check_prefix(prefix).rpartition("/")
        with translated(f"cannot list {self._root}"):
            self._check_root()
        for found in self._walk(self._root / directory, f"{directory}/" if directory else "", (), start):
            if temporary or not is_temporary(found.key):
                yield found

    def children(self, directory: str = "") -> Children:
        top = self._root / check_key(directory) if directory else self._root
        with translated(f"cannot list {self._root}"):
            self._check_root()
        above, linked = self._way(directory), self._is_linked(top)
        objects, directories = [], []
        for entry, file in self._entries(top):
            if is_temporary(entry.name):
                continue
            if file is not None:
                objects.append(_object(f"{directory}/{entry.name}" if directory else entry.name, file, linked=linked))
            elif not (entry.is_symlink() and _identity(Path(entry.path)) in above) and not self._is_lost_and_found(Path(entry.path)):
                directories.append(entry.name)
        return objects, directories

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._root / check_key(key) for key in keys]
        with translated(f"cannot delete in {self._root}"):
            self._check_root()
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)
        self._went(paths)

    def remove(self, key: str, version: str) -> None:
        path = self._root / check_key(key)
        with translated(f"cannot delete {path}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            unlink_only(path, version)
        self._went([path])

    def _went(self, paths: Collection[Path]) -> None:
        """What follows when files have been removed: it is on disk, and directories that are empty now go, too."""
        with translated(f"cannot delete in {self._root}"):
            # On disk before the caller goes on to delete what hung on these.
            for directory in sorted({path.parent for path in paths}):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    _sync_directory(directory)
        for path in paths:
            directory = path.parent
            while directory != self._root:
                try:
                    os.rmdir(directory)
                except OSError:  # not empty, gone, or not ours to remove: tidiness is no promise
                    break
                directory = directory.parent

    def abort_uploads(self, older_than_seconds: float) -> int:
        return 0

    def probe(self) -> None:
        with translated(f"cannot use {self._root} as a store"):
            self._make_root()
            with os.scandir(self._root) as entries:
                next(entries, None)
            fd, temporary = self._create_beside(self._root / "probe")
            try:
                _write_all(fd, b"ckptd")
                os.fsync(fd)
                if _read_file(temporary) != b"ckptd":
                    raise StoreError(f"{self._root} does not give back what was written: use another store")
            finally:
                os.close(fd)
                os.unlink(temporary)
            _sync_directory(self._root)
            self._mount = _mount_point(self._root)

    def _check_root(self) -> None:
        """What was there when it was probed may come back, and nothing is made, or found, in its place until then."""
        if self._root.is_dir():
            if self._mount is not None and not os.path.ismount(self._mount):
                raise Unavailable(f"the store {self._root} was on a disk mounted at {self._mount}, where none is now: mount it again")
        elif self._root.exists():
            raise StoreError(f"the store {self._root} is not a directory")
        elif self._mount is not None:
            raise Unavailable(f"the store {self._root} has been there and is not any more: mount it again, or put it back")
        else:
            raise StoreError(f"the store {self._root} does not exist; is it mounted, is the path right?")

    def _make_root(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
        os.makedirs(self._root, exist_ok=True)
        for path in missing:
            _sync_directory(path.parent)
        if missing:
            log.warning("%s did not exist and was made: if it should be a mounted disk, end the daemon and mount it first", self._root)

    def _create_beside(self, target: Path) -> tuple[int, Path]:
        """A new temporary file in the directory of `target`, open for writing."""
        for last_try in (False,) * 15 + (True,):
            self._check_root()
            temporary = target.parent / temporary_name()
            try:
                os.makedirs(target.parent, exist_ok=True)
                return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temporary
            except (FileNotFoundError, FileExistsError):
                # Somebody deleted the last object of this directory, and the directory with it, also while it was made.
                if last_try:
                    raise
        raise AssertionError("unreachable")

    def _walk(self, directory: Path, prefix: str, above: tuple[tuple[int, int], ...], start: str = "") -> Iterator[Object]:
        """All files below those entries of `directory` that begin with `start`."""
        here = _identity(directory)
        if here is None or here in above:  # a symbolic link that leads back
            return
        linked = self._is_linked(directory)
        for entry, file in self._entries(directory, start, below=bool(above)):
            if file is None:
                yield from self._walk(directory / entry.name, f"{prefix}{entry.name}/", (*above, here))
            else:
                yield _object(f"{prefix}{entry.name}", file, linked=linked)

    def _entries(self, directory: Path, start: str = "", *, below: bool = False) -> Iterator[_Found]:
        """What is in `directory` and begins with `start`, in order: directories with None.

        What disappears meanwhile, leads nowhere, or is no file either, is left out; what cannot be read raises.
        `below`: the root is being walked.
        """
        with translated(f"cannot list {directory}"):
            try:
                with os.scandir(directory) as entries:
                    found = sorted((entry for entry in entries if entry.name.startswith(start)), key=lambda entry: entry.name)
            except OSError as exc:
                if leads_nowhere(exc) or (below and isinstance(exc, PermissionError) and directory == self._root / _LOST_AND_FOUND):
                    return
                raise
        for entry in found:
            with translated(f"cannot list {directory}: cannot look at {entry.name}"):
                try:
                    file = None if entry.is_dir() else entry.stat()
                except OSError as exc:
                    if leads_nowhere(exc):
                        continue
                    raise
            if file is None or stat.S_ISREG(file.st_mode):
                yield entry, file

    def _way(self, directory: str) -> set[tuple[int, int] | None]:
        """Which directories lead from the root to `directory`, both included: a link back to one of them is no child."""
        parts = directory.split("/") if directory else []
        return {_identity(self._root.joinpath(*parts[:count])) for count in range(len(parts) + 1)}

    def _is_linked(self, directory: Path) -> bool:
        """Whether `directory` is a second name, by a symbolic link, of one inside the root. Outside is where people move what is large."""
        root, real = Path(os.path.realpath(self._root)), Path(os.path.realpath(directory))
        return real.is_relative_to(root) and real != root / directory.relative_to(self._root)

    def _is_lost_and_found(self, path: Path) -> bool:
        """Whether this is the file system's own directory in the root, which holds no checkpoint and is not ours to read."""
        return path == self._root / _LOST_AND_FOUND and not os.access(path, os.R_OK | os.X_OK, effective_ids=True)


def _object(key: str, status: os.stat_result, *, linked: bool) -> Object:
    return Object(key, status.st_size, status.st_mtime, linked, version_of(status))


def _identity(directory: Path) -> tuple[int, int] | None:
    """Which directory this is, whatever name led there; None if nothing does."""
    with translated(f"cannot list {directory}"):
        try:
            status = directory.stat()
        except OSError as exc:
            if leads_nowhere(exc):
                return None
            raise
    return status.st_dev, status.st_ino


def _mount_point(directory: Path) -> Path:
    path = Path(os.path.realpath(directory))
    return next(above for above in (path, *path.parents) if os.path.ismount(above) or above == above.parent)


def _write_all(fd: int, piece: Buffer) -> int:
    view = memoryview(piece).cast("B")
    written = 0
    while written < len(view):
        written += os.write(fd, view[written : written + _CHUNK_NBYTES])
    return written


def _read_range(fd: int, start: int, end: int | None) -> bytes:
    """Bytes [start, end) of an open file, fewer if it ends before; to its end if `end` is None."""
    if end is None:
        end = os.fstat(fd).st_size
    pieces = []
    while start < end:
        piece = os.pread(fd, min(end - start, _CHUNK_NBYTES), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_file(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some network and FUSE file systems have no fsync for directories
            raise
    finally:
        os.close(fd)
