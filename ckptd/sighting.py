"""One attempt as several nodes hold it: what each says of it, put together.

Pure. Promises: an attempt counts as restorable only if every shard is held by a node that answered, or is in the
store, and the metadata pickle is held, too; and never if a node says that it was superseded or deleted. Where a
part is missing, it can say which, and where that was.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptd.attempt import MEMORY_ONLY, PENDING, Attempt, checkpoint_of, read_record
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record, StoredShard, Summary
from ckptd.v1.peer_pb2 import Holding

#: Stands for this node where others have addresses.
HERE: Final = ""
#: So many saves that cannot be read are named.
MOST_TOLD: Final = 3
#: Said of a node that answers: what it held is gone.
FORGETFUL: Final = "and does not hold it any more"
_HINT: Final = "; if that state matters, start the daemon of that node again, with its shm-dir and address, before the next save"
#: What does not come back if the store does not have it: what was durable there was deleted since.
GONE: Final = (Checkpoint.ABORTED, Checkpoint.DURABLE)


@dataclass(slots=True)
class Sighting:
    """One attempt, as the nodes that answered hold it."""

    summary: Summary
    states: dict[str, Checkpoint.State] = field(default_factory=dict)
    """By address: what has become of it there."""
    holders: dict[str, list[str]] = field(default_factory=dict)
    """By token: addresses of those that hold it, whole."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By address: why it is no further there."""
    record: Record | None = None
    accepted: bool = False
    """Somebody knows that all have accepted it."""
    own: Attempt | None = None
    """What this node knows of it."""
    stored: dict[int, StoredShard] = field(default_factory=dict)
    """By rank: what is in the store already of shards that nobody holds; looked for only where that decides."""
    at: float = field(default_factory=time.monotonic)

    @property
    def missing(self) -> list[Receipt]:
        """What of it is in no memory that can be reached, and not in the store."""
        if self.record is None:
            return []
        shards = [receipt for receipt in self.record.shards if receipt.rank not in self.stored]
        return [receipt for receipt in (*shards, self.record.metadata) if not self.holders.get(receipt.token)]

    @property
    def whole(self) -> bool:
        """All of it is held."""
        return self.record is not None and not self.missing

    @property
    def state(self) -> Checkpoint.State:
        """The state that counts: an end that one node knows of is the end."""
        found = set(self.states.values())
        for state in (Checkpoint.ABORTED, Checkpoint.DURABLE, Checkpoint.FAILED, Checkpoint.LOST, Checkpoint.REPLICATED):
            if state in found and not (state == Checkpoint.LOST and self.whole):  # the node that was gone is back
                return state
        return Checkpoint.ACCEPTED

    @property
    def ended(self) -> bool:
        """It was superseded, deleted or given up."""
        return self.state in (Checkpoint.ABORTED, Checkpoint.LOST)

    @property
    def restorable(self) -> bool:
        """It can be read now, though the store does not have it as a checkpoint."""
        if self.own is not None and not self.own.joint:
            return self.own.restorable and self.own.state != Checkpoint.DURABLE
        return self.whole and self.state not in (Checkpoint.ABORTED, Checkpoint.DURABLE)

    def line(self) -> Checkpoint:
        """As the wire shows it; if it cannot be read, `reason` says which part of it is where."""
        if self.own is not None and not self.own.joint:
            return checkpoint_of(self.own)
        state = self.state
        told = next((f"the daemon at {at} says: {why}" for at, why in self.reasons.items() if why and self.states[at] == state), "")
        reason = (self.own.reason if self.own is not None else "") or told
        # Who watches it says what is missing, and since when.
        watched = self.own is not None and self.own.doubtful
        known = reason and (watched or (self.missing and all(f"node {receipt.node} " in reason for receipt in self.missing)))
        if self.record is not None and not self.record.durable and state in PENDING:
            reason = f"{reason}; {MEMORY_ONLY}" if known else MEMORY_ONLY
        if self.missing and not known and state in (*PENDING, Checkpoint.LOST, Checkpoint.FAILED):
            reason = "; ".join(filter(None, [*_why(self.missing), reason]))
        return Checkpoint(summary=self.summary, state=state, reason=reason)


def merged(own: Iterable[Attempt], told: Mapping[str, Iterable[Holding]]) -> dict[str, Sighting]:
    """What this node and others say of attempts, by attempt. `told`: by address."""
    found: dict[str, Sighting] = {}
    for attempt in own:
        seen = found[attempt.name] = Sighting(attempt.record.summary, {HERE: attempt.state}, record=attempt.record, own=attempt)
        seen.holders = {token: [HERE] for token in attempt.held}
        seen.accepted = attempt.confirmed
    for address, holdings in told.items():
        for holding in holdings:
            name = holding.summary.attempt
            seen = found.setdefault(name, Sighting(holding.summary))
            if seen.summary.id != holding.summary.id:
                continue
            seen.states[address] = holding.state
            seen.reasons[address] = holding.reason
            seen.accepted = seen.accepted or not holding.adopted
            for token in holding.held:
                seen.holders.setdefault(token, []).append(address)
            if seen.record is None and holding.HasField("record"):
                seen.record = read_record(name, holding.record.SerializeToString())
    return found


def not_reached(seen: Mapping[str, Sighting], name: str, away: Collection[str] = ()) -> list[str]:
    """What was accepted later than the attempt `name`, was not deleted, and cannot be read: the newest few, in words.

    `away`: addresses of nodes that do not answer.
    """
    told = []
    for at, one in sorted(seen.items(), reverse=True):
        if at <= name or not one.missing or one.record is None or one.state in GONE:
            continue
        why = one.line().reason
        if one.own is not None and not one.own.joint:
            told.append(f"a save of {one.summary.id} was accepted later, and memory does not hold it any more: {why}")
        elif one.accepted or one.record.metadata.address in away:
            # Else it is being saved just now, or its trainer has heard that it failed.
            how = "was accepted later" if one.accepted else "was begun later, and may have been accepted"
            startable = FORGETFUL not in why and any(receipt.address in away for receipt in one.missing)
            told.append(f"a save of {one.summary.id} {how}: {why}{_HINT if startable else ''}")
    if len(told) > MOST_TOLD:
        told[MOST_TOLD:] = [f"{len(told) - MOST_TOLD} more that were, or may have been, accepted later cannot be read either"]
    return told


def _why(missing: Collection[Receipt]) -> list[str]:
    """Where that is what cannot be reached, by node."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for receipt in missing:
        nodes.setdefault((receipt.node, receipt.address), []).append(str(receipt.rank))
    return [
        f"what rank{'s' if len(ranks) > 1 else ''} {', '.join(dict.fromkeys(ranks))} saved is in no memory that can be reached: "
        f"node {node} at {address or 'no address'} held it"
        for (node, address), ranks in nodes.items()
    ]
