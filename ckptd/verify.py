"""Reads durable checkpoints back, every byte of them, and says in words what is not as it was written.

Of ours: `.metadata` and the manifest against each other's hashes, every data file's size, every
block decoded and hashed, and no byte that belongs to none. Of stock's: what ckptd/stockcheck.py
can tell. Promises: what one request garbled is read again before it is called damage; a
checkpoint that is deleted or saved again meanwhile is no damage; memory is bounded: a few
requests of at most 16 MiB. Writes nothing, runs no pickle. Blocking; a store that is away raises.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import xxhash

from ckptd import blockcheck, metadata, stockcheck
from ckptd.blockcheck import Check, Found
from ckptd.blocks import REQUEST_NBYTES
from ckptd.errors import Corrupt, NotFound
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId, data_key
from ckptd.scan import Entry
from ckptd.store import Store
from ckptd.v1.daemon_pb2 import VerifyReply
from ckptd.v1.manifest_pb2 import Manifest

_THREADS: Final = 2
#: Checks under way or waiting; with their decoded blocks they bound the memory.
_AHEAD: Final = 3
#: So long without news, and the caller hears how far it is.
_NEWS_SECONDS: Final = 1.0
#: Damage named one by one, per checkpoint; the rest is counted.
_NAMED: Final = 100
#: How errors of a load end, where nothing is being loaded.
ADVICE: Final = "; load another checkpoint, as fallback=True does"
_STOCK: Final = "written by stock DCP, which keeps no checksums but the CRC-32 of records"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the verification of one checkpoint is, and what it found since the last one."""

    id: CheckpointId
    nbytes: int
    """Stored bytes read so far."""
    total_nbytes: int
    """As far as it is known; a damaged checkpoint may have less."""
    damage: tuple[str, ...] = ()
    """Object, place and what is wrong."""
    note: str = ""
    """What could not be verified, and why."""
    ended: bool = False


class _Replaced(NotFound):
    """The checkpoint is not the one any more that was to be verified."""


def verify(store: Store, ledger: Ledger, entry: Entry) -> Generator[Progress, None, None]:
    """Reads all of it; the last Progress, and no other, has `ended`. Close the iterator to stop early.

    Raises StoreError, Unavailable: then nothing is known of what was not read.
    """
    verification = _Verification(store, ledger, entry)
    try:
        yield from verification.run()
    except _Replaced as exc:
        yield verification.told(note=str(exc), ended=True)


def reply_of(step: Progress) -> VerifyReply:
    """A step as the wire shows it."""
    return VerifyReply(
        id=str(step.id), nbytes=step.nbytes, total_nbytes=step.total_nbytes, damage=step.damage, note=step.note, ended=step.ended
    )


