"""Reads a checkpoint's directory as a sweep has to see it: what is there, what refers to it, what is listed to go.

Promises: the listing comes before what is read because of it; what cannot be read is reported as such and logged, never
guessed; what lies behind a symbolic link, and a directory in which nothing can be debris, is None. Costs two listings
and two short reads for a checkpoint without debris. Writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from ckptd import debris, manifest, metadata, tombstone
from ckptd.debris import Directory, Live
from ckptd.errors import Corrupt, NotFound, Unavailable
from ckptd.ledger import Ledger
from ckptd.model import METADATA_NAME, OWN_DIRECTORY, CheckpointId, metadata_key
from ckptd.scan import Entry, entry_of
from ckptd.store import Object, Store, is_temporary
from ckptd.v1.manifest_pb2 import Tombstone

log = logging.getLogger(__name__)

#: How often a `.metadata` that is deleted while it is read is looked at again.
_LOOKS: Final = 5
#: All data files begin with it, ours and stock's.
_DATA_PREFIX: Final = "__"


def look(store: Store, ledger: Ledger, id: CheckpointId) -> Directory | None:
    """The directory, or None if nothing in it can be debris. Raises StoreError, Unavailable."""
    for _ in range(_LOOKS):
        there = listing(store, id)
        if any(found.linked for found in there.values()):
            log.debug("%s lies behind a symbolic link: it is swept under its other name", id)
            return None
        if not any(debris.is_own(name) or is_temporary(name) or _is_note(name) for name in there):
            return None
        entry = entry_of(store, id, {found.key: found for found in there.values()})
        try:
            if entry is not None and _is_clean(ledger, entry, there):
                return None
            return _read(store, id, entry, there, ledger.ended_deletions)
        except NotFound:
            continue
    raise Unavailable(f"{id} is being replaced all the time: try again")


def listing(store: Store, id: CheckpointId) -> dict[str, Object]:
    """What belongs to the checkpoint or may have: by name relative to its directory, temporary files included."""
    lead = f"{id}/"
    there = {found.key.removeprefix(lead): found for found in store.list(f"{lead}.", temporary=True)}
    there = {name: found for name, found in there.items() if name == METADATA_NAME or _is_ours(name)}
    for found in store.list(f"{lead}{_DATA_PREFIX}"):
        name = found.key.removeprefix(lead)
        if "/" not in name:
            there[name] = found
    return there


def elsewhere(store: Store, id: CheckpointId, names: Iterable[str]) -> dict[str, Object]:
    """Of files that a stock `.metadata` or a tombstone names, those that `listing` would not show.

    Leaves out what lies in a directory that is a checkpoint itself, or behind a symbolic link.
    """
    found: dict[str, Object] = {}
    checkpoints: dict[str, bool] = {}
    for name in names:
        parts = name.split("/")
        if parts[0] == OWN_DIRECTORY or (len(parts) == 1 and name.startswith(_DATA_PREFIX)):
            continue
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        for directory in above:
            if directory not in checkpoints:
                checkpoints[directory] = _exact(store, f"{id}/{directory}/{METADATA_NAME}") is not None
        there = None if any(checkpoints[directory] for directory in above) else _exact(store, f"{id}/{name}")
        if there is not None and not there.linked:
            found[name] = there
    return found


def manifest_files(store: Store, id: CheckpointId, name: str) -> frozenset[str] | None:
    """The data files that a manifest lists; None if it is damaged. Raises NotFound."""
    try:
        found = manifest.decode(store.get(f"{id}/{name}"))
    except Corrupt as exc:
        damage = str(exc)
    else:
        if found.summary.attempt == debris.attempt_of(name):
            return frozenset(shard.file for shard in found.shards if shard.file)
        damage = f"it tells of the attempt {found.summary.attempt!r}"
    log.warning("%s/%s is damaged: %s; files beside it are not swept, `ckptd verify %s` tells more", id, name, damage, id)
    return None


def stock_files(content: bytes) -> frozenset[str]:
    """The files that a whole `.metadata` leads to. Raises Corrupt."""
    return frozenset(place.file for place in metadata.read(content).storage.values())


def _read(store: Store, id: CheckpointId, entry: Entry | None, there: dict[str, Object], ended: Collection[str]) -> Directory:
    """Raises NotFound if `.metadata` has gone."""
    manifests = {}
    lists: dict[str, Tombstone] = {}
    strange = set()
    for name in sorted(there):
        try:
            if debris.is_manifest(name):
                manifests[name] = manifest_files(store, id, name)
            elif _is_list(name):
                found = tombstone.decode(store.get(f"{id}/{name}"))
                if found.id == str(id):
                    lists[name] = found
                else:
                    strange.add(name)
        except NotFound:  # another sweep was faster
            continue
        except Corrupt as exc:
            log.warning("%s/%s is left alone: %s; what it listed is found again once it is old, you may delete it", id, name, exc)
    listed = {file for found in lists.values() for file in found.files}
    there |= elsewhere(store, id, sorted(listed - there.keys()))
    return Directory(
        id=id,
        objects={name: found for name, found in there.items() if name != METADATA_NAME},
        live=None if entry is None else _live(store, entry, manifests),
        metadata=None if entry is None else entry.metadata,
        manifests=manifests,
        lists=lists,
        strange=frozenset(strange),
        settled=frozenset(name for name in lists if f"{id}/{name}" in ended),
    )


def _live(store: Store, entry: Entry, manifests: Mapping[str, frozenset[str] | None]) -> Live:
    """Raises NotFound if `.metadata` has gone."""
    files: frozenset[str] | None = None
    if entry.damaged:
        log.warning("%s/%s is damaged: nothing beside it is swept; look at it, then `ckptd delete %s`", entry.id, METADATA_NAME, entry.id)
    elif entry.save_id is not None:
        name = f"{OWN_DIRECTORY}/{entry.save_id}"
        own = manifests.get(name)
        files = None if own is None else own | {name}
    else:
        try:
            files = stock_files(store.get(metadata_key(entry.id)))
        except Corrupt as exc:
            log.warning("%s/%s cannot be read (%s): nothing beside it is swept", entry.id, METADATA_NAME, exc)
    return Live(entry.attempt, entry.save_id, entry.modified, files)


def _is_clean(ledger: Ledger, entry: Entry, there: Mapping[str, Object]) -> bool:
    """Whether there is nothing but the checkpoint: so many bytes as its manifest's head says, and no second manifest."""
    if entry.save_id is None or entry.damaged or any(is_temporary(name) or _is_note(name) for name in there):
        return False
    data = [name for name in there if debris.is_data(name)]
    if [name for name in there if debris.is_own(name) and name not in data] != [f"{OWN_DIRECTORY}/{entry.save_id}"]:
        return False
    try:
        nbytes = ledger.summary(entry).stored_bytes
    except Corrupt:
        return False
    return nbytes == sum(there[name].nbytes for name in data)


def _is_ours(name: str) -> bool:
    """Whether it is directly in our own directory, or a temporary file beside or in it, or in a temporary directory."""
    parts = name.split("/")
    return (parts[0] == OWN_DIRECTORY and len(parts) == 2) or all(is_temporary(part) for part in parts)


def _is_list(name: str) -> bool:
    directory, _, file = name.partition("/")
    return directory == OWN_DIRECTORY and tombstone.is_list(file)


def _is_note(name: str) -> bool:
    """Whether it is a list or a refusal: it goes some time, whatever is beside it."""
    return _is_list(name) or tombstone.refused(name.removeprefix(f"{OWN_DIRECTORY}/")) != ""


def _exact(store: Store, key: str) -> Object | None:
    return next((found for found in store.list(key) if found.key == key), None)
