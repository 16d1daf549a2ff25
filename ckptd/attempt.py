"""Shards and attempts as the catalogue keeps them, its effects, and who loses memory first.

Values and pure functions; who changes them is the catalogue alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from ckptd import errors
from ckptd.model import CheckpointId
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record


@dataclass(frozen=True, slots=True)
class Drop:
    """The segment's bytes are not needed any more."""

    token: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The attempt's commit record is not needed any more."""

    attempt: str


@dataclass(frozen=True, slots=True)
class StopFlush:
    """Making the attempt durable has become pointless."""

    attempt: str


Effect = Drop | Forget | StopFlush
#: What people are told of what was not to become durable.
MEMORY_ONLY: Final = "saved with durable=False: it stays in memory only"
#: Accepted, by one node or, with copies in others' memory, by several.
PENDING: Final = (Checkpoint.ACCEPTED, Checkpoint.REPLICATED)


@dataclass(slots=True)
class Shard:
    """One segment with a meaning: the shard, or the metadata pickle, of one save of `id`."""

    token: str
    id: CheckpointId
    rank: int
    owner: str
    metadata: bool
    opened_at: float
    receipt: Receipt | None = None
    sealed_at: float = 0.0


@dataclass(slots=True)
class Attempt:
    """One accepted save and what is still here of it."""

    record: Record
    id: CheckpointId
    state: Checkpoint.State
    reason: str = ""
    """Why it has ended, or is not durable yet; empty if nothing went wrong."""
    held: set[str] = field(default_factory=set)
    own: frozenset[str] = frozenset()
    """Tokens of what this node has to hold: its own shards, and the metadata pickle. The rest it may hold for others."""
    confirmed: bool = True
    """All participants have accepted it. Until that is known here, it supersedes nothing, and nothing is made of it."""
    deleted: bool = False
    """Somebody has asked for its deletion."""
    was_durable: bool = False
    """It became durable, and was deleted since: who waits for it has waited long enough."""
    doubtful: bool = False
    """A part of it is in no memory that can be reached: what is here may go if nothing else makes room."""

    @property
    def name(self) -> str:
        return self.record.summary.attempt

    @property
    def tokens(self) -> list[str]:
        return [receipt.token for receipt in bound(self.record)]

    @property
    def joint(self) -> bool:
        """Other nodes hold shards of it, too."""
        return is_joint(self.record)

    @property
    def pending(self) -> bool:
        """Accepted, and not durable yet."""
        return self.state in PENDING

    @property
    def intact(self) -> bool:
        """All that this node has to hold is there."""
        return self.own <= self.held

    @property
    def whole(self) -> bool:
        """Every byte is in this node's memory."""
        return len(self.held) == len(self.record.shards) + 1

    @property
    def ended(self) -> bool:
        return self.state in (Checkpoint.FAILED, Checkpoint.ABORTED, Checkpoint.LOST)

    @property
    def restorable(self) -> bool:
        return self.state == Checkpoint.DURABLE or (self.whole and self.state != Checkpoint.ABORTED)


def bound(record: Record) -> list[Receipt]:
    """All that a record binds: the shards, then the metadata pickle."""
    return [*record.shards, record.metadata]


def is_joint(record: Record) -> bool:
    """Whether several nodes hold its shards."""
    return len({receipt.node for receipt in record.shards} | {record.metadata.node}) > 1


def own_tokens(record: Record, node: str) -> frozenset[str]:
    """What a participant has to hold: its own shards, and a copy of the metadata pickle."""
    return frozenset({receipt.token for receipt in record.shards if receipt.node in (node, "")} | {record.metadata.token})


def checkpoint_of(attempt: Attempt) -> Checkpoint:
    """An attempt as the wire shows it."""
    reason = MEMORY_ONLY if attempt.pending and not attempt.record.durable else attempt.reason
    return Checkpoint(summary=attempt.record.summary, state=attempt.state, reason=reason)


def refuse_older(checkpoint: CheckpointId, accepted_us: int, sealed_us: int) -> None:
    """Raises WrongPhase if an attempt was accepted before the shard of the caller's save was sealed."""
    if accepted_us < sealed_us:
        raise errors.WrongPhase(
            f"the last save of {checkpoint} is gone: it was not accepted, or was lost with the daemon's memory; "
            f"what there is of {checkpoint} is older"
        )


def read_record(attempt: str, data: bytes) -> Record | None:
    """The commit record of that attempt; None if it is not one: a start must not fail on what lies in the directory."""
    try:
        record = Record.FromString(data)
        CheckpointId.parse(record.summary.id)
    except (DecodeError, errors.InvalidRequest):
        return None
    return record if record.summary.attempt == attempt and record.shards and record.metadata.token else None


def irreplaceable(attempts: Collection[Attempt]) -> set[str]:
    """Tokens of the newest attempt of each run, if it could not become durable or waits for a node that is away: no copy displaces them."""
    newest: dict[str, Attempt] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.name):
        if attempt.confirmed and attempt.state != Checkpoint.ABORTED:
            newest[attempt.id.run] = attempt
    return {token for one in newest.values() if one.state == Checkpoint.FAILED or one.doubtful for token in one.held}


def victims(attempts: Collection[Attempt], pinned: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Tokens in the order in which they may be lost.

    True marks what goes only if nothing else makes room: what has nothing but this memory (a save that was outrun, for a newer one
    of its run is durable, and that may still become durable; one that failed to), then the newest durable checkpoint of a run.
    """
    newest_durable: dict[str, str] = {}
    newest_accepted: dict[str, str] = {}
    for attempt in attempts:
        run = attempt.id.run
        if not attempt.ended and attempt.confirmed:
            newest_accepted[run] = max(attempt.name, newest_accepted.get(run, ""))
        if attempt.state == Checkpoint.DURABLE:
            newest_durable[run] = max(attempt.name, newest_durable.get(run, ""))

    def worth(attempt: Attempt) -> int:
        """The more, the later it goes; from 2 on it is precious, and what is worth 6 stays."""
        run = attempt.id.run
        if attempt.ended:
            return 3 if attempt.doubtful or (attempt.state == Checkpoint.FAILED and attempt.intact) else 0
        if attempt.state == Checkpoint.DURABLE:
            return 4 if attempt.name == newest_durable[run] else 1
        if not attempt.record.durable and attempt.name < newest_accepted.get(run, ""):
            return 0  # nobody was told that it would become durable
        if attempt.name < newest_durable.get(run, ""):
            return 2
        return 5 if attempt.doubtful else 6

    free = [(worth(attempt), attempt) for attempt in attempts if attempt.held and attempt.name not in pinned]
    # Of what is doubtful, that which not all have accepted, as far as is known here, goes before what is a promise.
    for level, attempt in sorted(free, key=lambda one: (one[0], one[0] == 5 and one[1].confirmed, one[1].name)):
        if level < 6:
            for token in sorted(attempt.held):
                yield token, level >= 2
