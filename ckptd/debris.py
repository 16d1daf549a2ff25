"""What in a checkpoint's directory is debris, and whose time has come: pure, decides on what others have read.

A file goes in two steps. It is *condemned*: a list names it (a tombstone, when its checkpoint is deleted; else a list of
debris). Once the list is old enough it is *deleted*, if nothing refers to it by then. Between the two, a commit that still
wants it sees the list, and a sweep sees the manifest of such a commit; so one of them always gives way.

Promises: what a `.metadata` refers to is neither condemned nor deleted, nor is anything of a directory in which
something cannot be read; condemned by guess are only names that nobody else has. A file that was written after its list stays,
and so does one of a name that is used again where nobody knows when it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ckptd.model import OWN_DIRECTORY, CheckpointId
from ckptd.store import Object, is_temporary
from ckptd.tombstone import COMMIT_SECONDS, DELETION_SECONDS, REFUSAL_SECONDS, is_tombstone, refused
from ckptd.v1.manifest_pb2 import Tombstone

#: A deletion that has not taken its `.metadata` away by then never will: its tombstone means nothing.
VOID_SECONDS: Final = 60.0

_DATA_FILE: Final = re.compile(r"__\d+_[0-9a-f]{16}\.distcp")
_PART: Final = re.compile(rf"{re.escape(OWN_DIRECTORY)}/([0-9a-f]{{24}})-\d+-[0-9a-f]{{16}}\.part")
_MANIFEST: Final = re.compile(rf"{re.escape(OWN_DIRECTORY)}/([0-9a-f]{{24}})-[0-9a-f]{{16}}\.manifest")
#: Name of what keeps a checkpoint from every policy.
PIN: Final = f"{OWN_DIRECTORY}/pin"


@dataclass(frozen=True, slots=True)
class Live:
    """The checkpoint that is there."""

    attempt: str | None
    """None: written by stock DCP."""
    save_id: str | None
    """File name of its manifest; None: written by stock DCP."""
    modified: float
    """When its `.metadata` was written, by the store's clock; 0.0 if the store does not say."""
    files: frozenset[str] | None
    """What it refers to, its manifest included; None: that cannot be told."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A checkpoint's directory as it was found. All names are relative to it."""

    id: CheckpointId
    objects: Mapping[str, Object]
    """Whatever may be debris; `.metadata` is not."""
    live: Live | None
    metadata: Object | None = None
    """Its `.metadata`."""
    manifests: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """By name: the data files of all manifests; None: damaged."""
    lists: Mapping[str, Tombstone] = field(default_factory=dict)
    """By name: tombstones and lists of debris of this id. Damaged ones are not among them."""
    strange: frozenset[str] = frozenset()
    """Names of lists that came here with a copy of another id: they mean nothing here."""
    settled: frozenset[str] = frozenset()
    """Names of tombstones whose deletion is known to have ended."""

    def dated(self, name: str, now: float) -> Directory:
        """The same, with a list that was put not before `now`."""
        if name not in self.lists:
            return self
        found = self.objects[name]
        return replace(self, objects={**self.objects, name: replace(found, modified=max(found.modified, now))})


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep does in one directory."""

    condemn: list[str]
    """Files for a new list of debris."""
    go: list[str]
    """Files to delete now."""
    ended: list[str]
    """Lists to delete after them."""
    later: list[str]
    """Files that lists name and whose grace is not over. What is too young to be listed may be an upload that is under way."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do now."""
        return not (self.condemn or self.go or self.ended)


def is_own(name: str) -> bool:
    """Whether no other file ever has this name: a data file, a manifest or a part of ours."""
    return is_data(name) or is_manifest(name) or is_part(name)


def is_data(name: str) -> bool:
    """Whether this is the name of a data file of ours."""
    return _DATA_FILE.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """Whether this is the name of a part: of use until its attempt, or a newer one, is durable."""
    return _PART.fullmatch(name) is not None


def is_manifest(name: str) -> bool:
    """Whether this is the name of a manifest, as it stands in the checkpoint's directory."""
    return _MANIFEST.fullmatch(name) is not None


def attempt_of(name: str) -> str:
    """The attempt whose manifest or part has this name; "" if it is not one's."""
    found = _MANIFEST.fullmatch(name) or _PART.fullmatch(name)
    return found.group(1) if found else ""


def is_old(since: float, age_seconds: float, now: float) -> bool:
    """Whether so much time has passed. Of a time that is unknown or to come nobody can say so."""
    return age_seconds <= 0 or (since > 0 and now - since >= age_seconds)


