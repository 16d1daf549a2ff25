"""Durable bytes: named objects that are put whole, read in ranges, listed and deleted.

Promises, for every Store: a put is whole or invisible, whatever fails in the middle of it,
the source of the bytes included; a listing is never cached, and one that cannot be read
raises; foreign errors become ours here, once. All calls block and may come from any
thread. Never interprets bytes, never imports a storage package before a URL asks for it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from ckptd.errors import Corrupt, InvalidRequest, NotFound, StoreError, Unavailable, WrongPhase
from ckptd.model import mint_token

#: Contiguous bytes, read only or not.
Buffer: TypeAlias = bytes | bytearray | memoryview
#: Yields an object's bytes afresh at each call, so that a put can be tried again.
Source: TypeAlias = Callable[[], Iterable[Buffer]]

#: What a conditional put replaces where there must be nothing; no version of an object is spelled so.
ABSENT: Final = "absent"

_TEMPORARY = re.compile(r"\.ckptd-[0-9a-f]{16}\.tmp")


class Changed(WrongPhase):
    """A conditional put or removal found another object than it was to replace, or none, or one where there was to be none.

    It may also be the object of this very put, when it was sent twice because the first answer was lost: look.
    """


@dataclass(frozen=True, slots=True)
class Object:
    """One object as a listing shows it."""

    key: str
    nbytes: int
    modified: float
    """Seconds since the epoch; 0.0 if the store does not say."""
    linked: bool = False
    """Found through a symbolic link to a directory: this may be another name of what lies elsewhere."""
    version: str = ""
    """Opaque; another one after each put of other bytes under this key. "" if the store tells none."""


#: What is directly below a directory: objects, and the names of directories.
Children: TypeAlias = tuple[list[Object], list[str]]


class Store(Protocol):
    """Keys are relative to the store's root, parts separated by ``/``; none is empty, ``.`` or ``..``."""

    @property
    def url(self) -> str:
        """Where it is, for people: credentials are masked."""

    @property
    def conditional(self) -> bool:
        """Whether `replacing` is looked at, as far as is known: a service or file system may turn out not to offer it."""

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        """Stores all bytes of `source()` under `key`, replacing atomically what is there. Returns their number.

        Whatever is raised on the way, nothing of it is visible. What `source` raises comes out as it is.
        `nbytes_hint`: about how many bytes are to come (it decides the size of an upload's parts).
        `replacing`: a version that a listing told, or ABSENT: the put takes place only if that is what is there
        when it takes place, else Changed is raised. Stores that are not `conditional` put in any case.
        Raises StoreError, or Unavailable: then the put may be tried again, and in the rare case that
        only the answer was lost the object is there already, whole. Not retried here.
        """

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes [start, end) of an object; to its end if `end` is None (b"" if `start` lies beyond it).

        An empty range is not looked up. Raises NotFound; Corrupt if `end` is given and the answer
        is not exactly that long; StoreError, Unavailable.
        """

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        """Every object whose key starts with `prefix`, as it is now, in no promised order.

        Costs as much as what starts with `prefix`, whatever else the store holds. Leaves out temporary names of
        our own unless `temporary`, and what others stored under names that are no keys. Raises StoreError
        (also if the root is missing), Unavailable.
        """

    def children(self, directory: str = "") -> Children:
        """What is directly below `directory` ("" is the root) now: its objects, and the names of its directories, in order.

        One shallow listing, not one of everything below. Leaves out what `list` leaves out, and our own temporary
        directories. A missing directory has no children; a missing root raises StoreError, as whatever else
        cannot be read does; or Unavailable.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, many at once; missing ones are fine. Raises StoreError, Unavailable: then some may be left."""

    def remove(self, key: str, version: str) -> None:
        """Deletes an object if `version` is what is there, else raises Changed; a missing one is fine.

        Stores that are not `conditional`, and services that know conditions of puts only, delete whatever is there.
        Raises StoreError, Unavailable: then it may have been deleted.
        """

    def abort_uploads(self, older_than_seconds: float) -> int:
        """Gives up uploads below the root that began longer ago and never ended; returns their number.

        What a killed daemon leaves on S3, invisible and paid for. 0 where the store itself forgets them or they
        are files that `list` shows as temporary. Raises StoreError, Unavailable.
        """

    def probe(self) -> None:
        """Writes, lists, reads and deletes a small object. Creates the root where a store has directories.

        Raises StoreError if this can never work until an operator acts, Unavailable if it may later.
        """


def check_key(key: str) -> str:
    """Returns `key`; raises InvalidRequest if it could lead out of the store or is ambiguous."""
    if not is_key(key):
        raise InvalidRequest(f"{key!r} is not a key of a store: parts are separated by '/', none is empty, '.' or '..'")
    return key


def is_key(text: str) -> bool:
    """Whether `check_key` would take it: others may store what we would never name so."""
    return "\0" not in text and not any(part in ("", ".", "..") for part in text.split("/"))


def check_prefix(prefix: str) -> str:
    """Returns `prefix`; raises InvalidRequest unless it is the beginning of a key."""
    directory, _, _ = prefix.rpartition("/")
    if directory or prefix.startswith("/"):
        check_key(directory)
    return prefix


def temporary_name() -> str:
    """A fresh name for a file that is not whole yet. `list` leaves such names out."""
    return f".ckptd-{mint_token()}.tmp"


def is_temporary(key: str) -> bool:
    """Whether `key` ends in a name that `temporary_name` made."""
    return _TEMPORARY.fullmatch(key.rpartition("/")[2]) is not None


def exercise(store: Store) -> str:
    """Writes, lists, reads and deletes a small object; returns the directory that held it.

    It has a temporary name: what a killed probe leaves is in nobody's way. Raises StoreError, also if the store
    does not give back what it was given, and Unavailable.
    """
    name = temporary_name()
    key = f"{name}/{name}"
    wrong = ""
    try:
        store.put(key, lambda: [b"ckptd"])
        if [found.key for found in store.list(f"{name}/", temporary=True)] != [key]:
            wrong = "it does not list what was just written: ckptd needs a store with consistent listings"
        elif store.get(key) != b"ckptd":
            wrong = "it does not give back what was written: use another store"
        store.delete([key])
    except (StoreError, Unavailable) as exc:
        raise type(exc)(f"cannot use {store.url} as a store: {str(exc).partition(': ')[2] or exc}") from exc.__cause__
    except (NotFound, Corrupt) as exc:
        raise StoreError(f"cannot use {store.url} as a store: it does not give back what was written: {exc}") from exc
    if wrong:
        raise StoreError(f"cannot use {store.url} as a store: {wrong}")
    return name


@contextlib.contextmanager
def reading(source: Source) -> Iterator[Iterator[Buffer]]:
    """The pieces of `source`; a generator behind it is closed at the end, also of a put that failed in the middle."""
    pieces = iter(source())
    try:
        yield pieces
    finally:
        close = getattr(pieces, "close", None)
        if callable(close):
            close()
