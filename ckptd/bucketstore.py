"""A store in a bucket: S3, what speaks like it, and GCS.

Promises beyond Store's: keys are used literally, whatever characters the root has; an object
appears when its last byte is confirmed, and uploads that fail are aborted; listings are of this
moment; many deletes are few requests where the service offers that; credentials that expire are
looked for anew. Uses fsspec's packages for their connections and credentials alone, none of
their files, caches and patterns.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from ckptd import gcs, s3
from ckptd.errors import Corrupt, InvalidRequest, NotFound, StoreError, Unavailable
from ckptd.filesystem import SERVICES, masked, open_filesystem, values
from ckptd.foreign import code_of, credentials_refused, translated
from ckptd.store import Changed, Children, Object, Source, check_key, check_prefix, exercise, is_key, is_temporary, reading

_DELETING_THREADS: Final = 8
#: What services answer when a condition of a put does not hold; S3 says NoSuchKey of what has gone.
_CHANGED: Final = frozenset({"412", "PreconditionFailed", "NoSuchKey"})


class BucketStore:
    """Objects of the bucket that the URL names, below the URL's path."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        options = options or {}
        scheme = url.partition("://")[0].lower()
        fs, root = open_filesystem(url, options)
        self._url = masked(url)
        if not root.partition("/")[0]:
            raise InvalidRequest(f"store {self._url!r} names no bucket: write {scheme}://bucket/prefix")
        gcs_token = values(options).get("token")
        self._bucket = s3.Bucket(fs, root) if SERVICES[scheme] == "s3" else gcs.Bucket(fs, root, gcs_token)
        self._lead = f"{self._bucket.key}/" if self._bucket.key else ""
        #: Whether the service has taken the credentials once: then they were right, and may be so again.
        self._worked = False
        self._deletes_many = True

    @property
    def url(self) -> str:
        return self._url

    @property
    def conditional(self) -> bool:
        return self._bucket.conditional

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        name = self._lead + check_key(key)
        part = self._bucket.part_nbytes(nbytes_hint)
        nbytes = 0
        held = io.BytesIO()
        upload: s3.Upload | gcs.Upload | None = None
        try:
            with reading(source) as pieces:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    nbytes += len(view)
                    while view:
                        if held.tell() == part:  # a part, and not the last
                            with self._translated("cannot write", key, missing=StoreError), self._only_over(replacing, key):
                                if upload is None:
                                    upload = self._bucket.upload(name, replacing)
                                upload.send(held)
                            held = io.BytesIO()
                        view = view[held.write(view[: part - held.tell()]) :]
            with self._translated("cannot write", key, missing=StoreError), self._only_over(replacing, key):
                if upload is None:
                    self._bucket.put(name, held, replacing)
                else:
                    upload.finish(held)
        except BaseException:
            if upload is not None:
                with contextlib.suppress(Exception):  # what brought us here is what the caller has to know
                    upload.abort()
            raise
        return nbytes

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        name = self._lead + check_key(key)
        if end is not None and start >= end:
            return b""
        with self._translated("cannot read", key, missing=NotFound):
            data = self._bucket.get(name, start, end)
        if end is not None and len(data) != end - start:
            raise Corrupt(f"{key} in {self._url}: {end - start} bytes from {start} on were asked for, the store gave {len(data)}")
        return data

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        objects, _ = self._pages(check_prefix(prefix), "")
        return (found for found in objects if temporary or not is_temporary(found.key))

    def children(self, directory: str = "") -> Children:
        lead = f"{check_key(directory)}/" if directory else ""
        objects, cut = self._pages(lead, "/")
        names = {path.removeprefix(lead) for path in cut if is_key(path) and not is_temporary(path)}
        return sorted((found for found in objects if not is_temporary(found.key)), key=lambda found: found.key), sorted(names)

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [self._lead + check_key(key) for key in keys]
        for at in range(0, len(wanted), self._bucket.most_deletes):
            some = wanted[at : at + self._bucket.most_deletes]
            if len(some) == 1 or not self._deletes_many:
                self._delete_singly(some)
                continue
            try:
                with self._translated("cannot delete", "many objects", missing=StoreError):
                    self._bucket.delete_many(some)
            except StoreError:
                # Not offered, or not as this version asks for it; or refused, and then so is one of these.
                self._delete_singly(some)
                self._deletes_many = False

    def remove(self, key: str, version: str) -> None:
        name = self._lead + check_key(key)
        try:
            with contextlib.suppress(NotFound), self._translated("cannot delete", key, missing=NotFound), self._only_over(version, key):
                self._bucket.delete(name, version)
        except Changed:
            if any(found.key == key for found in self.list(key)):  # else it is what a service may say of what has gone
                raise

    def abort_uploads(self, older_than_seconds: float) -> int:
        with self._translated("cannot give up old uploads", "below the root", missing=StoreError):
            return self._bucket.abort_uploads(self._lead, older_than_seconds)

    def probe(self) -> None:
        exercise(self)

    def _delete_singly(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(min(_DELETING_THREADS, len(names)), "store-delete") as threads:
            for done in [threads.submit(self._delete, name) for name in names]:
                done.result()

    def _delete(self, name: str) -> None:
        key = name.removeprefix(self._lead)
        with contextlib.suppress(NotFound), self._translated("cannot delete", key, missing=NotFound):
            self._bucket.delete(name)

    def _pages(self, prefix: str, delimiter: str) -> Children:
        """A listing to its end: objects below the root, and what `delimiter` cut short."""
        objects: list[Object] = []
        cut: list[str] = []
        seen: set[str] = set()
        token: str | None = None
        skip = len(self._lead)
        while True:
            with self._translated("cannot list", prefix or "the root", missing=StoreError):
                found, prefixes, token = self._bucket.page(self._lead + prefix, delimiter, token)
            objects += (replace(one, key=one.key[skip:]) for one in found if is_key(one.key[skip:]))
            cut += (name[skip:].removesuffix("/") for name in prefixes)
            if token is None:
                return objects, cut
            if token in seen:
                raise StoreError(f"{self._url} repeats itself when it lists {prefix or 'the root'}: use another store")
            seen.add(token)

    @contextlib.contextmanager
    def _only_over(self, replacing: str | None, key: str) -> Iterator[None]:
        """Inside it, the answer that something else is there than is to go comes out as Changed."""
        try:
            yield
        except Exception as exc:
            if replacing is not None and (isinstance(exc, FileExistsError) or code_of(exc) in _CHANGED):  # gcsfs's word for a 412
                raise Changed(f"{key} in {self._url} is not what it was: look again") from exc
            raise

    @contextlib.contextmanager
    def _translated(self, what: str, key: str, *, missing: type[NotFound | StoreError]) -> Iterator[None]:
        """Raises the service's errors as ours; whoever comes after credentials that were not taken uses fresh ones."""
        try:
            with translated(f"{what} {key} in {self._url}", missing=missing):
                yield
        except (StoreError, Unavailable) as exc:
            if not credentials_refused(exc.__cause__):
                raise
            self._bucket.renew()
            if not self._worked:
                raise
            raise Unavailable(f"{exc}; they were taken before, and are looked for anew where they came from") from exc.__cause__
        self._worked = True
