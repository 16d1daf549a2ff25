"""Which checkpoints exist for good: everything in the store that has a `.metadata`.

Promises: what is listed was committed; `.metadata` is put last, after the files it leads to
have been seen in the store; a store that cannot be read raises and is never taken for an
empty one; an older attempt is not put over a newer one that is there, nor over one that came
after the last look, where the store knows conditional puts; an attempt that was
deleted, durable or not yet, is not committed again, and none counts as committed while a deletion of its id could still take its
`.metadata` away. Committing the same attempt again is harmless. Reads no item table to list, runs no pickle, deletes nothing but a pin.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

from ckptd import codec, manifest, metadata, tombstone
from ckptd.errors import Corrupt, InvalidRequest, NotFound, Unavailable, WrongPhase
from ckptd.model import OWN_DIRECTORY, CheckpointId, data_key, is_attempt, manifest_key, metadata_key, mint_token, pin_key
from ckptd.scan import Entry, Scan, entry_of, marks_of, parallel, refusals, save_id, scan, step_of, tombstones
from ckptd.store import ABSENT, Changed, Object, Store
from ckptd.tombstone import COMMIT_SECONDS, DELETION_SECONDS, PIN_PAUSE_SECONDS
from ckptd.v1.manifest_pb2 import Manifest, Summary

log = logging.getLogger(__name__)


class WasDeleted(WrongPhase):
    """The attempt was deleted. `entry`: it is there all the same, because a commit and the deletion have met, and has to go again."""

    def __init__(self, id: CheckpointId, attempt: str, entry: Entry | None) -> None:
        super().__init__(f"{id}: attempt {attempt} has been deleted")
        self.entry = entry


class Ledger:
    """The durable checkpoints of one store. Keeps nothing of them: every call looks again. Blocking, thread-safe.

    Every call may raise what the store raises: StoreError, Unavailable.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Keys of tombstones whose deletion has ended in this process: they threaten nothing any more.
        self.ended_deletions: set[str] = set()

    @property
    def url(self) -> str:
        """Where it is, for people and for telling stores apart."""
        return self._store.url

    def scan(self, run: str | None = None) -> Scan:
        """All checkpoints (of one run), and what has not become one."""
        return scan(self._store, run)

    def entries(self, run: str | None = None) -> list[Entry]:
        """All checkpoints (of one run), in ascending order of run, step (those without first), name."""
        return self.scan(run).entries

    def incomplete(self, run: str | None = None) -> list[tuple[CheckpointId, str]]:
        """Ids (of one run) for which there are files of ours but no `.metadata`, and how far they got."""
        return self.scan(run).incomplete

    def find(self, id: CheckpointId) -> Entry:
        """The checkpoint of that name. Raises NotFound."""
        entry = self._look(id)
        if entry is None:
            raise NotFound(f"{id} is not in the store {self._store.url}; `ckptd list` shows what is")
        return entry

    def latest(self, run: str) -> Entry:
        """The checkpoint of the run that was accepted last. Raises NotFound.

        Stock ones do not say when: they count by step among themselves, and their newest takes part
        with the time of its `.metadata`.
        """
        for entry in newest_first(self.entries(run)):
            return entry
        named = f"the run {run!r} has no checkpoint" if run else "there is no checkpoint without a run"
        raise NotFound(f"{named} in the store {self._store.url}; `ckptd list` shows what is")

    def summary(self, entry: Entry) -> Summary:
        """What `list` shows. For a stock checkpoint: what the listing knows. Raises Corrupt."""
        if entry.save_id is None:
            return Summary(id=str(entry.id), accepted_us=entry.accepted_us, stored_bytes=self._stock_nbytes(entry))
        key = manifest_key(entry.id, entry.save_id)
        with _naming(key):
            nbytes = entry.manifest_nbytes
            if nbytes is None:
                raise NotFound(key)
            head = self._store.get(key, 0, min(nbytes, manifest.HEAD_NBYTES))
            summary = manifest.read_summary(head)
            if isinstance(summary, int):
                if summary > nbytes:
                    raise Corrupt(f"it has {nbytes} bytes, its summary alone needs {summary}")
                summary = manifest.read_summary(self._store.get(key, 0, summary))
            if isinstance(summary, int):
                raise Corrupt("it changed while it was read")
            return _as_found(summary, entry)

    def summaries(self, entries: Sequence[Entry]) -> list[Summary | Corrupt]:
        """`summary` of many, in their order and some at a time; damage of one does not hide the others."""
        return parallel(self._summary_or_damage, entries)

    def manifest(self, entry: Entry) -> Manifest:
        """What the checkpoint consists of. Raises Corrupt; NotFound if stock DCP wrote it, which leaves none."""
        if entry.save_id is None:
            raise NotFound(f"{entry.id} has no manifest: it was written by stock DCP")
        key = manifest_key(entry.id, entry.save_id)
        with _naming(key):
            found = manifest.decode(self._store.get(key))
            _as_found(found.summary, entry)
        return found

    def metadata_pickle(self, entry: Entry, manifest: Manifest) -> bytes:
        """The pickle that the client gave at commit, byte for byte, checked against the manifest.

        Raises Corrupt; NotFound if the checkpoint was deleted or replaced since `entry` was read.
        """
        key = metadata_key(entry.id)
        data = self._store.get(key)
        if len(data) != manifest.metadata_nbytes or codec.block_hash(data) != manifest.metadata_hash:
            now = save_id(data)
            if now is not None and now != entry.save_id and not entry.damaged:
                raise NotFound(f"{entry.id} was saved again while it was read: resolve it again and retry")
            raise Corrupt(f"{key} is damaged: it does not match the checkpoint's manifest; load another checkpoint, as fallback=True does")
        return data[: manifest.metadata_head] + b"."

    def pin(self, id: CheckpointId) -> None:
        """No policy deletes it from now on. Waits for a deletion of it that is under way. Raises NotFound."""
        self.find(id)
        self._store.put(pin_key(id), lambda: [b""], nbytes_hint=0)
        began = time.monotonic()
        # A deletion puts its tombstone before it looks for a pin: it sees this one, or is seen here. After DELETION_SECONDS it is dead.
        while (now := entry_of(self._store, id, marks := marks_of(self._store, id))) is not None:
            meant = (key for key, _, of in self._deletions(tombstones(id, marks)) if of == (now.save_id or ""))
            if all(key in self.ended_deletions for key in meant) or time.monotonic() - began > DELETION_SECONDS:
                return
            time.sleep(PIN_PAUSE_SECONDS)
        self._store.delete([pin_key(id)])
        raise NotFound(f"{id} has been deleted meanwhile")

    def unpin(self, id: CheckpointId) -> None:
        """Policies may delete it; fine if it was not pinned. Raises NotFound."""
        self.find(id)
        self._store.delete([pin_key(id)])

    def commit(self, id: CheckpointId, contents: Manifest, client_pickle: bytes, *, only_new: bool = False) -> None:
        """Makes the attempt `contents.summary.attempt` the durable checkpoint of `id`.

        Fills `metadata_*` and `summary.stored_bytes` (bytes of the data files) of `contents` in place.
        `client_pickle`: Metadata without storage_data, protocol 2. Returns as well if that attempt is
        durable already. Raises WrongPhase if a newer attempt is, WasDeleted if it was deleted; InvalidRequest if, with `only_new`,
        any other is; NotFound (missing) or Corrupt (wrong size) naming a data file that has to be uploaded again;
        Unavailable if it may be tried again, also because a deletion of the id is under way.
        """
        attempt = contents.summary.attempt
        contents.summary.stored_bytes = sum(shard.nbytes for shard in contents.shards)
        settled, _ = self._standing(id, attempt, only_new=only_new)
        if settled and self._is_whole(settled):
            return
        self._check_files(id, contents)
        name = f"{attempt}-{mint_token()}.manifest"
        spliced = metadata.splice(
            client_pickle,
            _placed(contents),
            descriptors=codec.parse(contents.summary.codec).descriptors,
            checkpoint_id=str(id),
            save_id=name,
        )
        if save_id(spliced) != name:
            raise InvalidRequest(f"{id}: {name!r} names no manifest of the attempt {attempt!r}")
        contents.metadata_head = len(client_pickle) - 1  # all but STOP
        contents.metadata_nbytes = len(spliced)
        contents.metadata_hash = codec.block_hash(spliced)
        encoded = manifest.encode(contents)
        began = time.monotonic()
        self._store.put(manifest_key(id, name), lambda: [encoded], nbytes_hint=len(encoded))
        settled, there = self._standing(id, attempt, only_new=only_new)  # another node may have committed meanwhile
        if settled and self._is_whole(settled):
            return
        # With the manifest in place: a sweep that is about to delete a file has put a list that is seen here, or sees the manifest.
        self._check_uncondemned(id, contents, name)
        self._check_files(id, contents)
        if time.monotonic() - began > COMMIT_SECONDS / 2:
            raise Unavailable(f"{id}: the store {self._store.url} takes too long for a commit: commit it again")
        with contextlib.suppress(Changed):  # by whom is seen now; by this put, if only its answer was lost
            self._store.put(metadata_key(id), lambda: [spliced], nbytes_hint=len(spliced), replacing=there or None)
        settled, _ = self._standing(id, attempt)
        if not settled:
            raise Unavailable(
                f"{id}: another writer forestalled or undid the commit of attempt {attempt}, or a deletion of {id} may still undo it: "
                "commit it again"
            )
        # A sweep that did not know of the commit may have met it half-way.
        self._check_files(id, contents if settled.save_id == name else self.manifest(settled))

    def stands(self, id: CheckpointId, attempt: str, *, whole: bool = True) -> Summary | None:
        """The summary of that attempt if it is the durable one and none of its files is missing; else None.

        Who committed it may have died, or failed, before its last look at the files; not `whole`: they are not looked at.
        Raises WrongPhase if a newer attempt is durable, WasDeleted if this one was deleted; what the store raises, and Corrupt.
        """
        now, _ = self._now(id, attempt)
        if now is None or now.damaged or now.attempt != attempt or (whole and not self._is_whole(now)):
            return None
        return self.summary(now)

    def _is_whole(self, entry: Entry) -> bool:
        """Whether everything that its manifest names is there: what is not can be committed once more."""
        try:
            self._check_files(entry.id, self.manifest(entry))
        except (NotFound, Corrupt) as exc:
            log.warning("%s is durable and not whole: %s", entry.id, exc)
            return False
        return True

    def _standing(self, id: CheckpointId, attempt: str, *, only_new: bool = False) -> tuple[Entry | None, str]:
        """The entry of `attempt` if it is the durable one, for good; and the version of what is there, which a commit replaces.

        The version is as old as what was read under it, or older: a put over it cannot hit what nobody looked at.
        Raises WrongPhase if a newer one is, WasDeleted if `attempt` was deleted; InvalidRequest if none may be replaced.
        """
        now, deletions = self._now(id, attempt, only_new=only_new)
        if now is None:
            return None, ABSENT
        if now.attempt != attempt:
            return None, now.metadata.version
        # One that was put after this `.metadata` has seen it. By this machine's clock where the store tells no times.
        put = now.modified or time.time()
        threats = [since for key, since, of in deletions if key not in self.ended_deletions and of[:24] != attempt]
        threatened = any(-1.0 <= put - since < DELETION_SECONDS for since in threats)
        return None if now.damaged or threatened else now, now.metadata.version

    def _now(self, id: CheckpointId, attempt: str, *, only_new: bool = False) -> tuple[Entry | None, list[tuple[str, float, str]]]:
        """What is durable, if it is not newer than `attempt`, and the deletions of the id. Raises as `_standing`."""
        marks = marks_of(self._store, id)
        now = entry_of(self._store, id, marks)
        if only_new and now is not None and now.attempt != attempt:
            raise InvalidRequest(f"{id} is durable already: save under another id, or with overwrite=True")
        if now is not None and now.attempt is not None and now.attempt > attempt:
            how = "" if is_attempt(now.attempt) else ", and of a time that no clock tells: delete it, or save under another id"
            raise WrongPhase(f"{id}: attempt {attempt} is superseded by attempt {now.attempt}, which is durable{how}")
        there = now if now is not None and now.attempt == attempt else None
        deletions = list(self._deletions(tombstones(id, marks)))
        gone = any(of[:24] == attempt and (there is None or of != there.save_id) for _, _, of in deletions)
        if gone or attempt in refusals(id, marks):  # but a deletion of exactly what is there is under way, or was given up
            raise WasDeleted(id, attempt, there)
        return now, deletions

    def _deletions(self, listed: Sequence[Object]) -> Iterator[tuple[str, float, str]]:
        """The key of each tombstone, when its deletion began, and the save id that it means, "" for a stock one."""
        for one in listed:
            with contextlib.suppress(NotFound, Corrupt):  # swept meanwhile; a damaged one deletes nothing
                found = tombstone.decode(self._store.get(one.key))
                yield one.key, one.modified or found.deleted_us / 1e6, found.save_id

    def _check_files(self, id: CheckpointId, contents: Manifest) -> None:
        there = {found.key: found.nbytes for found in self._store.list(f"{id}/__")}
        for shard in contents.shards:
            if not shard.file:
                continue
            key = data_key(id, shard.file)
            if key not in there:
                raise NotFound(f"{key} of rank {shard.rank} is no longer in the store {self._store.url}: upload it again")
            if there[key] != shard.nbytes:
                raise Corrupt(f"{key} has {there[key]} bytes in the store, {shard.nbytes} were written: upload it again")

    def _check_uncondemned(self, id: CheckpointId, contents: Manifest, manifest_name: str) -> None:
        """Raises NotFound if a sweep is about to delete one of the files, Unavailable if it is the manifest.

        To be asked before `_check_files`: a list of what is to go goes after what it names.
        """
        for listed in self._condemned(id):
            if f"{OWN_DIRECTORY}/{manifest_name}" in listed:
                raise Unavailable(f"{id}: {manifest_name} was taken for debris: commit it again")
            for shard in contents.shards:
                if shard.file in listed:
                    raise NotFound(f"{data_key(id, shard.file)} of rank {shard.rank} is about to be swept: upload it again")

    def _condemned(self, id: CheckpointId) -> Iterator[set[str]]:
        """What each tombstone and list of debris of the id names."""
        for found in self._store.list(f"{id}/{OWN_DIRECTORY}/"):
            if tombstone.is_list(found.key.rpartition("/")[2]):
                listed: set[str] = set()
                with contextlib.suppress(NotFound, Corrupt):  # swept meanwhile; a damaged one deletes nothing
                    listed.update(tombstone.decode(self._store.get(found.key)).files)
                yield listed

    def _look(self, id: CheckpointId) -> Entry | None:
        return entry_of(self._store, id, marks_of(self._store, id))

    def _stock_nbytes(self, entry: Entry) -> int:
        """Bytes of the files beside `.metadata`, whoever wrote them; what lies in directories of other checkpoints is not counted."""
        beside, _ = self._store.children(str(entry.id))
        return sum(found.nbytes for found in beside if found.key != entry.metadata.key)

    def _summary_or_damage(self, entry: Entry) -> Summary | Corrupt:
        if entry.damaged:
            return Corrupt(f"{entry.metadata.key} is damaged; load another checkpoint, as fallback=True does")
        try:
            return self.summary(entry)
        except Corrupt as exc:
            return exc


