"""Items of stock checkpoints: read from the store, decoded, checked, and put in their place in a segment.

An item goes whole: what stock DCP stored of a tensor or an object, without ``stream.zstd/1``, is
one container that only torch can read. Promises: an item counts as read only after its
container was found whole and each record with a checksum matched it; one that its file does not
hold, or that decodes to more than was reserved for it, is Corrupt; small items that lie together
are read in one request, and memory does not grow with what they claim. All calls block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckptd import container, zstream
from ckptd.blocks import REQUEST_NBYTES, StoredBlock, check_range
from ckptd.errors import CkptdError, Corrupt, NotFound
from ckptd.store import Store
from ckptd.table import read_exactly
from ckptd.v1.manifest_pb2 import Item, Table

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredItem(StoredBlock):
    """One item: `nbytes` is what is reserved for it, and exact unless it is a compressed tensor."""

    name: str
    compressed: bool
    is_object: bool

    @property
    def is_large(self) -> bool:
        """It takes several requests, which can be made at the same time."""
        return self.length > REQUEST_NBYTES and not self.compressed


@dataclass(frozen=True, slots=True)
class Got:
    """Stored bytes that were read, and how many bytes each item has, by its number."""

    nbytes: int
    lengths: dict[int, int]


@dataclass(frozen=True, slots=True)
class ItemShard:
    """Items of one data file of a stock checkpoint that are stored in the same way."""

    key: str
    compressed: bool
    table: Table
    offsets: Sequence[int]
    lengths: Sequence[int]
    #: Items that cannot be read, by number, and why.
    refused: Mapping[int, CkptdError]

    def find(self, items: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[StoredItem]:
        """The items, whole, in file order. Raises why one of them cannot be read."""
        found: dict[int, StoredItem] = {}
        for number, start, end in zip(items, starts, ends, strict=True):
            check_range(self.table, number, start, end)
            if number in self.refused:
                raise type(self.refused[number])(str(self.refused[number]))
            if start == end or number in found:
                continue
            item = self.table.items[number]
            found[number] = StoredItem(
                key=(number, 0),
                at=item.at,
                nbytes=item.nbytes,
                offset=self.offsets[number],
                length=self.lengths[number],
                digest=b"",
                name=named(self.key, item, self.offsets[number], self.lengths[number]),
                compressed=self.compressed,
                is_object=item.kind == Item.OPAQUE_OBJECT,
            )
        return sorted(found.values(), key=lambda item: item.offset)

    def read(self, store: Store, path: Path, run: Sequence[StoredItem]) -> Got:
        """Reads, decodes, writes and checks items that lie together. Bad bytes are read twice. Not for large ones."""
        window = Window(store, self.key, max(item.offset + item.length for item in run))
        lengths = {}
        with open(path, "r+b", buffering=0) as segment:
            for item in run:
                for last_try in (False, True):
                    try:
                        lengths[item.key[0]] = _place(segment.fileno(), window, item)
                        break
                    except Corrupt as exc:
                        window.forget()
                        if last_try:
                            raise damaged(item.name, exc) from exc
        return Got(window.read_nbytes, lengths)

    def read_part(self, store: Store, path: Path, item: StoredItem, start: int, end: int) -> int:
        """Puts stored bytes [start, end) of a large item in their place, unchecked; returns their number."""
        window = Window(store, self.key, item.offset + end)
        with open(path, "r+b", buffering=0) as segment:
            write(segment.fileno(), item.at + start, window.read(item.offset + start, item.offset + end))
        return window.read_nbytes


def named(key: str, item: Item, offset: int, length: int) -> str:
    """How messages call an item."""
    fqn = item.fqn[:200].decode(errors="backslashreplace")
    chunk = f" at {tuple(item.offset)}" if item.has_offset else ""
    return f"{key}: {fqn!r}{chunk} (bytes {offset} to {offset + length})"


def damaged(name: str, exc: Corrupt) -> Corrupt:
    """Says what is wrong with the item of that name."""
    return Corrupt(f"{name} is damaged: {exc}; load another checkpoint, as fallback=True does")


class Window:
    """Bytes of one object up to `end`, read in requests of REQUEST_NBYTES, mostly forward."""

    def __init__(self, store: Store, key: str, end: int) -> None:
        self._store = store
        self._key = key
        self._end = end
        self._at = 0
        self._data = memoryview(b"")
        self.read_nbytes = 0

    def view(self, start: int, end: int) -> memoryview:
        """Bytes [start, end), not copied if one request has brought them all."""
        until = self._at + len(self._data)
        if self._at <= start <= end <= until:
            return self._data[start - self._at : end - self._at]
        if self._at <= start < until:
            first = bytes(self._data[start - self._at :])
            return memoryview(first + self.view(until, end))
        try:
            self._data = memoryview(self._store.get(self._key, start, max(end, min(start + REQUEST_NBYTES, self._end))))
        except NotFound as exc:
            raise Corrupt(f"{self._key} is missing from the store, although the checkpoint's .metadata names it") from exc
        self._at = start
        self.read_nbytes += len(self._data)
        return self._data[: end - start]

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end)."""
        return bytes(self.view(start, end))

    def forget(self) -> None:
        """What was read was not good: the next one asks again."""
        self._data = memoryview(b"")


