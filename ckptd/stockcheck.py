"""How far the bytes of a checkpoint that stock DCP wrote can be checked: it keeps no checksums of its own.

An item is what `torch.save` made of it, perhaps behind ``stream.zstd/1``. Checked are its place in
its file, the zstd frames, the container's structure and its records' CRC-32, and that a tensor's
record is as long as `.metadata` says. What cannot be checked is counted in a note, and is no damage.

Promises: memory is bounded whatever the bytes claim; no pickle is run; nothing is read that
`.metadata` does not name. Our own checkpoints have better: see ckptd/verify.py.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ckptd import container, contents, zstream
from ckptd.blockcheck import Check, Found, Tell
from ckptd.blocks import REQUEST_NBYTES
from ckptd.errors import Corrupt
from ckptd.items import Window
from ckptd.metadata import Contents
from ckptd.model import CheckpointId, data_key, metadata_key
from ckptd.store import Store

#: The end of an item's content that is kept while it is decoded: where the directory is, and of most items all.
_KEPT_NBYTES: Final = 32 * 1024 * 1024
_ZSTD: Final = ("stream.zstd/1",)
#: How torch.save began before torch 1.6, and still does if it is asked to.
_LEGACY: Final = b"\x80\x02\x8a\x0a"

NO_ITEM: Final = "bytes that belong to no item: {}"
NO_CRC: Final = "records without a CRC-32, whose bytes could not be checked: {}"
NO_CONTAINER: Final = "items that are not what torch.save writes today, whose bytes could not be checked: {}"
NO_CODEC: Final = "items stored in a way that is not known here, whose bytes could not be checked: {}"


@dataclass(frozen=True, slots=True)
class _Item:
    """One item, at bytes [start, end) of its file."""

    name: str
    start: int
    end: int
    descriptors: tuple[str, ...]
    is_object: bool
    expected_nbytes: int
    """Bytes of the tensor, as far as its dtype says how many; else 0."""

    def __str__(self) -> str:
        return f"{self.name} (bytes {self.start} to {self.end})"


def checks(store: Store, id: CheckpointId, metadata: Contents, sizes: Mapping[str, int]) -> tuple[Found, list[Check]]:
    """What the places of the items say, and what is left to be read.

    `sizes`: bytes of the files that are in the store, by their names beside `.metadata`.
    """
    by_file: dict[str, list[_Item]] = {}
    for file, item in _items(metadata):
        by_file.setdefault(file, []).append(item)
    found = Found(_gaps(id, metadata))
    to_read: list[Check] = []
    for file, items in sorted(by_file.items()):
        key = data_key(id, file)
        if file not in sizes:
            found.damage.append(f"{key} is missing from the store, although .metadata names it")
            continue
        items.sort(key=lambda item: (item.start, item.end))
        found.damage += [f"{key}: {item} is cut off: the file has {sizes[file]} bytes" for item in items if item.end > sizes[file]]
        found.notes[NO_ITEM] += max(0, sizes[file] - _covered(items))
        inside = [item for item in items if item.end <= sizes[file]]
        to_read += [functools.partial(_check_group, store, key, group) for group in _groups(inside)]
    return found, to_read


def _items(metadata: Contents) -> Iterator[tuple[str, _Item]]:
    """Each item and the file it is in."""
    tensors = {tensor.fqn: tensor for tensor in metadata.tensors}
    for (fqn, offset), place in metadata.storage.items():
        tensor = tensors.get(fqn)
        expected = 0
        if tensor is not None and not tensor.dtype.startswith("q"):  # quantised ones may pack several elements into a byte
            sizes = [chunk for at, chunk in tensor.chunks if at == offset or (offset is None and len(tensor.chunks) == 1)]
            expected = contents.expected_nbytes(tensor.dtype, sizes[:1])
        shown = repr(fqn.decode(errors="backslashreplace")[:200])
        name = shown if offset is None else f"{shown} at {offset}"
        yield place.file, _Item(name, place.offset, place.offset + place.length, place.descriptors, tensor is None, expected)


def _gaps(id: CheckpointId, metadata: Contents) -> list[str]:
    """Where `.metadata` contradicts itself: chunks that make no tensor, and what is stored nowhere or where another item is."""
    key, wrong = metadata_key(id), []
    for tensor in metadata.tensors:
        shown = repr(tensor.fqn.decode(errors="backslashreplace")[:200])
        if not contents.is_covered(tensor):
            wrong.append(f"{key} is damaged: the chunks of {shown} do not make a tensor of shape {tuple(tensor.shape)}")
        alone = len(tensor.chunks) == 1
        if any(
            (tensor.fqn, at) not in metadata.storage and not (alone and (tensor.fqn, None) in metadata.storage) for at, _ in tensor.chunks
        ):
            wrong.append(f"{key} is damaged: it does not say where all of {shown} is stored")
    lost = [fqn.decode(errors="backslashreplace")[:200] for fqn in metadata.objects if (fqn, None) not in metadata.storage]
    wrong += [f"{key} is damaged: it does not say where {shown!r} is stored" for shown in lost]
    places = Counter((place.file, place.offset) for place in metadata.storage.values() if place.length)
    wrong += [f"{key} is damaged: two items are stored at byte {at} of {file}" for (file, at), items in places.items() if items > 1]
    return wrong


def _covered(items: list[_Item]) -> int:
    """Bytes that belong to some item."""
    covered, counted_to = 0, 0
    for item in items:
        covered += max(0, item.end - max(item.start, counted_to))
        counted_to = max(counted_to, item.end)
    return covered


def _groups(items: list[_Item]) -> Iterator[list[_Item]]:
    """Items that lie together, as many as one request can read; a larger one alone."""
    group: list[_Item] = []
    for item in items:
        if group and item.end - group[0].start > REQUEST_NBYTES:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _check_group(store: Store, key: str, group: list[_Item], tell: Tell) -> Found:
    window = Window(store, key, max(item.end for item in group))
    found = Found()
    for item in group:
        mark = _Mark(tell)
        for last_try in (False, True):  # what a bad connection garbled reads well the second time
            try:
                found.notes += _check(window, item, mark)
                break
            except Corrupt as exc:
                window.forget()
                if last_try:
                    found.damage.append(f"{key}: {item} is damaged: {exc}")
        mark.reach(item.end - item.start)
    return found


def _check(window: Window, item: _Item, mark: _Mark) -> Counter[str]:
    """Reads one item, all of it; returns notes. Raises Corrupt."""
    if item.descriptors not in ((), _ZSTD):
        return Counter({NO_CODEC: 1})
    content = _Decoded(window, item, mark) if item.descriptors else _Stored(window, item, mark)
    if not container.is_container(content.read, content.nbytes):
        if not item.is_object and content.read(0, min(len(_LEGACY), content.nbytes)) != _LEGACY:
            raise Corrupt("it is not what torch.save writes")
        return Counter({NO_CONTAINER: 1})
    unchecked = container.check(content.read, content.nbytes)
    storages = [nbytes for name, nbytes in container.sizes(content.read, content.nbytes) if name.split(b"/")[-2:-1] == [b"data"]]
    if len(storages) == 1 and storages[0] < item.expected_nbytes:
        raise Corrupt(f"it holds {storages[0]} bytes of a tensor of {item.expected_nbytes}")
    return Counter({NO_CRC: unchecked} if unchecked else {})


class _Mark:
    """How far an item has been looked at; what is read twice counts once."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._reached = 0

    def reach(self, nbytes: int) -> None:
        if nbytes > self._reached:
            self._tell(nbytes - self._reached)
            self._reached = nbytes


