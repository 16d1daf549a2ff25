"""A store behind any other URL that fsspec can write to: memory://, sftp://, webdav://, whatever is installed.

Promises beyond Store's: keys are used literally, whatever characters the root has; a file grows
beside its name and is moved there. Never trusts fsspec's listing cache, its patterns, its
`with open(…)` (which publishes what was written before an exception), nor its `find`, which leaves
out what it cannot read. fsspec knows no conditions: every put takes place, whatever it was to replace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import fsspec

from ckptd.errors import Corrupt, NotFound, StoreError, Unavailable
from ckptd.filesystem import masked, open_filesystem
from ckptd.foreign import code_of, translated
from ckptd.store import Children, Object, Source, check_key, check_prefix, exercise, is_key, is_temporary, reading, temporary_name

#: Names under which listings tell when an object was written.
_TIMES: Final = ("LastModified", "mtime", "updated", "modified", "last_modified", "created")
_PART_NBYTES: Final = 16 * 1024 * 1024
#: fsspec deletes one object per request.
_DELETING_THREADS: Final = 8


class FsspecStore:
    """Objects of the file system that fsspec has for the URL's scheme, below the URL's path."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self._url = masked(url)
        self._fs, self._root = open_filesystem(url, options or {})

    @property
    def url(self) -> str:
        return self._url

    @property
    def conditional(self) -> bool:
        return False

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        path = self._path(check_key(key))
        parent = path.rpartition("/")[0]
        temporary = f"{parent}/{temporary_name()}"
        with self._translated("cannot write", key, missing=StoreError):
            self._fs.makedirs(parent, exist_ok=True)
        try:
            nbytes = self._write(temporary, key, source)
            with self._translated("cannot write", key, missing=StoreError):
                try:
                    self._move(temporary, path)
                except FileNotFoundError as exc:
                    raise Unavailable(f"cannot write {key} in {self._url}: somebody removed it while it was written") from exc
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise
        return nbytes

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(check_key(key))
        if end is not None and start >= end:
            return b""
        data = b""
        with self._translated("cannot read", key, missing=NotFound):
            try:
                data = bytes(self._fs.cat_file(path, start=start, end=end))
            except Exception as exc:
                # Some services' answer to a range of which not one byte exists.
                if code_of(exc) not in ("InvalidRange", "416"):
                    raise
        if end is not None and len(data) != end - start:
            raise Corrupt(f"{key} in {self._url}: {end - start} bytes from {start} on were asked for, the store gave {len(data)}")
        return data

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        directory, _, start = check_prefix(prefix).rpartition("/")
        with self._translated("cannot list", directory or "the root", missing=StoreError):
            listed = [*self._walk(self._path(directory), start, may_be_missing=bool(directory))]
        objects = (self._object(found) for found in listed)
        return (found for found in objects if is_key(found.key) and (temporary or not is_temporary(found.key)))

    def children(self, directory: str = "") -> Children:
        top = self._path(check_key(directory)) if directory else self._root
        with self._translated("cannot list", directory or "the root", missing=StoreError):
            listed = [*self._ls(top, may_be_missing=bool(directory))]
        shown = [found for found in listed if not is_temporary(found["name"].rstrip("/"))]
        objects = [self._object(found) for found in shown if found["type"] != "directory"]
        names = {found["name"].rstrip("/")[len(top) + 1 :] for found in shown if found["type"] == "directory"}
        return sorted((found for found in objects if is_key(found.key)), key=lambda found: found.key), sorted(filter(is_key, names))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [check_key(key) for key in keys]
        with ThreadPoolExecutor(max(1, min(_DELETING_THREADS, len(wanted))), "store-delete") as threads:
            for done in [threads.submit(self._delete, key) for key in wanted]:
                done.result()

    def remove(self, key: str, version: str) -> None:
        self.delete([key])

    def abort_uploads(self, older_than_seconds: float) -> int:
        return 0

    def probe(self) -> None:
        with self._translated("cannot use", "the root", missing=StoreError):
            self._fs.makedirs(self._root, exist_ok=True)
        emptied = exercise(self)
        with contextlib.suppress(Exception):
            self._fs.rmdir(self._path(emptied))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _translated(self, what: str, key: str, *, missing: type[NotFound | StoreError]) -> contextlib.AbstractContextManager[None]:
        return translated(f"{what} {key} in {self._url}", missing=missing)

    def _write(self, path: str, key: str, source: Source) -> int:
        with self._translated("cannot write", key, missing=StoreError):
            file = self._fs.open(path, "wb", block_size=_PART_NBYTES)
        nbytes = 0
        try:
            with reading(source) as pieces:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    with self._translated("cannot write", key, missing=StoreError):
                        file.write(view)
                    nbytes += len(view)
            with self._translated("cannot write", key, missing=StoreError):
                file.close()
        except BaseException:
            with contextlib.suppress(Exception):  # what brought us here is what the caller has to know
                file.close()
            raise
        return nbytes

    def _move(self, temporary: str, path: str) -> None:
        """Renames where the file system can, else copies at once and deletes. Never through fsspec's patterns."""
        if type(self._fs).mv is not fsspec.AbstractFileSystem.mv:
            self._fs.mv(temporary, path)
        else:
            self._fs.cp_file(temporary, path)
            self._fs.rm_file(temporary)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._translated("cannot delete", key, missing=NotFound):
            self._fs.rm_file(self._path(key))

    def _walk(self, directory: str, start: str = "", *, may_be_missing: bool) -> Iterator[dict[str, Any]]:
        """All files below what begins with `start`; fsspec's own walk would leave out the directories that it cannot read."""
        for found in self._ls(directory, may_be_missing=may_be_missing):
            name = found["name"].rstrip("/")
            if not name[len(directory) + 1 :].startswith(start):
                continue
            if found["type"] == "directory":
                yield from self._walk(name, may_be_missing=True)
            else:
                yield found

    def _ls(self, directory: str, *, may_be_missing: bool) -> Iterator[dict[str, Any]]:
        """What is directly in a directory, never from a cache."""
        self._fs.invalidate_cache()
        try:
            listed = self._fs.ls(directory, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if not may_be_missing:
                raise
            self._fs.info(self._root)  # raises if the root is missing, too: then nobody knows what is in the store
            return
        # Some list a file, or the directory itself, as its own content.
        yield from (found for found in listed if found["name"].startswith(f"{directory}/") and found["name"].rstrip("/") != directory)

    def _object(self, found: Mapping[str, Any]) -> Object:
        return Object(found["name"].removeprefix(f"{self._root}/"), int(found["size"] or 0), _modified(found))


def _modified(found: Mapping[str, Any]) -> float:
    """When an object was last written, in seconds since the epoch; 0.0 if the listing does not say."""
    for name in _TIMES:
        value = found.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
