"""Deletes checkpoints, and later what they consisted of; and what saves that were cut off or overwritten have left.

Promises: a checkpoint is gone with its `.metadata`, its files stay for the grace; whatever call is the last one before the
process dies, nothing that a `.metadata` refers to is deleted, and the next sweep goes on. Sweeps, deletions, saves and loads
by other processes may run at the same time. Foreign files are not touched, nor what lies behind a symbolic link.
What cannot be read is left alone and logged. `debris.py` decides; docs/0003-deletion.md says why.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ckptd import debris, tombstone
from ckptd.debris import Directory, Plan
from ckptd.directory import elsewhere, listing, look, manifest_files, stock_files
from ckptd.errors import CkptdError, Corrupt, NotFound, StoreError, Unavailable, WrongPhase
from ckptd.ledger import Ledger
from ckptd.model import METADATA_NAME, OWN_DIRECTORY, CheckpointId, metadata_key, pin_key
from ckptd.scan import Entry, ids_of, parallel
from ckptd.store import Changed, Store, is_temporary, temporary_name
from ckptd.v1.manifest_pb2 import Tombstone

log = logging.getLogger(__name__)

#: A deletion that has not begun to take `.metadata` away so long after its tombstone was put gives up: commits rely on it.
DELETE_SECONDS: Final = 5.0
#: Uploads are not told apart by run: a sweep of one run ends only those that are surely nobody's.
_UPLOAD_SECONDS: Final = 86400.0
#: How often a directory that changes under a sweep is planned anew before it is left for the next one.
_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class Deleted:
    """A checkpoint that is gone, and what will go after the grace."""

    id: CheckpointId
    files: int
    nbytes: int


@dataclass(slots=True)
class Swept:
    """What a sweep deleted (or would delete), and what waits for the end of its grace."""

    files: int = 0
    nbytes: int = 0
    later_files: int = 0
    later_nbytes: int = 0
    uploads: int = 0
    """Uploads that never ended, given up."""

    def then(self, after: Swept) -> Swept:
        """Of two sweeps one after another: what went in either, and what waits after the second."""
        went = (self.files + after.files, self.nbytes + after.nbytes)
        return Swept(*went, after.later_files, after.later_nbytes, self.uploads + after.uploads)


@dataclass(slots=True)
class Sweeper:
    """Deletes in one store. All calls block, and may raise what the store raises: then what is left is done by the next one."""

    store: Store
    ledger: Ledger

    def delete(self, entry: Entry) -> Deleted:
        """Takes the checkpoint away; a sweep deletes its files after the grace. Pinned or not.

        Raises WrongPhase if it was deleted or saved again since `entry` was read, or lies behind a symbolic link;
        Corrupt if stock DCP wrote it and what it consists of cannot be read; Unavailable if it may be tried again.
        """
        key = metadata_key(entry.id)
        if entry.metadata.linked:
            raise WrongPhase(f"{entry.id} lies behind a symbolic link: delete it under the name that it leads to")
        try:
            content = self.store.get(key) if entry.save_id is None or entry.damaged else None
        except NotFound:
            raise WrongPhase(f"{entry.id} has been deleted meanwhile") from None
        files = self._files_of(entry, content)
        now_us = int(time.time() * 1e6)
        note = Tombstone(id=str(entry.id), save_id=entry.save_id or "", deleted_us=now_us, files=[*files])
        began = time.monotonic()
        tombstone_key = self._put(entry.id, tombstone.name(now_us), note)
        try:
            version = self._check_unchanged(entry, content)
            if time.monotonic() - began > DELETE_SECONDS:
                raise Unavailable(f"{entry.id} was not deleted: the store {self.store.url} takes too long to answer; try again")
        except CkptdError:
            self._take_back(tombstone_key)
            raise
        try:
            self._take_away(entry, version)
        except WrongPhase:
            self._take_back(tombstone_key)
            raise
        self.ledger.ended_deletions.add(tombstone_key)
        deleted = Deleted(entry.id, len(files), sum(files.values()))
        log.debug("deleted %s: %d files of %d bytes go after the grace", entry.id, deleted.files, deleted.nbytes)
        return deleted

    def refuse(self, id: CheckpointId, attempt: str) -> None:
        """An attempt that is not durable never becomes it: a commit of it that is on its way sees this, or is seen by a later look."""
        self.store.put(f"{id}/{OWN_DIRECTORY}/{tombstone.refusal(attempt)}", lambda: [b""], nbytes_hint=0)

    def sweep(
        self,
        run: str | None,
        *,
        delete_grace_seconds: float,
        orphan_age_seconds: float,
        busy: Collection[CheckpointId] = (),
        dry_run: bool = False,
        now: float | None = None,
    ) -> Swept:
        """Deletes what is debris in a run (None: in the store) and whose time has come.

        `delete_grace_seconds`: so long after it was listed a file goes; `orphan_age_seconds`: so old are what
        uploads that were cut off have left before they are listed. `busy`: ids to leave alone. `now`: seconds
        since the epoch; otherwise the clock of the store or of this machine, whichever is behind.
        """
        swept = Swept()
        refused: list[StoreError] = []
        looked = parallel(self._look, [id for id in self._ids(run) if id not in busy])
        for directory in looked:
            if directory is None:
                continue
            clock = time.time() if now is None else now
            found = debris.plan(directory, grace_seconds=delete_grace_seconds, orphan_age_seconds=orphan_age_seconds, now=clock)
            if dry_run:
                _count(swept, directory, found, condemned_go=delete_grace_seconds <= 0)
                continue
            try:
                if not found.empty and now is None:
                    now = min(clock, self._store_time(directory.id))
                self._sweep_one(directory, swept, delete_grace_seconds, orphan_age_seconds, clock if now is None else now)
            except StoreError as exc:  # what cannot be deleted here keeps nothing else from going
                refused.append(exc)
        if not run:
            self._sweep_root(swept, orphan_age_seconds, time.time() if now is None else now, dry_run=dry_run)
        if not dry_run:
            swept.uploads = self.store.abort_uploads(orphan_age_seconds if run is None else max(orphan_age_seconds, _UPLOAD_SECONDS))
        if refused:
            raise refused[0]
        if swept.files or swept.uploads:
            log.debug(
                "swept %d files of %d bytes and %d uploads%s", swept.files, swept.nbytes, swept.uploads, " (dry run)" if dry_run else ""
            )
        return swept

    # -- deleting a checkpoint ------------------------------------------------------------------

    def _take_away(self, entry: Entry, version: str) -> None:
        """`.metadata` goes, if it is the one that was looked at: another may have been put since. Raises WrongPhase."""
        key = metadata_key(entry.id)
        if entry.pinned:
            self.store.delete([pin_key(entry.id)])
        if not version:
            self.store.delete([key])
            return
        try:
            self.store.remove(key, version)
        except Changed as exc:
            if entry.pinned:
                self.store.put(pin_key(entry.id), lambda: [b""], nbytes_hint=0)
            raise WrongPhase(f"{entry.id} has been saved again meanwhile: it was not deleted") from exc

    def _take_back(self, tombstone_key: str) -> None:
        """Nothing was deleted."""
        self.ledger.ended_deletions.add(tombstone_key)
        with contextlib.suppress(CkptdError):  # a sweep finds that it is void
            self.store.delete([tombstone_key])
            self.ledger.ended_deletions.discard(tombstone_key)

    def _files_of(self, entry: Entry, content: bytes | None) -> dict[str, int]:
        """Names of the files that go with the checkpoint and are there, with their bytes."""
        there = listing(self.store, entry.id)
        names: set[str] = set()
        if entry.save_id is not None:
            own = f"{OWN_DIRECTORY}/{entry.save_id}"
            known = None
            names |= {name for name in there if debris.is_part(name) and debris.attempt_of(name) <= debris.attempt_of(own)}
            for name in filter(debris.is_manifest, there):
                if debris.attempt_of(name) <= debris.attempt_of(own):  # what older attempts left has no better time to go
                    files = self._manifest_files(entry.id, name)
                    names |= {name, *(files or ())}
                    known = files if name == own else known
            if known is None and content is None:  # the manifest is damaged or missing: `.metadata` knows as well
                with contextlib.suppress(Corrupt, NotFound):
                    names |= stock_files(self.store.get(entry.metadata.key))
        else:
            try:
                names |= stock_files(content or b"")
            except Corrupt as exc:
                raise Corrupt(f"{entry.metadata.key}: {exc}; what belongs to {entry.id} is not known, delete it by hand") from exc
        if entry.pinned:
            names.add(debris.PIN)
        names = {name for name in names if tombstone.may_list(name)}
        there |= elsewhere(self.store, entry.id, sorted(names - there.keys()))
        return {name: there[name].nbytes for name in sorted(names) if name in there}

    def _manifest_files(self, id: CheckpointId, name: str) -> frozenset[str] | None:
        with contextlib.suppress(NotFound):  # a sweep was faster
            return manifest_files(self.store, id, name)
        return None

    def _check_unchanged(self, entry: Entry, content: bytes | None) -> str:
        """Raises WrongPhase unless the `.metadata` of `entry` is still there: the same name, or the same bytes if it names nothing.

        Also if it has been pinned since. Returns its version.
        """
        try:
            now = self.ledger.find(entry.id)
            same = (now.save_id, now.damaged) == (entry.save_id, entry.damaged)
            if same and content is not None:
                same = now.metadata == entry.metadata and self.store.get(entry.metadata.key) == content
        except NotFound:
            raise WrongPhase(f"{entry.id} has been deleted meanwhile") from None
        if not same:
            raise WrongPhase(f"{entry.id} has been saved again meanwhile: it was not deleted")
        if now.pinned and not entry.pinned:
            raise WrongPhase(f"{entry.id} has been pinned meanwhile: it was not deleted")
        return now.metadata.version

    # -- sweeping ---------------------------------------------------------------------------------

    def _sweep_one(self, found: Directory, swept: Swept, grace_seconds: float, orphan_age_seconds: float, now: float) -> None:
        """Does in one directory what is planned for it, and plans anew if it changes under the plan."""
        for _ in range(_LOOKS):
            listed = ""
            plan = debris.plan(found, grace_seconds=grace_seconds, orphan_age_seconds=orphan_age_seconds, now=now)
            if plan.condemn:
                now_us = int(time.time() * 1e6)
                note = Tombstone(id=str(found.id), deleted_us=now_us, files=plan.condemn)
                listed = self._put(found.id, tombstone.debris_name(now_us), note)
            elif plan.empty or self._is_as_it_was(found, plan):
                self._delete(found.id, plan.go)
                self._delete(found.id, plan.ended)  # last: as long as there are files, the list that names them is there
                _count(swept, found, plan)
                return
            # Looked at after the list was put: a commit that has not seen the list has put its manifest before, and is seen.
            again = self._look(found.id)
            if again is None:
                return
            found = again.dated(listed.removeprefix(f"{found.id}/"), now)  # whatever the clocks say: its grace begins now
        log.info("%s changes all the time: what is left in it waits for the next sweep", found.id)

    def _is_as_it_was(self, found: Directory, plan: Plan) -> bool:
        """A last look: stock DCP and people, who know of no list, may have written meanwhile."""
        there = listing(self.store, found.id)
        return (
            there.get(METADATA_NAME) == found.metadata
            and all(name in found.manifests for name in there if debris.is_manifest(name))
            and all(there[name] == found.objects[name] for name in plan.go if name in there)
        )

    def _sweep_root(self, swept: Swept, orphan_age_seconds: float, now: float, *, dry_run: bool) -> None:
        """What probes that were killed have left."""
        there = [found for found in self.store.list(".ckptd-", temporary=True) if all(is_temporary(part) for part in found.key.split("/"))]
        old = [found for found in there if debris.is_old(found.modified, orphan_age_seconds, now)]
        swept.files += len(old)
        swept.nbytes += sum(found.nbytes for found in old)
        if old and not dry_run:
            self.store.delete([found.key for found in old])

    def _look(self, id: CheckpointId) -> Directory | None:
        return look(self.store, self.ledger, id)

    def _ids(self, run: str | None) -> list[CheckpointId]:
        """All directories that may be a checkpoint's, or may have been."""
        if run:
            return ids_of(f"{run}/{name}" for name in self.store.children(run)[1])
        names = [str(id) for id in ids_of(self.store.children("")[1])]
        below = parallel(self.store.children, names) if run is None else []
        return ids_of([*names, *(f"{name}/{one}" for name, (_, directories) in zip(names, below, strict=False) for one in directories)])

    def _put(self, id: CheckpointId, name: str, note: Tombstone) -> str:
        """Puts a list; returns its key."""
        key, encoded = f"{id}/{OWN_DIRECTORY}/{name}", tombstone.encode(note)
        self.store.put(key, lambda: [encoded], nbytes_hint=len(encoded))
        return key

    def _delete(self, id: CheckpointId, names: Iterable[str]) -> None:
        keys = [f"{id}/{name}" for name in names]
        if keys:
            self.store.delete(keys)
            self.ledger.ended_deletions.difference_update(keys)

    def _store_time(self, id: CheckpointId) -> float:
        """Now by the store's clock, which is what the age of its objects counts by; inf if it tells none."""
        key = f"{id}/{temporary_name()}"
        self.store.put(key, lambda: [b""], nbytes_hint=0)
        modified = next((found.modified for found in self.store.list(key, temporary=True)), 0.0)
        self.store.delete([key])
        return modified or math.inf


def links(entries: Sequence[Entry]) -> dict[CheckpointId, str]:
    """Of these checkpoints, those that a symbolic link leads to or from, and why they stay: for a policy."""
    linked = [entry for entry in entries if entry.metadata.linked]
    found = {}
    for entry in entries:
        same = [link for link in linked if (link.save_id, link.modified) == (entry.save_id, entry.modified) and link.id != entry.id]
        if entry.metadata.linked:
            found[entry.id] = "it lies behind a symbolic link"
        elif same:
            found[entry.id] = f"the symbolic link {same[0].id} leads to it"
    return found


def _count(swept: Swept, found: Directory, plan: Plan, *, condemned_go: bool = False) -> None:
    """Adds what a plan does; what it only lists waits, unless there is no grace."""
    go, later = ([*plan.go, *plan.condemn], plan.later) if condemned_go else (plan.go, [*plan.later, *plan.condemn])
    swept.files += len(go)
    swept.nbytes += debris.total_nbytes(found, go)
    swept.later_files += len(later)
    swept.later_nbytes += debris.total_nbytes(found, later)