class _Stored:
    """The content of an item that is stored as it is."""

    def __init__(self, window: Window, item: _Item, mark: _Mark) -> None:
        self._window = window
        self._start = item.start
        self._mark = mark
        self.nbytes = item.end - item.start

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end), few enough to be held."""
        if end - start == container.PIECE_NBYTES:  # of the directory and the headers, which are read first, nothing is counted
            self._mark.reach(end)
        return self._window.read(self._start + start, self._start + end)


class _Decoded:
    """The content of an item behind zstd: decoded once to learn how long it is, and again for what was not kept of it."""

    def __init__(self, window: Window, item: _Item, mark: _Mark) -> None:
        self._window = window
        self._item = item
        self._mark = mark
        kept: deque[bytes] = deque()
        self.nbytes = self._kept_at = 0
        for piece in self._pieces():
            kept.append(piece)
            self.nbytes += len(piece)
            while self.nbytes - self._kept_at - len(kept[0]) >= _KEPT_NBYTES:
                self._kept_at += len(kept.popleft())
        self._kept = b"".join(kept)
        self._again = self._pieces()
        self._piece = b""
        self._piece_at = 0

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end), few enough to be held; cheap only if `start` does not go back before what is kept."""
        parts = []
        while start < min(end, self._kept_at):
            self._go_to(start)
            part = self._piece[start - self._piece_at : min(end, self._kept_at) - self._piece_at]
            parts.append(part)
            start += len(part)
        if start < end:
            parts.append(self._kept[start - self._kept_at : end - self._kept_at])
        return b"".join(parts)

    def _go_to(self, start: int) -> None:
        if start < self._piece_at:
            self._again, self._piece, self._piece_at = self._pieces(), b"", 0
        while start >= self._piece_at + len(self._piece):
            self._piece_at += len(self._piece)
            found = next(self._again, None)
            if found is None:
                raise Corrupt("it has become shorter while it was read")
            self._piece = found

    def _pieces(self) -> Iterator[bytes]:
        return zstream.plain(self._read, self._item.start, self._item.end)

    def _read(self, start: int, end: int) -> bytes:
        self._mark.reach(start - self._item.start)
        return self._window.read(start, end)