def is_whole(store: Store, ledger: Ledger, entry: Entry, stop: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
    """Reads all of it, or up to the first damage, which it returns in words; () if there is none.

    Raises NotFound if it was deleted or replaced meanwhile, and InterruptedError soon after `stop()` is true.
    """
    for progress in _Verification(store, ledger, entry).run():
        if progress.damage:
            return progress.damage
        if stop():
            raise InterruptedError(f"the verification of {entry.id} was stopped")
    return ()


class _Verification:
    """One verification of one checkpoint."""

    def __init__(self, store: Store, ledger: Ledger, entry: Entry) -> None:
        self.store = store
        self.ledger = ledger
        self.entry = entry
        self.total_nbytes = entry.metadata.nbytes + (entry.manifest_nbytes or 0)
        self.read: deque[int] = deque()  # appended to by threads
        self.nbytes = 0
        self.told_of = 0
        self.untold = 0

    def told(self, damage: Sequence[str] = (), note: str = "", *, ended: bool = False) -> Progress:
        while self.read:
            self.nbytes += self.read.popleft()
        if ended:
            self.nbytes = max(self.nbytes, self.total_nbytes)
            damage = [*damage, f"{self.entry.id}: {self.untold} more places are damaged"] if self.untold else damage
        return Progress(self.entry.id, self.nbytes, self.total_nbytes, tuple(damage), note, ended)

    def run(self) -> Iterator[Progress]:
        ours = self.entry.save_id is not None
        yield self.told()
        found, checks = self._ours() if ours else self._stock()
        yield self._found(found)
        notes = found.notes
        for progress, more in self._carried_out(checks):
            notes += more
            yield progress
        told = [note.format(count) for note, count in sorted(notes.items()) if count]
        yield self.told(note="; ".join(told if ours else [_STOCK, *told]), ended=True)

    def _found(self, found: Found) -> Progress:
        """What is damaged has to be damaged still: a reader who lags behind a writer would see the same."""
        if found.damage:
            self._look_again()
        damage = [text.removesuffix(ADVICE) for text in found.damage]
        shown = damage[: max(0, _NAMED - self.told_of)]
        self.told_of += len(shown)
        self.untold += len(damage) - len(shown)
        return self.told(shown)

    def _look_again(self) -> None:
        id = self.entry.id
        try:
            now = self.ledger.find(id)
        except NotFound as exc:
            raise _Replaced(f"{id} was deleted while it was verified") from exc
        if (now.save_id, now.metadata) != (self.entry.save_id, self.entry.metadata):
            raise _Replaced(f"{id} was saved again while it was verified")

    def _carried_out(self, checks: Iterable[Check]) -> Iterator[tuple[Progress, Counter[str]]]:
        """All of them, a few at a time."""
        with ThreadPoolExecutor(_THREADS, "verify") as threads:
            ahead: deque[Future[Found]] = deque()
            to_do = iter(checks)
            try:
                while True:
                    while len(ahead) < _AHEAD and (check := next(to_do, None)) is not None:
                        ahead.append(threads.submit(check, self.read.append))
                    if not ahead:
                        return
                    landed, _ = wait([ahead[0]], _NEWS_SECONDS)
                    if not landed:
                        yield self.told(), Counter()
                        continue
                    found = ahead.popleft().result()
                    yield self._found(found), found.notes
            finally:
                for future in ahead:
                    future.cancel()

    # -- ours -------------------------------------------------------------------------------

    def _ours(self) -> tuple[Found, Iterable[Check]]:
        id = self.entry.id
        found = Found()
        try:
            contents = self.ledger.manifest(self.entry)
        except Corrupt as exc:
            found.damage.append(str(exc))
            if self.entry.damaged:
                found.damage.append(f"{self.entry.metadata.key} is damaged: it cannot be read")
            return found, []
        self.total_nbytes += sum(shard.nbytes for shard in contents.shards)
        self.read.append(self.entry.manifest_nbytes or 0)
        if not self._matches(contents):
            found.damage.append(f"{self.entry.metadata.key} is damaged: it does not match the checkpoint's manifest")
        self.read.append(self.entry.metadata.nbytes)
        sizes = blockcheck.sizes(self.store, id)
        found.damage += blockcheck.misplaced(id, contents, sizes).values()
        return found, blockcheck.checks(self.store, id, contents, sizes)

    def _matches(self, contents: Manifest) -> bool:
        """Whether `.metadata` is the one that the manifest was written for."""
        key, nbytes = self.entry.metadata.key, self.entry.metadata.nbytes
        if nbytes != contents.metadata_nbytes:
            return False
        digest = xxhash.xxh3_128()
        try:
            for start in range(0, nbytes, REQUEST_NBYTES):
                digest.update(self.store.get(key, start, min(nbytes, start + REQUEST_NBYTES)))
        except (NotFound, Corrupt):  # deleted, or replaced by a shorter one: that is looked at next
            return False
        return bool(digest.digest() == contents.metadata_hash)

    # -- stock ------------------------------------------------------------------------------

    def _stock(self) -> tuple[Found, Iterable[Check]]:
        key = self.entry.metadata.key
        try:
            contents = metadata.read(self.store.get(key))
        except NotFound:
            return Found([f"{key} is missing"]), []
        except Corrupt as exc:
            return Found([f"{key} is damaged: {exc}"]), []
        self.read.append(self.entry.metadata.nbytes)
        files = {place.file for place in contents.storage.values()}
        lead = f"{self.entry.id}/"
        sizes: dict[str, int] = {}
        for directory in {data_key(self.entry.id, file).rpartition("/")[0] for file in files}:
            beside, _ = self.store.children(directory)
            sizes |= {found.key.removeprefix(lead): found.nbytes for found in beside}
        self.total_nbytes += sum(sizes.get(file, 0) for file in files)
        return stockcheck.checks(self.store, self.entry.id, contents, sizes)
