"""What this node holds in memory: shards, attempts and who may lose them.

A pure state machine. Events come in as plain calls, what must follow comes out as effects; nothing here awaits, reads
a clock or touches a file, so each transition is atomic on the daemon's loop. The caller writes an attempt's record *before*
`accept`, and carries out the effects in their order.

An attempt moves accepted -> durable, or ends as failed, aborted or lost. Its segments are kept as long as nothing else
needs their memory; `victims` says in which order they go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from ckptd import errors
from ckptd.attempt import Attempt, Drop, Effect, Forget, Shard, StopFlush, bound, own_tokens, victims
from ckptd.model import CheckpointId, is_attempt
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record

#: How many ended attempts are remembered for `list` and `wait`.
REMEMBERED = 256
#: How many troubles one warning tells of.
MOST_TOLD = 3


class Catalog:
    """All shards and attempts of one daemon. Lives on the loop."""

    def __init__(self, node: str, *, open_timeout_seconds: float, codec: str) -> None:
        self.node = node
        self.codec = codec
        self.open_timeout_seconds = open_timeout_seconds
        self.shards: dict[str, Shard] = {}
        self.attempts: dict[str, Attempt] = {}
        self.bound: dict[str, str] = {}
        self.leases: Counter[str] = Counter()
        self.pins: Counter[str] = Counter()
        self.waiting: Counter[CheckpointId] = Counter()
        self.newest: dict[str, str] = {}
        self.troubles: dict[str, str] = {}

    # -- leases -----------------------------------------------------------------------------

    def lease(self, owner: str) -> None:
        self.leases[owner] += 1

    def lease_ended(self, owner: str) -> list[Effect]:
        """The owner's unsealed segments are lost; what it sealed is not touched."""
        self.leases[owner] -= 1
        if self.leases[owner] > 0:
            return []
        del self.leases[owner]
        gone = [shard.token for shard in self.shards.values() if shard.owner == owner and shard.receipt is None]
        return [self._drop_shard(token) for token in gone]

    # -- a save -----------------------------------------------------------------------------

    def restarted(self, checkpoint: CheckpointId, rank: int, owner: str) -> list[Effect]:
        """The rank starts this id again: what it, or a process that is gone, sealed for it and nobody bound is dropped."""
        stale = [
            shard.token
            for shard in self.unbound(checkpoint)
            if shard.rank == rank and shard.receipt is not None and (shard.owner == owner or not self.leases[shard.owner])
        ]
        return [self._drop_shard(token) for token in stale]

    def waits(self, checkpoint: CheckpointId, change: int) -> None:
        """A rank begins (1) or ends (-1) to wait for memory: for `expire` it writes already."""
        self.waiting[checkpoint] += change
        self.waiting += Counter()  # forgets those that nobody waits for

    def opened(self, token: str, checkpoint: CheckpointId, rank: int, owner: str, now: float, *, metadata: bool) -> None:
        self.shards[token] = Shard(token, checkpoint, rank, owner, metadata, now)

    def opened_before(self, moment: float) -> list[str]:
        """Unsealed shards that were opened before: their writers should have them mapped by now."""
        return [shard.token for shard in self.shards.values() if shard.receipt is None and shard.opened_at < moment]

    def abandoned(self, token: str) -> list[Effect]:
        """Nobody writes the unsealed shard any more, whatever its lease says (a forked child can keep that alive)."""
        return [self._drop_shard(token)]

    def open_shard(self, token: str, owner: str) -> Shard:
        """The unsealed shard that `owner` writes; LeaseLost if it is not the owner's any more."""
        shard = self.shards.get(token)
        if shard is None or shard.receipt is not None or shard.owner != owner:
            raise errors.LeaseLost(
                "the daemon no longer holds the memory this save was written to "
                "(it was restarted, or the connection to it broke): save again"
            )
        return shard

    def sealed(self, token: str, receipt: Receipt, now: float) -> None:
        shard = self.shards[token]
        shard.receipt = receipt
        shard.sealed_at = now

    def released(self, token: str) -> None:
        self.shards.pop(token, None)

    def expire(self, now: float) -> list[Effect]:
        """Drops sealed shards that nobody bound for `open_timeout_seconds` after the last seal of their save.

        The timer stands still while a live lease still writes a shard of the same id.
        """
        effects: list[Effect] = []
        for checkpoint in {shard.id for shard in self.shards.values() if self.holder(shard.token) is None}:
            unbound = self.unbound(checkpoint)
            if self.waiting[checkpoint] or any(shard.receipt is None and self.leases[shard.owner] > 0 for shard in unbound):
                for shard in unbound:
                    shard.sealed_at = now
                continue
            sealed = [shard for shard in unbound if shard.receipt is not None]
            if sealed and max(shard.sealed_at for shard in sealed) + self.open_timeout_seconds <= now:
                effects += [self._drop_shard(shard.token) for shard in sealed]
        return effects

    def accept(self, record: Record, *, durable: bool = False, held: Iterable[str] | None = None, confirmed: bool = True) -> list[Effect]:
        """The record is written: the attempt exists, and once it is confirmed it supersedes older ones of its id.

        `held`: tokens of what is here of it, if not just what this node has to hold.
        """
        checkpoint = CheckpointId.parse(record.summary.id)
        attempt = Attempt(record, checkpoint, Checkpoint.DURABLE if durable else Checkpoint.ACCEPTED)
        attempt.own = own_tokens(record, self.node)
        attempt.confirmed = confirmed
        attempt.held = set(attempt.own if held is None else held)
        self.attempts[attempt.name] = attempt
        self.bound.update(dict.fromkeys(attempt.tokens, attempt.name))
        self.learn(checkpoint.run, attempt.name)
        for receipt in bound(record):
            if receipt.token in attempt.held and receipt.token not in self.shards:  # re-adopted after a restart
                metadata = receipt.token == record.metadata.token
                self.shards[receipt.token] = Shard(receipt.token, checkpoint, receipt.rank, "", metadata, 0.0, receipt)
        return self.confirm(attempt.name) if confirmed else []

    def confirm(self, name: str) -> list[Effect]:
        """All participants have accepted the attempt."""
        attempt = self.attempts[name]
        attempt.confirmed = True
        effects: list[Effect] = []
        for older in self._older(attempt):
            if older.pending or older.state in (Checkpoint.FAILED, Checkpoint.LOST):
                effects += self._end(older, Checkpoint.ABORTED, f"superseded by a newer save of {attempt.id}")
        return effects

    def copied(self, name: str, receipt: Receipt) -> None:
        """A copy of another node's shard has arrived."""
        attempt = self.attempts[name]
        attempt.held.add(receipt.token)
        self.shards[receipt.token] = Shard(receipt.token, attempt.id, receipt.rank, "", False, 0.0, receipt)

    def learn(self, run: str, attempt: str) -> None:
        """An attempt of the run exists somewhere: later ones must be newer."""
        if is_attempt(attempt):  # others may say anything, and a damaged name, too
            self.newest[run] = max(attempt, self.newest.get(run, ""))

    # -- becoming durable -------------------------------------------------------------------

    def on_their_way(self) -> list[Attempt]:
        """What is to become durable and is not yet."""
        return [a for a in self.attempts.values() if a.pending and a.record.durable and a.intact]

    def to_flush(self) -> list[Attempt]:
        """What still has to become durable, the oldest first."""
        # What others have yet to accept is looked at only if nobody can be asked whether they have.
        return sorted((a for a in self.on_their_way() if a.confirmed or a.doubtful), key=lambda attempt: attempt.name)

    def flushed(self, name: str, stored_bytes: int) -> list[Effect]:
        attempt = self.attempts[name]
        if attempt.state == Checkpoint.ABORTED:  # superseded while .metadata was on its way
            return []
        attempt.state = Checkpoint.DURABLE
        attempt.record.summary.stored_bytes = stored_bytes
        attempt.reason = ""
        self.troubles.pop(name, None)
        effects: list[Effect] = []
        for older in self._older(attempt):
            effects += self._end(older, Checkpoint.ABORTED, f"superseded by a newer save of {attempt.id}")
        return effects

    def failed(self, name: str, reason: str) -> None:
        """The attempt cannot become durable. Its bytes stay until their memory is needed."""
        attempt = self.attempts[name]
        if not attempt.ended:  # superseded, deleted or lost while it was tried: that stays the last word
            attempt.state, attempt.reason = Checkpoint.FAILED, reason
            self.trouble(name, f"checkpoint {attempt.id} could not be made durable: {reason}")

    def delayed(self, name: str, reason: str) -> None:
        """The attempt is not durable yet; it is tried again, unless it has ended."""
        if not (attempt := self.attempts[name]).ended:
            attempt.reason = reason
            self.trouble(name, f"checkpoint {attempt.id} is not durable yet, {reason}")

    def replicated(self, name: str, *, replicated: bool) -> None:
        """Whether enough other nodes hold copies of all its shards."""
        attempt = self.attempts[name]
        if attempt.pending:
            attempt.state = Checkpoint.REPLICATED if replicated else Checkpoint.ACCEPTED

    def lost(self, name: str, reason: str) -> list[Effect]:
        """A part of it is in no memory and not in the store. What is here stays until its memory is needed, or the part is back."""
        attempt = self.attempts[name]
        if not attempt.pending:
            return []
        attempt.state, attempt.reason = Checkpoint.LOST, reason
        if attempt.confirmed:  # else nobody was told that it was saved
            self.trouble(name, f"checkpoint {attempt.id} is lost: {reason}")
        return [StopFlush(name)]

    def found(self, name: str) -> None:
        """The part that had been lost is back, or what had failed is tried again."""
        attempt = self.attempts[name]
        if attempt.state in (Checkpoint.LOST, Checkpoint.FAILED) and attempt.intact:
            attempt.state, attempt.reason = Checkpoint.ACCEPTED, ""
            self.troubles.pop(name, None)

    @property
    def warning(self) -> str:
        """What the next save should hear: what failed and nothing has replaced, the latest first; empty if nothing."""
        return "; ".join([*reversed(self.troubles.values())][:MOST_TOLD])

    def aborted(self, name: str, reason: str) -> list[Effect]:
        attempt = self.attempts[name]
        return [] if attempt.state == Checkpoint.ABORTED else self._end(attempt, Checkpoint.ABORTED, reason)

    def deleted(self, checkpoint: CheckpointId, *, durable_only: bool, but: Collection[str] = ()) -> list[Effect]:
        """The checkpoint was deleted: its copies in memory go, `but` these. `durable_only`: nor those that are still on their way."""
        effects: list[Effect] = []
        for attempt in [a for a in self.attempts.values() if a.id == checkpoint and a.state != Checkpoint.ABORTED and a.name not in but]:
            if attempt.state == Checkpoint.DURABLE or not durable_only:
                attempt.was_durable = attempt.state == Checkpoint.DURABLE
                effects += self._end(attempt, Checkpoint.ABORTED, "it was deleted")
        return effects

    # -- memory -----------------------------------------------------------------------------

    def pin(self, name: str) -> None:
        """Somebody reads the attempt: its segments stay."""
        self.pins[name] += 1

    def unpin(self, name: str) -> list[Effect]:
        self.pins[name] -= 1
        if self.pins[name] > 0:
            return []
        del self.pins[name]
        if (attempt := self.attempts.get(name)) is None:
            return []
        gone = attempt.state == Checkpoint.ABORTED or (attempt.state == Checkpoint.LOST and not attempt.intact)
        return self._let_go(attempt) if gone else []

    def victims(self) -> Iterator[tuple[str, bool]]:
        """Tokens in the order in which they may be lost; see `attempt.victims`."""
        return victims(self.attempts.values(), self.pins.keys())

    def vanished(self, token: str) -> list[Effect]:
        """The segment's file is gone, and nobody here removed it."""
        attempt = self.holder(token)
        if attempt is None or token not in attempt.held:
            return []
        effects: list[Effect] = []
        if token in attempt.own and (attempt.pending or attempt.state == Checkpoint.FAILED):
            effects = self._end(attempt, Checkpoint.LOST, "its memory was removed from the shm-dir")
        return [*effects, *self.evicted(token)]

    def evicted(self, token: str) -> list[Effect]:
        """The arena has taken the segment's memory."""
        self.shards.pop(token, None)
        attempt = self.holder(token)
        if attempt is None or token not in attempt.held:
            return []
        attempt.held.discard(token)
        if token not in attempt.own:  # a copy for another node
            return []
        effects: list[Effect] = [Forget(attempt.name)]
        if attempt.pending and attempt.doubtful:
            effects += self._end(
                attempt, Checkpoint.LOST, f"a part of it could not be reached, and its memory was needed: {attempt.reason}"
            )
        elif attempt.pending:
            effects += self._end(attempt, Checkpoint.ABORTED, "its memory was needed after a newer checkpoint had become safe")
        elif attempt.state == Checkpoint.LOST and not self.pins[attempt.name]:
            effects += self._let_go(attempt)  # whatever comes back, it cannot be whole any more
        elif attempt.state == Checkpoint.DURABLE and not attempt.held:
            self._remove(attempt.name)
        return effects

    # -- questions --------------------------------------------------------------------------

    def holder(self, token: str) -> Attempt | None:
        """The attempt that binds the shard."""
        return self.attempts.get(self.bound.get(token, ""))

    def newest_of(self, checkpoint: CheckpointId, *, restorable: bool = True) -> Attempt | None:
        candidates = [a for a in self.attempts.values() if a.id == checkpoint and a.confirmed and (a.restorable or not restorable)]
        return max(candidates, key=lambda attempt: attempt.name, default=None)

    # -- inside -----------------------------------------------------------------------------

    def unbound(self, checkpoint: CheckpointId) -> list[Shard]:
        """Shards of a save of that id that has not been committed."""
        return [s for s in self.shards.values() if s.id == checkpoint and self.holder(s.token) is None]

    def _remove(self, name: str) -> None:
        for token in self.attempts.pop(name).tokens:
            self.bound.pop(token, None)

    def _older(self, attempt: Attempt) -> Iterable[Attempt]:
        return [a for a in self.attempts.values() if a.id == attempt.id and a.name < attempt.name]

    def _drop_shard(self, token: str) -> Effect:
        self.shards.pop(token, None)
        return Drop(token)

    def _end(self, attempt: Attempt, state: Checkpoint.State, reason: str) -> list[Effect]:
        flushing = attempt.pending
        if state == Checkpoint.ABORTED:
            self.troubles.pop(attempt.name, None)
        attempt.state = state
        attempt.reason = reason
        effects: list[Effect] = [Forget(attempt.name)]
        if flushing:
            effects.append(StopFlush(attempt.name))
        if not self.pins[attempt.name]:
            effects += self._let_go(attempt)
        ended = [a.name for a in self.attempts.values() if a.ended and not a.held and not self.pins[a.name]]
        for name in sorted(ended)[:-REMEMBERED]:
            self._remove(name)
        return effects

    def trouble(self, name: str, text: str) -> None:
        """Something went wrong in the background: the next save hears of it."""
        self.troubles.pop(name, None)
        self.troubles[name] = text
        for oldest in list(self.troubles)[:-REMEMBERED]:
            del self.troubles[oldest]

    def _let_go(self, attempt: Attempt) -> list[Effect]:
        effects = [self._drop_shard(token) for token in sorted(attempt.held)]
        attempt.held.clear()
        return effects