def plan(directory: Directory, *, grace_seconds: float, orphan_age_seconds: float, now: float) -> Plan:
    """What to do now. `now`: seconds since the epoch by the clock of the objects' times; without grace or age no clock is asked."""
    condemn = _condemned(directory, orphan_age_seconds, now)
    go = {name for name, found in directory.objects.items() if is_temporary(name) and is_old(found.modified, orphan_age_seconds, now)}
    later: set[str] = set()
    ended = [name for name in sorted(directory.strange) if is_old(directory.objects[name].modified, orphan_age_seconds, now)]
    referred = _referred(directory)
    for name, listed in sorted(directory.lists.items()):
        since = directory.objects[name].modified or listed.deleted_us / 1e6
        if _is_void(directory, name):
            ended += [name] if is_old(since, VOID_SECONDS, now) else []
        elif not is_old(since, grace_seconds, now):
            later.update(listed.files)
        elif referred is not None:
            go.update(_deletable(directory, name, referred))
            if not is_tombstone(_file(name)) or name in directory.settled or is_old(since, DELETION_SECONDS, now):
                ended.append(name)  # not before: a second deletion of the same `.metadata` may be under way, and commits look for it
    for name, found in sorted(directory.objects.items()):
        if attempt := refused(_file(name)):  # where the store tells no times, since the attempt was accepted
            ended += [name] if is_old(found.modified or int(attempt[:16], 16) / 1e6, REFUSAL_SECONDS, now) else []
    kept = directory.live.files or frozenset() if directory.live else frozenset()
    later = {name for name in later if name in directory.objects} - kept - go
    return Plan(condemn, sorted(go), ended, sorted(later))


def _listed(directory: Directory) -> set[str]:
    return {file for listed in directory.lists.values() for file in listed.files}


def _loose(directory: Directory) -> list[str]:
    """Files of ours that neither the checkpoint refers to nor a list names."""
    if directory.live is not None and directory.live.files is None:
        return []
    kept = (directory.live.files or frozenset()) if directory.live else frozenset()
    listed = _listed(directory)
    return [name for name in sorted(directory.objects) if is_own(name) and name not in kept and name not in listed]


def _condemned(directory: Directory, orphan_age_seconds: float, now: float) -> list[str]:
    """What nothing needs any more: all that older attempts than the checkpoint left; the rest if all of it is old."""
    given_up = _listed(directory)
    manifests = {name: files for name, files in directory.manifests.items() if name not in given_up}
    if any(files is None for files in manifests.values()):
        return []  # its files cannot be told from others
    loose = set(_loose(directory))
    superseded: set[str] = set()
    if directory.live is not None and directory.live.attempt is not None:
        older = {name for name in manifests if attempt_of(name) < directory.live.attempt}
        superseded = older.union(*(manifests[name] or () for name in older))
        superseded -= frozenset().union(*(manifests[name] or () for name in manifests.keys() - older))
        superseded |= {name for name in directory.objects if is_part(name) and attempt_of(name) <= directory.live.attempt}
    orphans = loose - superseded - _under_way(directory, loose, now)
    times = [found.modified for name, found in directory.objects.items() if name in orphans or is_temporary(name)]
    if not all(is_old(modified, orphan_age_seconds, now) for modified in times):
        orphans = set()
    return sorted((superseded & loose) | orphans)


def _under_way(directory: Directory, names: Iterable[str], now: float) -> set[str]:
    """Manifests whose commits may still put their `.metadata`, whatever age is asked for, with their files."""
    attempt = directory.live.attempt if directory.live is not None else None
    found: set[str] = set()
    for name in filter(is_manifest, names):
        since = directory.objects[name].modified
        if attempt_of(name) != attempt and since > 0 and not is_old(since, COMMIT_SECONDS, now):
            found |= {name, *(directory.manifests.get(name) or ())}
    return found


def _referred(directory: Directory) -> frozenset[str] | None:
    """What must not be deleted, whatever lists name it; None: nothing must, because something cannot be read.

    A manifest that no list names may belong to a commit that is under way.
    """
    given_up = _listed(directory)
    files = directory.live.files if directory.live is not None else frozenset()
    if files is None:
        return None
    for name, own in directory.manifests.items():
        if name not in given_up:
            if own is None:
                return None
            files = files.union(own)
    return files


def _is_void(directory: Directory, name: str) -> bool:
    """Whether the `.metadata` that the tombstone was to take away is still there: then nothing was deleted."""
    live, tombstone = directory.live, directory.lists[name]
    if live is None or not is_tombstone(_file(name)):
        return False
    if tombstone.save_id or live.save_id is not None:
        return tombstone.save_id == live.save_id
    # Stock's have no names. One that was written after the tombstone is another one.
    return live.modified <= directory.objects[name].modified


def _deletable(directory: Directory, list_name: str, referred: frozenset[str]) -> Iterator[str]:
    """The files of the list that are there, needed by nothing, and those that it meant."""
    since = directory.objects[list_name].modified
    for name in directory.lists[list_name].files:
        found = directory.objects.get(name)
        if found is None or name in referred:
            continue
        if is_own(name):
            if found.modified <= since or since == 0:
                yield name
        # Of a name that is used again, only the file that is surely older; and nobody unpins what is there.
        elif 0 < found.modified < since and (name != PIN or directory.live is None) and _may_go(name):
            yield name


def _may_go(name: str) -> bool:
    """Whether a name that is not of our own pattern may be deleted because a tombstone says so."""
    return name == PIN or not name.startswith(f"{OWN_DIRECTORY}/")


def _file(name: str) -> str:
    return name.rpartition("/")[2]


def total_nbytes(directory: Directory, names: Iterable[str]) -> int:
    """Bytes of these files."""
    return sum(directory.objects[name].nbytes for name in names)