def newest_first(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Those of one run, the one that was accepted last first; each as `latest` would be without those before it."""
    ours = sorted((entry for entry in entries if entry.attempt is not None), key=lambda entry: (entry.order, step_of(entry.id)))
    stock = sorted((entry for entry in entries if entry.attempt is None), key=lambda entry: (step_of(entry.id), entry.modified))
    while ours or stock:
        is_ours = bool(ours) and (not stock or ours[-1].accepted_us >= stock[-1].accepted_us)
        yield (ours if is_ours else stock).pop()


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Inside it, errors about the manifest `key` come out as Corrupt with its name."""
    try:
        yield
    except NotFound as exc:
        raise Corrupt(f"{key} is missing, although .metadata names it; load another checkpoint, as fallback=True does") from exc
    except Corrupt as exc:
        raise Corrupt(f"{key} is damaged: {exc}; load another checkpoint, as fallback=True does") from exc


def _as_found(summary: Summary, entry: Entry) -> Summary:
    """The summary under the name it was found under: a copied directory is a checkpoint, too."""
    if summary.attempt != entry.attempt:
        raise Corrupt(f"it tells of the attempt {summary.attempt!r}")
    summary.id = str(entry.id)
    return summary


def _placed(contents: Manifest) -> Iterator[metadata.Placed]:
    """Where each item lies, as DCP's storage_data has it."""
    for shard in contents.shards:
        for item, stored in zip(shard.table.items, shard.stored, strict=True):
            yield metadata.Placed(
                fqn=item.fqn,
                offset=tuple(item.offset) if item.has_offset else None,
                index=item.index if item.HasField("index") else None,
                file=shard.file,
                at=stored.offset,
                nbytes=sum(stored.lengths),
            )
