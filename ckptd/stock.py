"""Checkpoints that stock DCP wrote: what they consist of, and which state of their directory it is.

Their ``.metadata`` says where each item lies; nothing says which save it belongs to, because DCP
saves over the files that are there, one after another. So a reader is told the state of the
directory: a hash over ``.metadata`` and over size and time of each file that it names. Whoever
finds another one later reads another checkpoint.

Promises: no pickle is run; nothing of a data file is believed before it is looked at; what
``.metadata`` claims costs no more memory than its own length allows. An item that cannot be
read spoils no other one: it is refused, with the reason, when it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ckptd.codec import block_hash
from ckptd.contents import expected_nbytes, is_covered
from ckptd.errors import CkptdError, Corrupt, InvalidRequest
from ckptd.items import ItemShard, damaged, measure, named
from ckptd.metadata import Contents, StoredAt, read
from ckptd.model import METADATA_NAME, CheckpointId, data_key, metadata_key
from ckptd.store import Object, Store
from ckptd.v1.manifest_pb2 import Form, Item, Table

#: What names a state of a stock checkpoint where an attempt's token stands otherwise.
PREFIX: Final = "stock-"
#: Parsed ``.metadata`` that are remembered, by their hash.
_REMEMBERED: Final = 4
#: The one transform that can be undone here, whatever its minor version is: so stock itself has it.
_ZSTD: Final = re.compile(r"stream\.zstd/1(\..*)?", re.DOTALL)
#: From this number on, directories are not listed one by one.
_DIRECTORIES: Final = 16
#: A container's own bytes around a tensor's: data.pkl, directory and paddings take some 2 KiB; a subclass keeps more.
_SLACK_NBYTES: Final = 64 * 1024
#: zstd makes at most this of a byte: a block of 128 KiB takes 4 bytes or more.
_MOST_PER_BYTE: Final = 32 * 1024
#: A segment is no larger than this, however much of it stays a hole: its readers map it whole.
_SEGMENT_NBYTES: Final = 1 << 40


@dataclass(slots=True)
class Part:
    """All items of one data file that are stored in the same way, in file order."""

    file: str
    descriptors: tuple[str, ...]
    forms: list[Form] = field(default_factory=list)
    #: Not placed yet. `nbytes`: of tensors what their shape and dtype take.
    items: list[Item] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def compressed(self) -> bool:
        """Whether something has to be undone."""
        return self.descriptors != ()

    @property
    def known(self) -> bool:
        """Whether it can be undone."""
        return not self.descriptors or (len(self.descriptors) == 1 and _ZSTD.fullmatch(self.descriptors[0]) is not None)


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a stock checkpoint's directory."""

    identity: str
    pickle: bytes
    parts: list[Part]
    #: Bytes of the files that are there, by name beside ``.metadata``.
    files: dict[str, int]
    #: Files that are newer than ``.metadata``, which DCP writes last: copied so, or of a save over this one that has not ended.
    newer: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stock:
    """One state of a stock checkpoint: what a manifest is for ours."""

    identity: str
    shards: list[ItemShard]
    files: list[str]


