"""What retention has to decide about: the durable checkpoints of a store, as `retention` wants to know them.

Promises: everything in the store that is a checkpoint is in the survey, what is damaged as well, with
the reason. Blocking; writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptd.errors import Corrupt
from ckptd.ledger import Ledger
from ckptd.retention import Candidate
from ckptd.scan import Entry, parallel
from ckptd.sweeper import links
from ckptd.v1.manifest_pb2 import Summary


def survey(ledger: Ledger, run: str | None, busy: Callable[[Entry], str] = lambda _: "") -> list[tuple[Entry, Candidate]]:
    """All checkpoints (of one run). `busy` says why one must stay now, "" if it need not. Raises StoreError, Unavailable."""
    entries = ledger.entries(run)
    linked = links(entries)
    damage = parallel(ledger.stock_damage, entries)  # the last good one must not go for one that nobody can load
    told = [Corrupt(why) if why else summary for why, summary in zip(damage, ledger.summaries(entries), strict=True)]
    return [(entry, _candidate(entry, found, linked.get(entry.id) or busy(entry))) for entry, found in zip(entries, told, strict=True)]


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
