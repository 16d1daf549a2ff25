"""Which directories of a store are checkpoints, told by their marks alone.

All that marks a checkpoint begins with a dot: `.metadata`, and what is ours below `.ckptd/`.
One listing of those per checkpoint is enough, however many data files lie beside them, and one
shallow listing per directory above finds the directories.

Promises: what has a `.metadata` is a checkpoint, whoever wrote it; a store that cannot be read
raises; a `.metadata` that is replaced meanwhile is looked at again. Reads the tail of each
`.metadata` and nothing else; runs no pickle, writes nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptd import metadata
from ckptd.errors import Corrupt, InvalidRequest, NotFound, Unavailable
from ckptd.model import METADATA_NAME, OWN_DIRECTORY, CheckpointId, is_attempt, manifest_key, metadata_key, pin_key
from ckptd.store import Object, Store
from ckptd.tombstone import is_tombstone, refused

#: `save_id` of a checkpoint is the name of its manifest: `<attempt>-<token>.manifest`.
_SAVE_ID: Final = re.compile(r"([0-9a-f]{24})-[0-9a-f]{16}\.manifest")
_DATA_FILE: Final = re.compile(r"__\d+_[0-9a-f]{16}\.distcp")
#: The opcodes that `metadata.splice` ends with.
_OUR_END: Final = b"ubsb."
_THREADS: Final = 16
#: How often a `.metadata` that is replaced while it is read is looked at again.
_LOOKS: Final = 5

A = TypeVar("A")
B = TypeVar("B")
#: What marks a checkpoint, by key.
Marks = dict[str, Object]


@dataclass(frozen=True, slots=True)
class Entry:
    """One durable checkpoint, as its marks and the tail of its `.metadata` tell it."""

    id: CheckpointId
    attempt: str | None
    """None: written by stock DCP."""
    save_id: str | None
    """File name of the manifest; None: written by stock DCP."""
    metadata: Object
    modified: float
    """When `.metadata` was written, in seconds since the epoch; 0.0 if the store does not say."""
    manifest_nbytes: int | None = None
    """None: the manifest is not there, or written by stock DCP."""
    pinned: bool = False
    damaged: bool = False
    """`.metadata` is ours and cannot be read: `attempt` and `save_id` are those of the newest manifest beside it."""

    @property
    def accepted_us(self) -> int:
        """When it was accepted, in microseconds since the epoch; for stock ones, when it was written."""
        return int(self.modified * 1e6) if self.attempt is None else int(self.attempt[:16], 16)

    @property
    def order(self) -> str:
        """Where it stands in time, as text that sorts with attempt tokens; at the beginning if no clock tells such a time."""
        if self.attempt is None:
            return f"{self.accepted_us:016x}"
        return self.attempt if is_attempt(self.attempt) else ""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a store, or one run in it, consists of."""

    entries: list[Entry]
    """In ascending order of run, step (those without first), name."""
    incomplete: list[tuple[CheckpointId, str]]
    """Ids for which there are files of ours but no `.metadata`, and how far they got; not those that were deleted."""


def scan(store: Store, run: str | None) -> Scan:
    """Looks at all checkpoints (of one run). Raises StoreError, Unavailable."""
    ids = _ids(store, run)
    looked = parallel(lambda id: _looked(store, id), ids)
    entries = sorted((found for found in looked if isinstance(found, Entry)), key=_order)
    told = [(id, found) for id, found in zip(ids, looked, strict=True) if isinstance(found, str)]
    return Scan(entries, sorted(told))


def marks_of(store: Store, id: CheckpointId) -> Marks:
    """What marks the checkpoint now; no data file is among them."""
    return {found.key: found for found in store.list(f"{id}/.")}


def entry_of(store: Store, id: CheckpointId, marks: Marks) -> Entry | None:
    """The checkpoint that these marks lead to; None if it is not there (any more)."""
    looked_again = False
    for _ in range(_LOOKS):
        if (found := marks.get(metadata_key(id))) is None:
            return None
        start = max(0, found.nbytes - metadata.TAIL_NBYTES)
        newest = max(manifests(id, marks), default=None)
        try:
            # To the end, wherever that is by now: a tail that ends too early would make ours a stock one.
            tail = store.get(found.key, start)
            if newest is not None and save_id(tail) is None:  # written over by stock, which is fine, or damaged
                start, tail = 0, store.get(found.key)
        except NotFound:
            return None
        if len(tail) == found.nbytes - start:
            named = save_id(tail)
            there = marks.get(manifest_key(id, named)) if named else None
            if named and there is None and not looked_again:  # it was replaced since its marks were listed, or is damaged
                looked_again, marks = True, marks_of(store, id)
                continue
            # A name that leads nowhere is not believed if it makes the checkpoint look older than it is, or of a time that no clock tells.
            wrong = named is not None and there is None and newest is not None and (named < newest or not is_attempt(named[:24]))
            damaged = wrong or (newest is not None and named is None and not _is_stock(tail))
            if damaged and newest is not None:
                named, there = newest, marks[manifest_key(id, newest)]
            return Entry(
                id=id,
                attempt=named[:24] if named else None,
                save_id=named,
                metadata=found,
                modified=found.modified,
                manifest_nbytes=there.nbytes if there else None,
                pinned=pin_key(id) in marks,
                damaged=damaged,
            )
        marks = marks_of(store, id)
    raise Unavailable(f"{id} is being replaced all the time: try again")