class Looks:
    """Looks at directories of one store. Blocking, thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parsed: dict[bytes, list[Part]] = {}

    def look(self, id: CheckpointId) -> Seen:
        """The directory as it is now. Raises NotFound, Corrupt."""
        pickle = self._store.get(metadata_key(id))
        parts = self._parts(id, pickle)
        files = {part.file for part in parts}
        listed = self._listed(id, files)
        there = {name: found for name, found in listed.items() if name in files}
        # With the id: a copy of the directory is another one, which may be read beside this one.
        state = repr(str(id)) + repr([(name, found.nbytes, found.modified) for name, found in sorted(there.items())])
        identity = PREFIX + block_hash(block_hash(pickle) + state.encode(errors="surrogatepass")).hex()
        newer = [name for name, found in there.items() if _is_newer(found, listed.get(METADATA_NAME))]
        return Seen(identity, pickle, parts, {name: found.nbytes for name, found in there.items()}, newer)

    def _parts(self, id: CheckpointId, pickle: bytes) -> list[Part]:
        digest = block_hash(pickle)
        parts = self._parsed.get(digest)
        if parts is None:
            try:
                parts = parse(read(pickle))
            except Corrupt as exc:
                raise Corrupt(f"{metadata_key(id)} cannot be read: {exc}; load another checkpoint, as fallback=True does") from exc
            for old in list(self._parsed)[: 1 - _REMEMBERED]:
                self._parsed.pop(old, None)
            self._parsed[digest] = parts
        return parts

    def _listed(self, id: CheckpointId, files: set[str]) -> dict[str, Object]:
        """What is in the directories of these files, by name beside ``.metadata``."""
        directories = sorted({file.rpartition("/")[0] for file in files})
        found: list[Object] = []
        if len(directories) < _DIRECTORIES:
            for directory in directories:
                found += self._store.children(data_key(id, directory) if directory else str(id))[0]
        else:
            found += self._store.list(f"{id}/")
        return {there.key.removeprefix(f"{id}/"): there for there in found}


def _is_newer(file: Object, metadata: Object | None) -> bool:
    """Whether it was written after ``.metadata``, by clocks of whole seconds; not if that is not known."""
    return metadata is not None and metadata.modified > 0.0 and file.modified > metadata.modified + 1.0


def parse(contents: Contents) -> list[Part]:
    """What a ``.metadata`` says about its data files, by file and by how items are stored in it.

    What is stored and no part of the state, or the other way round, is left out.
    """
    for tensor in contents.tensors:
        if not is_covered(tensor):
            raise Corrupt(f"the chunks of {tensor.fqn[:200]!r} do not make a tensor of shape {tuple(tensor.shape)}")
    chunks = {tensor.fqn: dict(tensor.chunks) for tensor in contents.tensors}
    dtypes = {tensor.fqn: tensor.dtype for tensor in contents.tensors}
    objects = set(contents.objects)
    parts: dict[tuple[str, tuple[str, ...]], Part] = {}
    forms: dict[tuple[str, tuple[str, ...], str, tuple[int, ...]], int] = {}
    ordered = sorted(contents.storage.items(), key=lambda stored: (stored[1].file, stored[1].offset))
    for (fqn, offset), place in ordered:
        shape = None if offset is None else chunks.get(fqn, {}).get(offset)
        if shape is None and (offset is not None or fqn not in objects):
            continue
        part = parts.setdefault((place.file, place.descriptors), Part(place.file, place.descriptors))
        item = Item(fqn=fqn, kind=Item.OPAQUE_OBJECT)
        if shape is not None and offset is not None:
            form = (place.file, place.descriptors, dtypes[fqn], shape)
            if form not in forms:
                forms[form] = len(part.forms)
                part.forms.append(Form(dtype=dtypes[fqn], shape=shape))
            plain = min(expected_nbytes(dtypes[fqn], [shape]), _SEGMENT_NBYTES)
            item = Item(fqn=fqn, kind=Item.OPAQUE_TENSOR, offset=offset, has_offset=True, form=forms[form], nbytes=plain)
        part.items.append(item)
        _place(part, place)
    return [parts[key] for key in sorted(parts)]


def _place(part: Part, place: StoredAt) -> None:
    part.offsets.append(place.offset)
    part.lengths.append(place.length)


def describe(store: Store, id: CheckpointId, seen: Seen, most_nbytes: int) -> tuple[Stock, int]:
    """What was seen, ready to be read; and how many stored bytes it took to learn how long compressed objects are.

    `most_nbytes`: an object that is longer is refused.
    """
    shards: list[ItemShard] = []
    read_nbytes = 0
    for part in seen.parts:
        key = data_key(id, part.file)
        refused = _refused(part, key, seen.files.get(part.file))
        hidden = part.items if part.compressed else ()
        objects = [number for number, item in enumerate(hidden) if item.kind == Item.OPAQUE_OBJECT and number not in refused]
        sizes, nbytes = measure(store, key, [(part.offsets[number], part.lengths[number]) for number in objects], most_nbytes)
        read_nbytes += nbytes
        measured: dict[int, int] = {}
        for number, size in zip(objects, sizes, strict=True):
            if isinstance(size, int):
                measured[number] = size
            else:
                refused[number] = damaged(named(key, part.items[number], part.offsets[number], part.lengths[number]), size)
        shards += _laid_out(part, key, refused, measured)
    return Stock(seen.identity, shards, sorted({part.file for part in seen.parts})), read_nbytes


def _refused(part: Part, key: str, nbytes: int | None) -> dict[int, CkptdError]:
    """The items of a part that cannot be read, and why. `nbytes`: of the file; None if it is not there."""
    found: dict[int, CkptdError] = {}
    for number, (item, offset, length) in enumerate(zip(part.items, part.offsets, part.lengths, strict=True)):
        name = named(key, item, offset, length)
        if nbytes is None:
            found[number] = Corrupt(
                f"{name}: the file is missing from the store, although .metadata names it; load another checkpoint, as fallback=True does"
            )
        elif offset + length > nbytes:
            found[number] = Corrupt(
                f"{name} is cut off: the file has {nbytes} bytes in the store; load another checkpoint, as fallback=True does"
            )
        elif not part.known:
            given = ", ".join(repr(one[:80]) for one in part.descriptors[:4])
            found[number] = InvalidRequest(
                f"{name} was written through the stream transform {given}, which ckptd cannot undo: "
                "load it with torch.distributed.checkpoint.FileSystemReader and its _extension_registry"
            )
        elif not length and item.kind == Item.OPAQUE_TENSOR:
            found[number] = damaged(name, Corrupt("a tensor takes more than no bytes"))
    return found


def _laid_out(part: Part, key: str, refused: Mapping[int, CkptdError], measured: Mapping[int, int]) -> list[ItemShard]:
    """Gives every item a place in a segment; all of them in one, unless that would be too large to be mapped."""
    shards: list[ItemShard] = []
    first, at = 0, 0
    items: list[Item] = []
    for number, item in enumerate(part.items):
        nbytes = 1 if number in refused else _reserved(part, number, measured)
        if items and at + nbytes > _SEGMENT_NBYTES:
            shards.append(_shard(part, key, refused, items, first, at))
            items, first, at = [], number, 0
        placed = Item()
        placed.CopyFrom(item)
        placed.at = placed.raw_at = at
        placed.nbytes = nbytes
        items.append(placed)
        at += nbytes
    return [*shards, _shard(part, key, refused, items, first, at)] if items else shards


def _reserved(part: Part, number: int, measured: Mapping[int, int]) -> int:
    """Bytes that an item takes in a segment, at most."""
    length = part.lengths[number]
    if not part.compressed:
        return length
    if number in measured:
        return measured[number]
    plain = part.items[number].nbytes
    return min(plain + plain // 4 + _SLACK_NBYTES, length * _MOST_PER_BYTE)


def _shard(part: Part, key: str, refused: Mapping[int, CkptdError], items: Sequence[Item], first: int, end: int) -> ItemShard:
    last = first + len(items)
    own = {number - first: why for number, why in refused.items() if first <= number < last}
    table = Table(forms=part.forms, items=items, end=end)
    return ItemShard(key, part.compressed, table, part.offsets[first:last], part.lengths[first:last], own)
