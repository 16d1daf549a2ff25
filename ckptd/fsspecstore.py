"""A store behind any URL that fsspec can write to: s3://, gs://, memory:// and what else is installed.

Promises beyond Store's: the package for a scheme is imported when the store is made, not
before; keys are used literally, whatever characters the root has; uploads are streamed in
parts that fit their number, and aborted if anything fails. Never trusts fsspec's listing
cache, its patterns, its `with open(…)` (which publishes what was written before an
exception), nor its `find` where that leaves out what it cannot read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import fsspec
import fsspec.asyn
from fsspec.registry import known_implementations

from ckptd.errors import Corrupt, InvalidRequest, NotFound, StoreError, Unavailable
from ckptd.foreign import code_of, translated
from ckptd.store import Object, Source, check_key, check_prefix, is_temporary, reading, temporary_name

#: Schemes whose files appear at close and not before, and whose `find` is one flat listing that raises.
_ATOMIC: Final = frozenset({"s3", "s3a", "gs", "gcs"})
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
#: Options that stay text even if they would parse as JSON: an access key may be all digits.
_TEXT: Final = frozenset({"endpoint_url", "key", "secret", "token", "username", "password", "profile", "region_name", "project"})
#: Names under which listings tell when an object was written.
_TIMES: Final = ("LastModified", "mtime", "updated", "modified", "last_modified", "created")

#: S3 refuses more parts per object than this.
_MOST_PARTS: Final = 10_000
#: GCS takes parts in multiples of this, S3 nothing smaller than 5 MiB but the last.
_PART_GRAIN: Final = 256 * 1024
_SMALLEST_PART: Final = 16 * 1024 * 1024
#: Of an object whose size nobody knows: enough for 625 GiB.
_BLIND_PART: Final = 64 * 1024 * 1024
#: fsspec deletes one object per request.
_DELETING_THREADS: Final = 8
#: What s3fs hands to botocore. Its default of 10 connections is fewer than the daemon's upload and fetch threads.
_S3_CONFIG: Final = {"max_pool_connections": 32, "retries": {"mode": "standard", "total_max_attempts": 3}}
#: One request with a body, its repetitions included. aiohttp's own timeout starts only when the body is sent, so that
#: a server which accepts a connection and then says nothing would hold an upload for ever.
_REQUEST_SECONDS: Final = 600.0


def part_nbytes(nbytes_hint: int | None) -> int:
    """Bytes per part of an upload of about `nbytes_hint` bytes (a tenth more still fits)."""
    if nbytes_hint is None:
        return _BLIND_PART
    needed = math.ceil(nbytes_hint * 1.1 / _MOST_PARTS)
    return max(_SMALLEST_PART, math.ceil(needed / _PART_GRAIN) * _PART_GRAIN)


class FsspecStore:
    """Objects of the file system that fsspec has for the URL's scheme, below the URL's path."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self._scheme = url.partition("://")[0].lower()
        self._url = _masked(url)
        kind = _filesystem_class(self._scheme, self._url)
        with _as_invalid(self._url):
            # fsspec's own way from a URL to a file system (url_to_fs) caches instances and expands patterns; these are its parts.
            from_url = kind._get_kwargs_from_urls(url)  # noqa: SLF001
            constructor = {**from_url, **_constructor_options(self._scheme, options or {})}
            self._fs: Any = kind(**constructor, use_listings_cache=False, skip_instance_cache=True)
            self._root = str(kind._strip_protocol(url)).rstrip("/")  # noqa: SLF001
        if _EXTRAS.get(self._scheme) == "s3":
            # s3fs tries again around botocore, which tries again, and for reads twice over: 125 times the read timeout.
            self._fs.retries = 1
            # What its files call for every part.
            self._fs.call_s3 = functools.partial(_bounded_call, self._fs)
        if self._scheme in _ATOMIC and not self._root:
            raise InvalidRequest(f"store {self._url!r} names no bucket: write {self._scheme}://bucket/prefix")

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None) -> int:
        path = self._path(check_key(key))
        if self._scheme in _ATOMIC:
            return self._upload(path, source, nbytes_hint)
        # Anywhere else a file may be visible while it grows: write beside it, then move.
        parent = path.rpartition("/")[0]
        temporary = f"{parent}/{temporary_name()}"
        with self._translated("cannot write", key, missing=StoreError):
            self._fs.makedirs(parent, exist_ok=True)
        try:
            nbytes = self._upload(temporary, source, nbytes_hint)
            with self._translated("cannot write", key, missing=StoreError):
                self._move(temporary, path)
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
                # The answer to a range of which not one byte exists.
                if code_of(exc) not in ("InvalidRange", "416"):
                    raise
        if end is not None and len(data) != end - start:
            raise Corrupt(f"{key} in {self._url}: {end - start} bytes from {start} on were asked for, the store gave {len(data)}")
        return data

    def list(self, prefix: str = "") -> Iterator[Object]:
        directory, _, _ = check_prefix(prefix).rpartition("/")
        for found in self._listing(directory):
            if found.key.startswith(prefix) and not is_temporary(found.key):
                yield found

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [check_key(key) for key in keys]
        if len(wanted) <= 1:
            for key in wanted:
                self._delete(key)
            return
        with ThreadPoolExecutor(min(_DELETING_THREADS, len(wanted)), "store-delete") as threads:
            for done in [threads.submit(self._delete, key) for key in wanted]:
                done.result()

    def probe(self) -> None:
        name = temporary_name()  # what a killed probe leaves is in nobody's way
        if self._scheme not in _ATOMIC:
            with self._translated("cannot use", "the root", missing=StoreError):
                self._fs.makedirs(self._root, exist_ok=True)
        try:
            self.put(f"{name}/{name}", lambda: [b"ckptd"])
        except (StoreError, Unavailable) as exc:
            raise type(exc)(f"cannot use {self._url} as a store: {str(exc).partition(': ')[2] or exc}") from exc
        if [found.key for found in self._listing(name)] != [f"{name}/{name}"]:
            raise StoreError(f"{self._url} does not list what was just written: ckptd needs a store with consistent listings")
        if self.get(f"{name}/{name}") != b"ckptd":
            raise StoreError(f"{self._url} does not give back what was written: use another store")
        self.delete([f"{name}/{name}"])
        with contextlib.suppress(Exception):
            if self._scheme not in _ATOMIC:
                self._fs.rmdir(self._path(name))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _translated(self, what: str, key: str, *, missing: type[NotFound | StoreError]) -> contextlib.AbstractContextManager[None]:
        return translated(f"{what} {key} in {self._url}", missing=missing)

    def _upload(self, path: str, source: Source, nbytes_hint: int | None) -> int:
        """Streams `source` into a file that appears when it is complete, if the file system has such files."""
        part = part_nbytes(nbytes_hint)
        what = f"cannot write {path}"
        with translated(what, missing=StoreError):
            file = self._fs.open(path, "wb", block_size=part)
        nbytes = 0
        try:
            with reading(source) as pieces:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    while view:
                        # Exactly a part at a time: fsspec uploads whatever it holds once it holds a part or more.
                        fitting = view[: part - nbytes % part]
                        with translated(what, missing=StoreError):
                            file.write(fitting)
                        nbytes += len(fitting)
                        view = view[len(fitting) :]
            with translated(what, missing=StoreError):
                file.close()
        except BaseException:
            _abort(file, atomic=self._scheme in _ATOMIC)
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

    def _listing(self, directory: str) -> Sequence[Object]:
        top = self._path(directory)
        lead = f"{self._root}/"
        with self._translated("cannot list", directory or "the root", missing=StoreError):
            self._fs.invalidate_cache()
            if self._scheme in _ATOMIC:
                listed = self._fs.find(top, detail=True).values()
            else:
                listed = self._walk(top, may_be_missing=top != self._root)
            return [
                Object(found["name"].removeprefix(lead), int(found["size"] or 0), _modified(found))
                for found in listed
                if found["type"] == "file" and found["name"].startswith(lead)
            ]

    def _walk(self, directory: str, *, may_be_missing: bool) -> Iterator[dict[str, Any]]:
        """All files below; fsspec's own walk would leave out the directories that it cannot read."""
        try:
            listed = self._fs.ls(directory, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if may_be_missing:
                return
            raise
        for found in listed:
            if found["name"].rstrip("/") == directory:
                continue  # some list a file, or the directory itself, as its own content
            if found["type"] == "directory":
                yield from self._walk(found["name"].rstrip("/"), may_be_missing=True)
            else:
                yield found


def _filesystem_class(scheme: str, url: str) -> Any:
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as exc:
        known = known_implementations.get(scheme, {}).get("err", "")
        extra = _EXTRAS.get(scheme)
        advice = f"pip install 'ckptd[{extra}]'" if extra else known or f"install the package that serves {scheme}://"
        raise InvalidRequest(f"store {url!r} needs a package that is not installed: {advice}") from exc
    except ValueError as exc:
        raise InvalidRequest(
            f"store {url!r}: the scheme {scheme!r} is unknown; known are a directory, file, s3, gs, memory and fsspec's other schemes"
        ) from exc


def _constructor_options(scheme: str, options: Mapping[str, str]) -> dict[str, Any]:
    """`KEY=VALUE` options as arguments of the file system's class."""
    arguments = {name: _option(name, text) for name, text in options.items()}
    if _EXTRAS.get(scheme) == "s3":
        region = arguments.pop("region_name", None)
        if region is not None:
            arguments["client_kwargs"] = {"region_name": region, **arguments.get("client_kwargs", {})}
        arguments["config_kwargs"] = {**_S3_CONFIG, **arguments.get("config_kwargs", {})}
    return arguments


def _option(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if name in _TEXT and not isinstance(value, dict) else value


def _bounded_call(fs: Any, *arguments: Any, **named: Any) -> Any:
    """s3fs's `call_s3`, but it ends."""

    async def call() -> Any:
        return await asyncio.wait_for(fs._call_s3(*arguments, **named), _REQUEST_SECONDS)  # noqa: SLF001 - call_s3 is this, waited for without end

    return fsspec.asyn.sync(fs.loop, call)


@contextlib.contextmanager
def _as_invalid(url: str) -> Iterator[None]:
    """Whatever a constructor does not like is the caller's to fix."""
    try:
        yield
    except Exception as exc:
        raise InvalidRequest(f"store {url!r}: {exc}; look at its --store-option values") from exc


def _masked(url: str) -> str:
    """The URL without what stands before an @ in its first part."""
    scheme, _, rest = url.partition("://")
    first, slash, path = rest.partition("/")
    _, at, host = first.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}{(slash + path).rstrip('/')}"


def _abort(file: Any, *, atomic: bool) -> None:
    """Gives up an upload. If `atomic`, nothing appears, neither now nor when the file object is collected."""
    with contextlib.suppress(Exception):  # what brought us here is what the caller has to know
        if atomic:
            file.discard()
        else:
            file.close()
    if atomic:  # fsspec closes, and so publishes, a file that is collected open; not every discard() prevents that
        file.closed = True


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
