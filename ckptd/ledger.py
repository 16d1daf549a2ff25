"""Which checkpoints exist for good: everything in the store that has a `.metadata`.

Promises: what is listed was committed; `.metadata` is put last, after the files it leads to
have been seen in the store; a store that cannot be read raises and is never taken for an
empty one; an older attempt is not put over a newer one that is there. Committing the same
attempt again is harmless. Reads no item table to list, runs no pickle, deletes nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptd import codec, manifest, metadata
from ckptd.errors import Corrupt, InvalidRequest, NotFound, Unavailable, WrongPhase
from ckptd.model import METADATA_NAME, OWN_DIRECTORY, CheckpointId, data_key, manifest_key, metadata_key, mint_token
from ckptd.store import Object, Store
from ckptd.v1.manifest_pb2 import Manifest, Summary

#: `save_id` of a checkpoint is the name of its manifest: `<attempt>-<token>.manifest`.
_SAVE_ID = re.compile(r"([0-9a-f]{24})-[0-9a-f]{16}\.manifest")
_DATA_FILE = re.compile(r"__\d+_[0-9a-f]{16}\.distcp")
_THREADS: Final = 8
#: How often a `.metadata` that is replaced while it is read is looked at again.
_LOOKS: Final = 5

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Entry:
    """One durable checkpoint, as a listing and the tail of its `.metadata` tell it."""

    id: CheckpointId
    attempt: str | None
    """None: written by stock DCP."""
    save_id: str | None
    """File name of the manifest; None: written by stock DCP."""
    metadata: Object
    modified: float
    """When `.metadata` was written, in seconds since the epoch; 0.0 if the store does not say."""
    stored_bytes: int
    """Bytes of the files beside `.metadata`, those of no attempt included."""
    damaged: bool = False
    """`.metadata` is ours and cannot be read: `attempt` and `save_id` are those of the newest manifest beside it."""

    @property
    def accepted_us(self) -> int:
        """When it was accepted, in microseconds since the epoch; for stock ones, when it was written."""
        return int(self.modified * 1e6) if self.attempt is None else int(self.attempt[:16], 16)


class Ledger:
    """The durable checkpoints of one store. Keeps nothing: every call looks again. Blocking, thread-safe.

    Every call may raise what the store raises: StoreError, Unavailable.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def entries(self, run: str | None = None) -> list[Entry]:
        """All checkpoints (of one run), in ascending order of run, step (those without first), name."""
        by_id = _group(self._store.list(f"{run}/" if run else ""))
        wanted = [(id, files) for id, files in by_id.items() if run is None or id.run == run]
        found = _parallel(self._entry, [(id, files) for id, files in wanted if METADATA_NAME in files])
        return sorted((entry for entry in found if entry is not None), key=_order)

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
        entries = self.entries(run)
        newest = [
            max(
                (entry for entry in entries if entry.attempt is not None),
                key=lambda entry: (entry.attempt or "", _step(entry.id)),
                default=None,
            ),
            max((entry for entry in entries if entry.attempt is None), key=lambda entry: (_step(entry.id), entry.modified), default=None),
        ]
        candidates = [entry for entry in newest if entry is not None]
        if not candidates:
            named = f"the run {run!r} has no checkpoint" if run else "there is no checkpoint without a run"
            raise NotFound(f"{named} in the store {self._store.url}")
        return max(candidates, key=lambda entry: entry.accepted_us)

    def summary(self, entry: Entry) -> Summary:
        """What `list` shows. For a stock checkpoint: what the listing knows. Raises Corrupt."""
        if entry.save_id is None:
            return Summary(id=str(entry.id), accepted_us=entry.accepted_us, stored_bytes=entry.stored_bytes)
        key = manifest_key(entry.id, entry.save_id)
        with _naming(key):
            nbytes = self._manifest_nbytes(entry.id, key)
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
        return _parallel(self._summary_or_damage, entries)

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
            now = _save_id(data)
            if now is not None and now != entry.save_id:
                raise NotFound(f"{entry.id} was saved again while it was read: resolve it again and retry")
            raise Corrupt(f"{key} is damaged: it does not match the checkpoint's manifest; load another checkpoint")
        return data[: manifest.metadata_head] + b"."

    def incomplete(self, run: str | None = None) -> list[tuple[CheckpointId, str]]:
        """Ids (of one run) for which there are files of ours but no `.metadata`, and how far they got."""
        found = []
        for id, files in sorted(_group(self._store.list(f"{run}/" if run else "")).items()):
            if METADATA_NAME in files or (run is not None and id.run != run):
                continue
            manifests = sum(1 for name in files if _is_manifest(name))
            data = sum(1 for name in files if _DATA_FILE.fullmatch(name))
            if manifests:
                found.append((id, "the files are there, .metadata is not: the commit did not finish, or it is being deleted"))
            elif data:
                found.append((id, f"{data} data file{'s' if data > 1 else ''} and no manifest: the upload did not finish"))
        return found

    def commit(self, id: CheckpointId, contents: Manifest, client_pickle: bytes, *, only_new: bool = False) -> None:
        """Makes the attempt `contents.summary.attempt` the durable checkpoint of `id`.

        Fills `metadata_*` and `summary.stored_bytes` (bytes of the data files) of `contents` in place.
        `client_pickle`: Metadata without storage_data, protocol 2. Returns as well if that attempt is
        durable already. Raises WrongPhase if a newer attempt is; InvalidRequest if, with `only_new`, any other
        is; NotFound (missing) or Corrupt (wrong size) naming a data file that has to be uploaded again;
        Unavailable if it may be tried again.
        """
        attempt = contents.summary.attempt
        contents.summary.stored_bytes = sum(shard.nbytes for shard in contents.shards)
        if self._settled(id, attempt, only_new=only_new):
            return
        self._check_files(id, contents)
        save_id = f"{attempt}-{mint_token()}.manifest"
        spliced = metadata.splice(
            client_pickle,
            _placed(contents),
            descriptors=codec.parse(contents.summary.codec).descriptors,
            checkpoint_id=str(id),
            save_id=save_id,
        )
        if _save_id(spliced) != save_id:
            raise InvalidRequest(f"{id}: {save_id!r} names no manifest of the attempt {attempt!r}")
        contents.metadata_head = len(client_pickle) - 1  # all but STOP
        contents.metadata_nbytes = len(spliced)
        contents.metadata_hash = codec.block_hash(spliced)
        encoded = manifest.encode(contents)
        self._store.put(manifest_key(id, save_id), lambda: [encoded], nbytes_hint=len(encoded))
        if self._settled(id, attempt, only_new=only_new):  # as late as can be: another node may have committed meanwhile
            return
        self._store.put(metadata_key(id), lambda: [spliced], nbytes_hint=len(spliced))
        if not self._settled(id, attempt):
            raise Unavailable(f"{id}: the commit of attempt {attempt} was undone by another writer: commit it again")

    def _settled(self, id: CheckpointId, attempt: str, *, only_new: bool = False) -> bool:
        """Whether `attempt` is the durable one. Raises WrongPhase if a newer one is, InvalidRequest if none may be replaced."""
        now = self._look(id)
        if only_new and now is not None and now.attempt != attempt:
            raise InvalidRequest(f"{id} is durable already: save under another id, or with overwrite=True")
        if now is None or now.attempt is None or now.attempt < attempt:
            return False
        if now.attempt > attempt:
            raise WrongPhase(f"{id}: attempt {attempt} is superseded by attempt {now.attempt}, which is durable")
        return not now.damaged

    def _check_files(self, id: CheckpointId, contents: Manifest) -> None:
        there = {found.key: found.nbytes for found in self._store.list(f"{id}/")}
        for shard in contents.shards:
            if not shard.file:
                continue
            key = data_key(id, shard.file)
            if key not in there:
                raise NotFound(f"{key} of rank {shard.rank} is no longer in the store {self._store.url}: upload it again")
            if there[key] != shard.nbytes:
                raise Corrupt(f"{key} has {there[key]} bytes in the store, {shard.nbytes} were written: upload it again")

    def _look(self, id: CheckpointId) -> Entry | None:
        return self._entry((id, _group(self._store.list(f"{id}/")).get(id, {})))

    def _entry(self, listed: tuple[CheckpointId, dict[str, Object]]) -> Entry | None:
        """Reads the tail of a listed `.metadata`, and the whole if it is not clear who wrote it; None if it is not there (any more)."""
        id, files = listed
        for _ in range(_LOOKS):
            if (found := files.get(METADATA_NAME)) is None:
                return None
            start = max(0, found.nbytes - metadata.TAIL_NBYTES)
            try:
                # To the end, wherever that is by now: a tail that ends too early would make ours a stock one.
                tail = self._store.get(found.key, start)
                newest = max((name.rpartition("/")[2] for name in files if _is_manifest(name)), default=None)
                if newest is not None and _save_id(tail) is None:  # written over by stock, which is fine, or damaged
                    start, tail = 0, self._store.get(found.key)
            except NotFound:
                return None
            if len(tail) == found.nbytes - start:
                damaged = newest is not None and _save_id(tail) is None and not _is_stock(tail)
                save_id = newest if damaged else _save_id(tail)
                beside = sum(there.nbytes for name, there in files.items() if name != METADATA_NAME)
                return Entry(id, save_id[:24] if save_id else None, save_id, found, found.modified, beside, damaged)
            files = _group(self._store.list(f"{id}/")).get(id, {})
        raise Unavailable(f"{id} is being replaced all the time: try again")

    def _manifest_nbytes(self, id: CheckpointId, key: str) -> int:
        for found in self._store.list(key):
            if found.key == key:
                return found.nbytes
        raise NotFound(key)

    def _summary_or_damage(self, entry: Entry) -> Summary | Corrupt:
        if entry.damaged:
            return Corrupt(f"{entry.metadata.key} is damaged; load another checkpoint")
        try:
            return self.summary(entry)
        except Corrupt as exc:
            return exc


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Inside it, errors about the manifest `key` come out as Corrupt with its name."""
    try:
        yield
    except NotFound as exc:
        raise Corrupt(f"{key} is missing, although .metadata names it; load another checkpoint") from exc
    except Corrupt as exc:
        raise Corrupt(f"{key} is damaged: {exc}; load another checkpoint") from exc


def _group(objects: Iterable[Object]) -> dict[CheckpointId, dict[str, Object]]:
    """Objects by checkpoint, then by name relative to it. What has no valid id is left out."""
    grouped: dict[str, dict[str, Object]] = {}
    for found in objects:
        directory, _, name = found.key.rpartition("/")
        if directory.endswith(f"/{OWN_DIRECTORY}"):
            directory, name = directory[: -len(OWN_DIRECTORY) - 1], f"{OWN_DIRECTORY}/{name}"
        grouped.setdefault(directory, {})[name] = found
    valid = {}
    for directory, files in grouped.items():
        try:
            valid[CheckpointId.parse(directory)] = files
        except InvalidRequest:
            continue
    return valid


def _parallel(call: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """`call` of each, a few at a time, results in order. The first error is raised."""
    if len(arguments) <= 1:
        return [call(argument) for argument in arguments]
    with ThreadPoolExecutor(min(_THREADS, len(arguments)), "ledger") as threads:
        return list(threads.map(call, arguments))


def _save_id(tail: bytes) -> str | None:
    """The name of our manifest at the end of a `.metadata`; None if another wrote it."""
    found = metadata.save_id(tail[-metadata.TAIL_NBYTES :])
    return found if found is not None and _SAVE_ID.fullmatch(found) else None


def _is_stock(data: bytes) -> bool:
    """Whether a whole `.metadata` that names no manifest of ours can be read, and does not end as ours do."""
    with contextlib.suppress(Corrupt):
        metadata.read(data)
        return metadata.save_id(data) is None
    return False


def _is_manifest(name: str) -> bool:
    directory, _, file = name.partition("/")
    return directory == OWN_DIRECTORY and _SAVE_ID.fullmatch(file) is not None


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


def _step(id: CheckpointId) -> int:
    return -1 if id.step is None else id.step


def _order(entry: Entry) -> tuple[str, int, str]:
    return (entry.id.run, _step(entry.id), entry.id.name)