def manifests(id: CheckpointId, marks: Marks) -> list[str]:
    """File names of the manifests among the marks."""
    return [name for name in _own(id, marks) if _SAVE_ID.fullmatch(name)]


def tombstones(id: CheckpointId, marks: Marks) -> list[Object]:
    """The tombstones among the marks."""
    return [marks[f"{id}/{OWN_DIRECTORY}/{name}"] for name in _own(id, marks) if is_tombstone(name)]


def refusals(id: CheckpointId, marks: Marks) -> set[str]:
    """The attempts that are refused, among the marks."""
    return {attempt for name in _own(id, marks) if (attempt := refused(name))}


def save_id(tail: bytes) -> str | None:
    """The name of our manifest at the end of a `.metadata`; None if another wrote it."""
    found = metadata.save_id(tail[-metadata.TAIL_NBYTES :])
    return found if found is not None and _SAVE_ID.fullmatch(found) else None


def parallel(call: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """`call` of each, a few at a time, results in order. The first error is raised."""
    if len(arguments) <= 1:
        return [call(argument) for argument in arguments]
    with ThreadPoolExecutor(min(_THREADS, len(arguments)), "scan") as threads:
        return list(threads.map(call, arguments))


def _looked(store: Store, id: CheckpointId) -> Entry | str | None:
    """The checkpoint; or how far it got, in words; or None if there is nothing of ours."""
    marks = marks_of(store, id)
    entry = entry_of(store, id, marks)
    if entry is not None or tombstones(id, marks) or refusals(id, marks):
        return entry
    if manifests(id, marks):
        return "the files are there, .metadata is not: the commit did not finish"
    data = sum(1 for found in store.list(f"{id}/__") if _DATA_FILE.fullmatch(found.key.rpartition("/")[2]))
    return f"{data} data file{'s' if data > 1 else ''} and no manifest: the upload did not finish" if data else None


def _ids(store: Store, run: str | None) -> list[CheckpointId]:
    """Directories that may be checkpoints."""
    if run:
        return ids_of(f"{run}/{name}" for name in store.children(run)[1])
    names = [str(id) for id in ids_of(store.children("")[1])]
    if run == "":
        return ids_of(names)
    found = []
    for name, (objects, directories) in zip(names, parallel(store.children, names), strict=True):
        if OWN_DIRECTORY in directories or any(_is_mark(there.key.rpartition("/")[2]) for there in objects):
            found.append(name)
        found += [f"{name}/{below}" for below in directories]
    return ids_of(found)


def _is_mark(name: str) -> bool:
    return name == METADATA_NAME or _DATA_FILE.fullmatch(name) is not None


def ids_of(names: Iterable[str]) -> list[CheckpointId]:
    """Those of the names that are ids: a checkpoint cannot have any other."""
    ids = []
    for name in names:
        with contextlib.suppress(InvalidRequest):
            ids.append(CheckpointId.parse(name))
    return ids


def _own(id: CheckpointId, marks: Marks) -> list[str]:
    """Names in the checkpoint's own directory."""
    lead = f"{id}/{OWN_DIRECTORY}/"
    return [key.removeprefix(lead) for key in marks if key.startswith(lead)]


def _is_stock(data: bytes) -> bool:
    """Whether a whole `.metadata` that names no manifest of ours can be read, and does not end as ours do."""
    with contextlib.suppress(Corrupt):
        metadata.read(data)
        # A flipped bit can make ours name no manifest and be read all the same; but stock's pickler never ends so.
        return metadata.save_id(data) is None and not data.endswith(_OUR_END)
    return False


def step_of(id: CheckpointId) -> int:
    """The step as a number that sorts: those without one come first."""
    return -1 if id.step is None else id.step


def _order(entry: Entry) -> tuple[str, int, str]:
    return (entry.id.run, step_of(entry.id), entry.id.name)
