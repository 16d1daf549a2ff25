"""From a URL to a Store: which kind it is, and that what may pass is tried again.

Promises: opening touches neither disk nor network, and imports no storage package but the one that
the URL asks for.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from ckptd.errors import InvalidRequest, Unavailable
from ckptd.store import Children, Object, Source, Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
#: Schemes of buckets, with how often a call is tried again: gcsfs itself tries six times, for half a minute.
_BUCKETS: Final = {"s3": 4, "s3a": 4, "gs": 1, "gcs": 1}
#: Longest pause before a retry, in seconds.
_LONGEST_PAUSE: Final = 5.0
_FIRST_PAUSE: Final = 0.2

T = TypeVar("T")


def open_store(url: str, options: Mapping[str, str] | None = None, *, retries: int = 4) -> Store:
    """The store that `url` names: a path, ``file:///path``, or any URL that fsspec can write to.

    `options` are for the storage package (fsspec's names); values are JSON where they parse, else text.
    Touches no object: `probe` tells whether the store works. `retries`: how often a call other than put
    is tried again while the store is unavailable. Raises InvalidRequest: unknown scheme, missing
    package, options that its constructor refuses.
    """
    options = dict(options or {})
    found = _SCHEME.match(url)
    scheme = found.group(1).lower() if found else ""
    if not url or "::" in url:
        raise InvalidRequest(f"{url!r} names no store: give a directory, or a URL such as s3://bucket/prefix")
    if scheme and not url[len(scheme) :].startswith("://"):
        raise InvalidRequest(f"store {url!r}: write {scheme}://… for a URL, or ./{url} for a directory of that name")
    if scheme in ("", "file", "local"):
        from ckptd.localstore import LocalStore

        if options:
            raise InvalidRequest(f"store {url!r} is a local directory and takes no --store-option ({', '.join(sorted(options))})")
        path = url[len(scheme) + len("://") :] if scheme else url
        if scheme and not path.startswith("/"):
            raise InvalidRequest(f"store {url!r}: a file URL has three slashes, file:///directory")
        store: Store = LocalStore(path)
    elif scheme in _BUCKETS:
        from ckptd.bucketstore import BucketStore

        store = BucketStore(url, options)
        retries = min(retries, _BUCKETS[scheme])
    else:
        from ckptd.fsspecstore import FsspecStore

        store = FsspecStore(url, options)
    return Retrying(store, retries=retries) if retries else store


def is_node_local(url: str) -> bool:
    """Whether what a Store of this URL holds may be seen by this machine alone: a directory, or a process's memory."""
    found = _SCHEME.match(url)
    return found is None or found.group(1).lower() in ("file", "local", "memory")


class Retrying:
    """A Store that tries again what may pass: all but put, when they raise Unavailable.

    Exponential backoff with full jitter. A put goes through untouched: only its caller can choose
    a fresh name.
    """

    def __init__(
        self,
        store: Store,
        *,
        retries: int = 4,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._store = store
        self._retries = retries
        self._sleep = sleep
        self._jitter = jitter

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def conditional(self) -> bool:
        return self._store.conditional

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        return self._store.put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._again(lambda: self._store.get(key, start, end))

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        # Whole before the first is handed out: a listing that is tried again must not repeat itself.
        return iter(self._again(lambda: [*self._store.list(prefix, temporary=temporary)]))

    def children(self, directory: str = "") -> Children:
        return self._again(lambda: self._store.children(directory))

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [*keys]
        self._again(lambda: self._store.delete(wanted))

    def remove(self, key: str, version: str) -> None:
        self._again(lambda: self._store.remove(key, version))

    def abort_uploads(self, older_than_seconds: float) -> int:
        return self._again(lambda: self._store.abort_uploads(older_than_seconds))

    def probe(self) -> None:
        self._again(self._store.probe)

    def _again(self, call: Callable[[], T]) -> T:
        for attempt in range(self._retries):
            try:
                return call()
            except Unavailable:
                self._sleep(self._jitter(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)))
        return call()