def write(fd: int, at: int, data: bytes | memoryview) -> None:
    """Puts bytes into a segment."""
    view, written = memoryview(data), 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], at + written)


def _place(fd: int, window: Window, item: StoredItem) -> int:
    """Puts one item in its place; returns how many bytes it has there. Raises Corrupt."""
    end, nbytes = item.offset + item.length, 0
    if not item.compressed:
        write(fd, item.at, window.view(item.offset, end))
        nbytes = item.length
    else:
        for piece in zstream.plain(window.read, item.offset, end):
            if nbytes + len(piece) > item.nbytes:
                raise Corrupt(
                    f"it decodes to more than {item.nbytes} bytes, which is more than a tensor of its shape and dtype takes"
                    " (stock DCP may load it if it is a subclass that keeps more)"
                )
            write(fd, item.at + nbytes, piece)
            nbytes += len(piece)
    check(fd, item, nbytes)
    return nbytes


def check_placed(path: Path, item: StoredItem) -> None:
    """Raises Corrupt if the item that was put in its place in parts is damaged."""
    with open(path, "rb", buffering=0) as segment:
        check(segment.fileno(), item, item.length)


def check(fd: int, item: StoredItem, nbytes: int) -> None:
    """Looks at an item in its place. A tensor is a container; an object need not be: its planner may write what it wants."""

    def read(start: int, end: int) -> bytes:
        return read_exactly(fd, item.at + start, end - start)

    if not item.is_object or container.is_container(read, nbytes):
        container.check(read, nbytes)


def measure(store: Store, key: str, places: Sequence[tuple[int, int]], most_nbytes: int) -> tuple[list[int | Corrupt], int]:
    """How many bytes items behind zstd have, given their places (offset, length) in file order; and how many were read for it.

    Corrupt, and what about it, stands for one that is damaged or has more than `most_nbytes`.
    """
    window = Window(store, key, max((offset + length for offset, length in places), default=0))
    found: list[int | Corrupt] = []
    for offset, length in places:
        for last_try in (False, True):
            try:
                found.append(_measured(window, offset, offset + length, most_nbytes))
                break
            except Corrupt as exc:
                window.forget()
                if last_try:
                    found.append(exc)
    return found, window.read_nbytes


def _measured(window: Window, start: int, end: int, most_nbytes: int) -> int:
    nbytes = 0
    for piece in zstream.plain(window.read, start, end):
        nbytes += len(piece)
        if nbytes > most_nbytes:
            raise Corrupt(f"it decodes to more than the {most_nbytes} bytes of memory that this daemon has")
    return nbytes
