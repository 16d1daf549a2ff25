"""One try at making an attempt durable that several nodes hold: this node's shards go to the store, and who commits puts the rest.

Promises: nothing is put of an attempt that was deleted or superseded; a part is put after its data file; `.metadata` only by
who commits, when the parts cover all ranks. Decides nothing about when, or who: that is the backlog's and the watch's. Blocking.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptd import errors, parts
from ckptd.attempt import Attempt
from ckptd.flusher import Flusher
from ckptd.ledger import Ledger
from ckptd.v1.manifest_pb2 import StoredShard


class Incomplete(errors.CkptdError):
    """What this node could do for an attempt is done; the shards of `ranks` are not in the store yet. `news`: some of its own are now."""

    def __init__(self, ranks: Iterable[int], *, news: bool) -> None:
        self.ranks = frozenset(ranks)
        named = ", ".join(map(str, sorted(self.ranks)[:16])) + (f" and {len(self.ranks) - 16} more" if len(self.ranks) > 16 else "")
        what = f"the shards of ranks {named} are" if len(self.ranks) > 1 else f"the shard of rank {named} is"
        super().__init__(f"{what} not in the store yet")
        self.news = news


@dataclass(slots=True)
class Duty:
    """What this node does for an attempt that several nodes hold."""

    commits: bool = False
    """It is the one that puts `.metadata`, once all shards are in the store."""
    durable: bool = False
    """Another node says that it is durable: the store is to be asked."""
    for_others: frozenset[str] = frozenset()
    """Tokens of shards that it uploads in place of nodes that are gone."""


class JointFlush:
    """What one node, `node`, does in the store for attempts that it holds with others."""

    def __init__(self, ledger: Ledger, flusher: Flusher, node: str) -> None:
        self.ledger = ledger
        self.flusher = flusher
        self.store = flusher.store
        self.node = node

    def is_proved(self, attempt: Attempt) -> bool:
        """Whether the store shows that all have accepted the attempt: only who knows it puts parts."""
        if parts.listed(self.store, attempt.id, attempt.name):
            return True
        with suppress(errors.NotFound):
            return self.ledger.find(attempt.id).attempt == attempt.name
        return False

    def lacking(self, attempt: Attempt) -> frozenset[int]:
        """Ranks whose shards are not in the store. Raises WrongPhase if it can never be durable any more."""
        if self.ledger.stands(attempt.id, attempt.name, whole=False) is not None:  # committed: its parts are gone
            return frozenset()
        there = parts.listed(self.store, attempt.id, attempt.name)
        return frozenset(receipt.rank for receipt in attempt.record.shards if receipt.rank not in there)

    def flush(
        self, duty: Duty, noted: set[str], attempt: Attempt, paths: dict[str, Path], done: dict[str, StoredShard], stop: threading.Event
    ) -> int:
        """One try. Returns the stored bytes. Raises Incomplete as long as it waits for others; what `Ledger.commit` and the store raise."""
        record, store = attempt.record, self.store
        there = parts.listed(store, attempt.id, attempt.name)
        # Who commits must look at the files, too: whoever put `.metadata` may have had no time for it.
        if (summary := self.ledger.stands(attempt.id, attempt.name, whole=duty.commits)) is not None:
            return summary.stored_bytes
        mine = (attempt.own | duty.for_others) & paths.keys()
        ours = [receipt for receipt in record.shards if receipt.rank not in there and receipt.token in mine and not duty.durable]
        if ours:
            for receipt in ours:
                if receipt.token in noted:  # somebody found that its part, or its file, is no good
                    done.pop(receipt.token, None)
            self.flusher.upload(record, ours, paths, done, stop)
            for receipt in ours:
                parts.put(store, attempt.id, attempt.name, self.node, done[receipt.token])
                noted.add(receipt.token)
            there = parts.listed(store, attempt.id, attempt.name)
        ranks = {receipt.rank for receipt in record.shards}
        if (missing := ranks - there.keys()) or not duty.commits:
            raise Incomplete(sorted(missing), news=bool(ours))
        found = parts.find(store, attempt.id, attempt.name)
        if missing := ranks - found.shards.keys():
            store.delete(found.damaged)
            raise Incomplete(sorted(missing), news=False)
        keys = [key for of_rank in there.values() for key in of_rank]
        try:
            committed = self.flusher.commit(record, [found.shards[receipt.rank] for receipt in record.shards], paths, stop)
        except (errors.NotFound, errors.Corrupt):  # a file that a part names is gone, or not whole: all nodes put theirs again
            store.delete(keys)
            raise
        store.delete(keys)
        return committed.summary.stored_bytes
