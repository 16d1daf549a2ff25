"""What retention has to decide about: the durable checkpoints of a store, as `retention` wants to know them.

Promises: everything in the store that is a checkpoint is in the survey, what is damaged as well, with
the reason; the newest of each run that is not called damaged has all its files, in their sizes, and it is
not known to be damaged, from having been read. Blocking; writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ckptd import metadata
from ckptd.blockcheck import misplaced, sizes
from ckptd.errors import Corrupt, NotFound
from ckptd.ledger import Ledger, newest_first
from ckptd.model import CheckpointId, data_key
from ckptd.retention import Candidate
from ckptd.scan import Entry, parallel
from ckptd.store import Object, Store
from ckptd.sweeper import links
from ckptd.v1.manifest_pb2 import Summary
from ckptd.verify import ADVICE

#: So many that were found damaged are remembered, those that were found last.
REMEMBERED: Final = 1000


class KnownDamage:
    """What those who read checkpoints have found: a byte that is not as it was written shows in no size, and no listing.

    Of one save and no other: a newer one of the id is not damaged with it.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[CheckpointId, str | Object], str] = {}

    def found(self, entry: Entry, what: str) -> None:
        """It was read, and this is damaged."""
        self.whole(entry)
        self._found[_save(entry)] = f"found when it was read: {what.removesuffix(ADVICE)}"
        for oldest in list(self._found)[:-REMEMBERED]:
            del self._found[oldest]

    def whole(self, entry: Entry) -> None:
        """All of it was read, and nothing is damaged (any more)."""
        self._found.pop(_save(entry), None)

    def of(self, entry: Entry) -> str:
        """What was found; "" if nothing was."""
        return self._found.get(_save(entry), "")


def _save(entry: Entry) -> tuple[CheckpointId, str | Object]:
    """Stock DCP names no save: its `.metadata` is another object after each."""
    return entry.id, entry.save_id or entry.metadata


def survey(
    store: Store, ledger: Ledger, run: str | None, busy: Callable[[Entry], str] = lambda _: "", known: KnownDamage | None = None
) -> list[tuple[Entry, Candidate]]:
    """All checkpoints (of one run). `busy` says why one must stay now, "" if it need not. Raises StoreError, Unavailable."""
    entries = ledger.entries(run)
    linked = links(entries)
    # The last good one must not go for one that nobody can load.
    damage = parallel(lambda entry: (known.of(entry) if known else "") or _unreadable(store, entry), entries)
    told = [Corrupt(why) if why else summary for why, summary in zip(damage, ledger.summaries(entries), strict=True)]
    candidates = [_candidate(entry, found, linked.get(entry.id) or busy(entry)) for entry, found in zip(entries, told, strict=True)]
    return _with_newest_whole(store, ledger, list(zip(entries, candidates, strict=True)))


def _unreadable(store: Store, entry: Entry) -> str:
    """Why the `.metadata` of a checkpoint that stock DCP wrote cannot be read; "" if it can. Ours tell it by their tail."""
    if entry.save_id is not None:
        return ""
    try:
        metadata.read(store.get(entry.metadata.key))
    except Corrupt as exc:
        return f"{entry.metadata.key} is damaged: {exc}"
    except NotFound:  # deleted meanwhile: then it is looked at again before anything happens
        return ""
    return ""


def _with_newest_whole(store: Store, ledger: Ledger, found: list[tuple[Entry, Candidate]]) -> list[tuple[Entry, Candidate]]:
    """Looks at the files of the newest of each run, and of the one before it as long as some are missing or cut short.

    The others are not looked at: that would cost a manifest each, and what counts is that the last good one does not go
    for one that nobody can load.
    """
    looked = {entry.id: candidate for entry, candidate in found}
    for run in {entry.id.run for entry, _ in found}:
        for entry in newest_first([entry for entry, _ in found if entry.id.run == run]):
            candidate = looked[entry.id]
            if candidate.damaged:
                continue
            if not (lost := _lost(store, ledger, entry)):
                break
            looked[entry.id] = replace(candidate, damaged=lost)
    return [(entry, looked[entry.id]) for entry, _ in found]


def _lost(store: Store, ledger: Ledger, entry: Entry) -> str:
    """Which file is not there as it was written, in words; "" if all are."""
    try:
        if entry.save_id is not None:
            return next(iter(misplaced(entry.id, ledger.manifest(entry), sizes(store, entry.id)).values()), "")
        there = {found.key: found.nbytes for found in store.list(f"{entry.id}/")}
        for place in metadata.read(store.get(entry.metadata.key)).storage.values():
            key = data_key(entry.id, place.file)
            if there.get(key, -1) < place.offset + place.length:
                return f"{key} is {'cut short' if key in there else 'missing'}"
    except Corrupt as exc:
        return str(exc)
    except NotFound:  # deleted meanwhile: then it is looked at again before anything happens
        return ""
    return ""


def _candidate(entry: Entry, found: Summary | Corrupt, busy: str) -> Candidate:
    summary = Summary() if isinstance(found, Corrupt) else found
    return Candidate(
        id=entry.id,
        order=entry.order,
        step=summary.step if summary.HasField("step") else entry.id.step,
        accepted_us=summary.accepted_us or entry.accepted_us,
        stored_bytes=summary.stored_bytes,
        pinned=entry.pinned,
        damaged=str(found) if isinstance(found, Corrupt) else "",
        busy=busy,
    )
