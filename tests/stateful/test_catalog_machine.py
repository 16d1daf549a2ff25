"""The catalogue against a model of what was promised, with a kill between any two steps on disk.

The machine does what `ckptd/node.py` does with the catalogue: the record is written first, then the attempt is accepted, then
the effects are carried out in their order. Beside it stands what a disk would hold (segments, commit records, the store's newest attempt of
each id) and what a client was told. A kill throws away everything but the disk, and what comes back is what `recovery` finds there.

Invariants, after every step: *promises kept* (what was accepted is in the store, or whole in memory with its record, unless
something that may end it has happened); *accounts balance* (every segment is known to the catalogue and every
shard has its segment; nothing is open without a lease; a record is there exactly for what it speaks of);
of an id only the newest attempt is on its way; no segment belongs to two attempts; no effect drops what is
read, flushed, or promised and not superseded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from ckptd import binding, errors
from ckptd.arena import Arena
from ckptd.attempt import Attempt, Drop, Effect, Forget, Shard, StopFlush, bound
from ckptd.catalog import Catalog
from ckptd.model import CheckpointId
from ckptd.recovery import left_behind
from ckptd.v1.daemon_pb2 import Checkpoint, CommitRequest
from ckptd.v1.manifest_pb2 import Receipt, Record

NODE = "node"
TIMEOUT = 60.0
IDS = [CheckpointId.parse(text) for text in ("a/step-1", "a/step-2", "b/step-1")]
#: What a rule draws: mostly the same one, so that things happen to it while others do.
AN_ID = st.sampled_from([IDS[0], IDS[0], IDS[0], *IDS[1:]])
OWNERS = ["ann", "ben"]
ACCEPTED, DURABLE, FAILED = Checkpoint.ACCEPTED, Checkpoint.DURABLE, Checkpoint.FAILED


class Killed(Exception):
    """The daemon dies here."""


class Disk:
    """What outlives the daemon: segments (sealed or not), records, and the store's attempt of each id."""

    def __init__(self) -> None:
        self.segments: dict[str, bool] = {}
        self.records_: dict[str, tuple[str, bytes]] = {}
        self.store: dict[CheckpointId, str] = {}
        #: Steps until the daemon is killed; None: it is not.
        self.steps_left: int | None = None

    def step(self) -> None:
        """Something on disk is about to change."""
        if self.steps_left is not None:
            if self.steps_left == 0:
                self.steps_left = None
                raise Killed
            self.steps_left -= 1

    # What `recovery.left_behind` asks of the arena.

    def records(self) -> list[tuple[str, str, bytes]]:
        return [(attempt, state, data) for attempt, (state, data) in sorted(self.records_.items())]

    def adopt(self, keep: Mapping[str, int]) -> set[str]:
        for token in [token for token, sealed in self.segments.items() if not sealed or token not in keep]:
            self.drop(token)
        return set(self.segments)

    def drop(self, token: str) -> None:
        if token in self.segments:
            self.step()
            del self.segments[token]

    def drop_record(self, attempt: str) -> None:
        if attempt in self.records_:
            self.step()
            del self.records_[attempt]

    def put_record(self, attempt: str, state: str, data: bytes) -> None:
        self.step()
        self.records_[attempt] = (state, data)


class CatalogMachine(RuleBasedStateMachine):
    """Rules are what trainers, the store and the world do to one daemon."""

    kind: ClassVar[type[Catalog]] = Catalog

    @initialize()
    def start(self) -> None:
        self.disk = Disk()
        self.serial = 0
        self.now = 0.0
        self.now_us = 1_000_000
        #: What clients were told is accepted, and why it may be gone.
        self.told: dict[str, Record] = {}
        self.excused: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        """A daemon on the disk as it is."""
        self.catalog = self.kind(NODE, open_timeout_seconds=TIMEOUT, codec="none")
        self.flushing: dict[str, bool] = {}
        self.readers: Counter[str] = Counter()
        for left in left_behind(cast("Arena", self.disk), NODE):
            record = left.record
            self.told.setdefault(record.summary.attempt, record)  # its client may never have heard of it
            self._excuse_older(record, because_of="accepted")
            self._apply(self.catalog.accept(record, durable=left.durable))
            for token in left.gone:
                self._apply(self.catalog.evicted(token))

    def _attempt(self, call: Callable[[], object]) -> bool:
        """Carries out a rule; if the daemon is killed in the middle of it, another one starts. Whether it survived."""
        try:
            call()
        except Killed:
            self._begin()
            return False
        return True

    # -- what the node does ----------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Drop(token):
                    self._check_drop(token)
                    self.disk.drop(token)
                case Forget(attempt):
                    assert attempt not in self.told or attempt in self.excused or self._in_store(attempt), f"forgets {attempt}"
                    self.disk.drop_record(attempt)
                case StopFlush(attempt):
                    if attempt in self.flushing:
                        self.flushing[attempt] = True

    def _open(self, id: CheckpointId, rank: int, owner: str, *, metadata: bool) -> str:
        self.serial += 1
        token = f"{self.serial:016x}"
        self.disk.step()
        self.disk.segments[token] = False
        self.catalog.opened(token, id, rank, owner, self.now, metadata=metadata)
        return token

    def _allocate(self, id: CheckpointId, rank: int, owner: str, *, metadata: bool = False) -> str:
        if not metadata:
            stale = {
                shard.token
                for shard in self._unbound(id)
                if shard.receipt is not None and shard.rank == rank and (shard.owner == owner or not self.catalog.leases[shard.owner])
            }
            effects = self.catalog.restarted(id, rank, owner)
            assert {effect.token for effect in effects if isinstance(effect, Drop)} == stale
            self._apply(effects)
        return self._open(id, rank, owner, metadata=metadata)

    def _seal(self, token: str) -> Receipt:
        shard = self.catalog.shards[token]
        self.catalog.open_shard(token, shard.owner)
        self.disk.step()
        self.disk.segments[token] = True
        receipt = Receipt(node=NODE, token=token, rank=shard.rank, nbytes=10, sealed_us=self.now_us)
        self.catalog.sealed(token, receipt, self.now)
        return receipt

    def _commit(self, id: CheckpointId, shards: list[Receipt], metadata: Receipt, *, durable: bool) -> None:
        self.now_us += 10
        for other, attempt in self.disk.store.items():  # which a daemon asks before its first commit
            self.catalog.learn(other.run, attempt)
        request = CommitRequest(id=str(id), shards=shards, metadata=metadata, durable=durable)
        binding.check(self.catalog, request)
        binding.others(self.catalog, request, "")
        record = binding.record_of(self.catalog, request, self.now_us)
        name = record.summary.attempt
        there = [*self.catalog.attempts, *self.disk.store.values()]
        assert all(name > other for other in there if self.told[other].summary.id.split("/")[0] == id.run)
        self.disk.put_record(name, "accepted", record.SerializeToString())
        self._excuse_older(record, because_of="accepted")
        effects = self.catalog.accept(record)
        self.told[name] = record
        self._apply(effects)

    def _lost_lease(self, owner: str) -> None:
        unsealed = {shard.token for shard in self.catalog.shards.values() if shard.owner == owner and shard.receipt is None}
        effects = self.catalog.lease_ended(owner)
        dropped = {effect.token for effect in effects if isinstance(effect, Drop)}
        assert dropped == (set() if self.catalog.leases[owner] else unsealed)
        self._apply(effects)

    # -- rules: trainers -------------------------------------------------------------------------

    @precondition(lambda self: sum(self.catalog.leases.values()) < 3)
    @rule(owner=st.sampled_from(OWNERS))
    def lease(self, owner: str) -> None:
        self.catalog.lease(owner)

    @precondition(lambda self: self.catalog.leases)
    @rule(owner=st.sampled_from(OWNERS))
    def lease_ends(self, owner: str) -> None:
        if self.catalog.leases[owner]:
            self._attempt(lambda: self._lost_lease(owner))

    @precondition(lambda self: self.catalog.leases)
    @rule(id=AN_ID, rank=st.integers(0, 1), owner=st.sampled_from(OWNERS), metadata=st.booleans())
    def allocate(self, id: CheckpointId, rank: int, owner: str, metadata: bool) -> None:
        if self.catalog.leases[owner]:
            self._attempt(lambda: self._allocate(id, rank, owner, metadata=metadata))

    @precondition(lambda self: self._unsealed())
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(self._unsealed()))
        self._attempt(lambda: self._seal(token))

    @precondition(lambda self: self._unsealed())
    @rule(data=st.data(), abandoned=st.booleans())
    def release(self, data: st.DataObject, abandoned: bool) -> None:
        token = data.draw(st.sampled_from(self._unsealed()))

        def call() -> None:
            if abandoned:
                self._apply(self.catalog.abandoned(token))
            else:
                self.catalog.released(token)
                self.disk.drop(token)

        self._attempt(call)

    @rule(id=AN_ID, world=st.integers(1, 2), owner=st.sampled_from(OWNERS), durable=st.sampled_from([True, True, False]))
    def save(self, id: CheckpointId, world: int, owner: str, durable: bool) -> None:
        if not self.catalog.leases[owner]:
            self.catalog.lease(owner)

        def call() -> None:
            shards = [self._seal(self._allocate(id, rank, owner)) for rank in range(world)]
            metadata = self._seal(self._allocate(id, 0, owner, metadata=True))
            on_its_way = any(a.id == id and a.state == ACCEPTED and a.record.durable for a in self.catalog.attempts.values())
            try:
                self._commit(id, shards, metadata, durable=durable)
            except errors.WrongPhase:
                assert on_its_way
                assert not durable
            else:
                assert durable or not on_its_way

        self._attempt(call)

    @precondition(lambda self: self.flushing)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def save_what_is_being_flushed(self, data: st.DataObject, owner: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.flushing)))
        self.save(self.catalog.attempts[name].id, 1, owner, durable=True)

    @precondition(lambda self: self.told or any(shard.receipt for shard in self.catalog.shards.values()))
    @rule(data=st.data(), id=AN_ID, durable=st.booleans())
    def commit_whatever(self, data: st.DataObject, id: CheckpointId, durable: bool) -> None:
        """Any receipts that ever were: what the daemon does not hold, or holds for another id, is refused."""
        known = [shard.receipt for shard in self.catalog.shards.values() if shard.receipt is not None]
        old = [receipt for record in self.told.values() for receipt in bound(record)]
        receipts = known + old
        shards = data.draw(st.lists(st.sampled_from(receipts), max_size=2))
        metadata = data.draw(st.sampled_from(receipts))
        tokens = [receipt.token for receipt in (*shards, metadata)]
        free = all(token in self.catalog.shards and self.catalog.holder(token) is None for token in tokens)

        def call() -> None:
            try:
                self._commit(id, shards, metadata, durable=durable)
            except errors.CkptdError:
                pass
            else:
                assert free
                assert len(set(tokens)) == len(tokens) > 1
                assert {self.catalog.shards[token].id for token in tokens} == {id}

        self._attempt(call)

    # -- rules: time and the store ---------------------------------------------------------------

    @precondition(lambda self: self.catalog.shards)
    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        stale = set()
        for id in IDS:
            unbound = self._unbound(id)
            if not any(shard.receipt is None and self.catalog.leases[shard.owner] for shard in unbound):
                sealed = [shard for shard in unbound if shard.receipt is not None]
                if sealed and max(shard.sealed_at for shard in sealed) + TIMEOUT <= self.now:
                    stale |= {shard.token for shard in sealed}

        def call() -> None:
            effects = self.catalog.expire(self.now)
            assert {effect.token for effect in effects if isinstance(effect, Drop)} == stale
            self._apply(effects)

        self._attempt(call)

    def _to_flush(self) -> list[str]:
        return [attempt.name for attempt in self.catalog.to_flush() if attempt.name not in self.flushing]

    @rule(back=st.integers(1, 1000))
    def clock_goes_back(self, back: int) -> None:
        self.now_us -= back

    @precondition(lambda self: self._to_flush())
    @rule(data=st.data())
    def flush_begins(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._to_flush()))
        assert all(self.disk.segments[token] for token in self.catalog.attempts[name].tokens)
        self.catalog.pin(name)
        self.flushing[name] = False

    @precondition(lambda self: self.flushing or self._to_flush())
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "passes", "never"]))
    def flush_ends(self, data: st.DataObject, outcome: str) -> None:
        if not self.flushing:
            self.flush_begins(data)
        name = data.draw(st.sampled_from(sorted(self.flushing)))
        stopped = self.flushing[name] and data.draw(st.booleans())
        attempt = self.catalog.attempts[name]

        def call() -> None:
            if stopped:
                pass
            elif outcome == "passes":
                self.catalog.delayed(name, "the store is away")
            elif outcome == "never":
                if attempt.state == ACCEPTED:
                    self.excused[name] = "failed"
                self.catalog.failed(name, "denied")
            elif self.disk.store.get(attempt.id, "") > name:
                self._apply(self.catalog.aborted(name, "superseded"))
            else:
                self.disk.step()
                self.disk.store[attempt.id] = name
                if attempt.state == ACCEPTED:
                    self._excuse_older(attempt.record, because_of="durable")
                effects = self.catalog.flushed(name, 9)
                if attempt.state == DURABLE:
                    self.disk.put_record(name, "durable", attempt.record.SerializeToString())
                self._apply(effects)
            del self.flushing[name]
            self._apply(self.catalog.unpin(name))

        self._attempt(call)

    # -- rules: memory ---------------------------------------------------------------------------

    def _readable(self) -> list[str]:
        return [a.name for a in self.catalog.attempts.values() if a.held and a.state not in (Checkpoint.ABORTED, Checkpoint.LOST)]

    @precondition(lambda self: self._readable())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self._readable()))
        self.catalog.pin(name)
        self.readers[name] += 1

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        self.readers[name] -= 1
        self.readers += Counter()
        self._attempt(lambda: self._apply(self.catalog.unpin(name)))

    @precondition(lambda self: list(self.catalog.victims()))
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """Memory is needed: the first few victims go."""
        offered = list(self.catalog.victims())
        assert offered == sorted(offered, key=lambda victim: victim[1]), "what is precious goes last"
        for token, precious in offered[:count]:
            attempt = self.catalog.holder(token)
            if attempt is None or token not in attempt.held:
                continue  # went with another one

            def call(token: str = token, attempt: Attempt = attempt, precious: bool = precious) -> None:
                self._check_victim(attempt)
                assert precious or not (attempt.pending and attempt.record.durable), f"{attempt.name} may go although there is room"
                self.excused.setdefault(attempt.name, "evicted")
                self.disk.drop(token)
                self._apply(self.catalog.evicted(token))

            if not self._attempt(call):
                return

    @precondition(lambda self: any(attempt.held for attempt in self.catalog.attempts.values()))
    @rule(data=st.data(), spared=st.integers(0, 2))
    def vanish(self, data: st.DataObject, spared: int) -> None:
        """Somebody else removes a segment, and a reader finds out."""
        if spared:
            return
        token = data.draw(st.sampled_from(sorted(token for attempt in self.catalog.attempts.values() for token in attempt.held)))
        attempt = self.catalog.holder(token)
        assert attempt is not None
        self.excused[attempt.name] = "removed"
        del self.disk.segments[token]
        self._attempt(lambda: self._apply(self.catalog.vanished(token)))

    @precondition(lambda self: self.told)
    @rule(id=AN_ID, durable_only=st.booleans())
    def delete(self, id: CheckpointId, durable_only: bool) -> None:
        """As `ckptd delete` or retention does: `.metadata` goes first."""
        busy = any(self.catalog.attempts[name].id == id for name in self.flushing)
        if busy or not (id in self.disk.store or not durable_only):
            return
        for attempt in self.catalog.attempts.values():
            if attempt.id == id and (attempt.state == DURABLE or not durable_only):
                self.excused[attempt.name] = "deleted"
        if (stored := self.disk.store.get(id)) is not None:
            self.excused[stored] = "deleted"
        for name, record in self.told.items():
            if stored is not None and record.summary.id == str(id) and name <= stored:
                self.excused[name] = "deleted"

        def call() -> None:
            if id in self.disk.store:
                self.disk.step()
                del self.disk.store[id]
            self._apply(self.catalog.deleted(id, durable_only=durable_only))

        self._attempt(call)

    @precondition(lambda self: self.disk.segments and self.disk.steps_left is None)
    @rule(steps=st.one_of(st.none(), st.integers(0, 12)))
    def kill(self, steps: int | None) -> None:
        """The daemon dies: now, or when so many things on disk have changed."""
        if steps is None:
            self._attempt(self._begin)
        else:
            self.disk.steps_left = steps

    # -- the model -------------------------------------------------------------------------------

    def _unsealed(self) -> list[str]:
        return sorted(token for token, sealed in self.disk.segments.items() if not sealed)

    def _unbound(self, id: CheckpointId) -> list[Shard]:
        owned = {token for record in self.told.values() for token in (receipt.token for receipt in bound(record))}
        return [shard for shard in self.catalog.shards.values() if shard.id == id and shard.token not in owned]

    def _excuse_older(self, record: Record, *, because_of: str) -> None:
        """A newer attempt ends older ones of its id: on their way, as soon as it is accepted; durable ones, once it is durable."""
        for name, older in self.told.items():
            if older.summary.id == record.summary.id and name < record.summary.attempt:
                safe = self._in_store(name)
                if because_of == "durable" or not safe:
                    self.excused.setdefault(name, "superseded")

    def _in_store(self, name: str) -> bool:
        """Whether the store has this attempt of its id, or a newer one."""
        return self.disk.store.get(CheckpointId.parse(self.told[name].summary.id), "") >= name

    def _in_memory(self, name: str) -> bool:
        return name in self.disk.records_ and all(self.disk.segments.get(receipt.token) for receipt in bound(self.told[name]))

    def _busy(self, name: str) -> bool:
        return self.readers[name] > 0 or name in self.flushing

    def _check_drop(self, token: str) -> None:
        for name, record in self.told.items():
            if token in (receipt.token for receipt in bound(record)):
                assert not self._busy(name), f"drops a segment of {name}, which somebody needs"
                assert name in self.excused or self._in_store(name), f"drops a segment of {name}, which nothing has superseded"

    def _check_victim(self, attempt: Attempt) -> None:
        """What may be lost: ended, durable, or outrun."""
        assert not self._busy(attempt.name)
        if attempt.state == ACCEPTED:
            newer = [
                name for name, record in self.told.items() if name > attempt.name and record.summary.id.split("/")[0] == attempt.id.run
            ]
            safe = [name for name in newer if self._in_store(name)]
            assert safe or (newer and not attempt.record.durable), f"{attempt.name} is not durable, and nothing newer is"

    # -- invariants ------------------------------------------------------------------------------

    @invariant()
    def promises_are_kept(self) -> None:
        for name in self.told:
            if name not in self.excused:
                assert self._in_memory(name) or self._in_store(name), f"{name} was accepted and is gone"
                found = self.catalog.attempts.get(name)
                if not self._in_store(name):
                    assert found is not None
                    assert found.restorable

    @invariant()
    def accounts_balance(self) -> None:
        assert self.disk.segments.keys() == self.catalog.shards.keys()
        for shard in self.catalog.shards.values():
            assert self.disk.segments[shard.token] == (shard.receipt is not None)
            if shard.receipt is None:
                assert self.catalog.leases[shard.owner] > 0, "open, and no lease is left"
        for name, (state, _) in self.disk.records_.items():
            assert self.catalog.attempts[name].state in ((DURABLE,) if state == "durable" else (ACCEPTED, FAILED))
        for attempt in self.catalog.attempts.values():
            if attempt.whole and attempt.state in (ACCEPTED, FAILED, DURABLE):
                assert attempt.name in self.disk.records_
            assert attempt.held <= self.disk.segments.keys()
            assert not (attempt.held and attempt.state in (Checkpoint.ABORTED, Checkpoint.LOST)) or self._busy(attempt.name)

    @invariant()
    def only_the_newest_of_an_id_is_on_its_way(self) -> None:
        for id in IDS:
            attempts = sorted((a for a in self.catalog.attempts.values() if a.id == id), key=lambda attempt: attempt.name)
            assert [a.name for a in attempts if a.state in (ACCEPTED, FAILED)] in ([], [attempts[-1].name] if attempts else [])
            newest = self.catalog.newest_of(id)
            assert newest == next((a for a in reversed(attempts) if a.restorable), None)

    @invariant()
    def the_next_save_is_told_of_what_is_still_true(self) -> None:
        for name in self.catalog.troubles:
            assert self.catalog.attempts[name].state in (ACCEPTED, FAILED, Checkpoint.LOST)

    @invariant()
    def no_segment_belongs_to_two(self) -> None:
        holders = Counter(token for attempt in self.catalog.attempts.values() for token in attempt.tokens)
        assert set(holders.values()) <= {1}
        assert self.catalog.bound == {token: a.name for a in self.catalog.attempts.values() for token in a.tokens}


def run(machine: type[CatalogMachine], *, examples: int, shrink: bool = True) -> None:
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chosen = settings(max_examples=examples, stateful_step_count=40, deadline=None, database=None, phases=phases, print_blob=False)
    run_state_machine_as_test(machine, settings=settings(chosen, suppress_health_check=list(HealthCheck)))


def test_whatever_happens_to_a_daemon_the_catalogue_keeps_its_promises() -> None:
    run(CatalogMachine, examples=200)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_happens_to_a_daemon_the_catalogue_keeps_its_promises_for_long() -> None:
    run(CatalogMachine, examples=1500)


# -- the machine itself: would it see it? --------------------------------------------------------


class DropsWhatIsRead(Catalog):
    def unpin(self, name: str) -> list[Effect]:
        super().unpin(name)
        attempt = self.attempts.get(name)
        return self._let_go(attempt) if attempt is not None else []

    def _end(self, attempt: Attempt, state: Checkpoint.State, reason: str) -> list[Effect]:
        return [*super()._end(attempt, state, reason), *self._let_go(attempt)]


class SupersedesNothing(Catalog):
    def _older(self, attempt: Attempt) -> Iterable[Attempt]:
        return []


class BindsTwice(Catalog):
    def holder(self, token: str) -> Attempt | None:
        return None


class OffersWhatIsNotDurable(Catalog):
    def victims(self) -> Iterator[tuple[str, bool]]:
        yield from ((token, False) for attempt in self.attempts.values() for token in sorted(attempt.held))


class ForgetsTooMuch(Catalog):
    def accept(self, record: Record, *, durable: bool = False) -> list[Effect]:
        effects = super().accept(record, durable=durable)
        return [*effects, *(Forget(attempt.name) for attempt in self.attempts.values() if attempt.id.run == record.summary.id[0])]


class ForgetsNothing(Catalog):
    def _end(self, attempt: Attempt, state: Checkpoint.State, reason: str) -> list[Effect]:
        return [effect for effect in super()._end(attempt, state, reason) if not isinstance(effect, Forget)]


class LosesSealedShardsWithTheLease(Catalog):
    def lease_ended(self, owner: str) -> list[Effect]:
        effects = super().lease_ended(owner)
        gone = [shard.token for shard in self.shards.values() if shard.owner == owner and not self.leases[owner]]
        return [*effects, *(self._drop_shard(token) for token in gone)]


class KeepsOpenShardsWithoutALease(Catalog):
    def lease_ended(self, owner: str) -> list[Effect]:
        self.leases[owner] -= 1
        self.leases += Counter()
        return []


class ExpiresWhatIsBound(Catalog):
    def unbound(self, checkpoint: CheckpointId) -> list[Shard]:
        return [shard for shard in self.shards.values() if shard.id == checkpoint]


class IgnoresThatARankStillWrites(Catalog):
    def expire(self, now: float) -> list[Effect]:
        kept = {token: shard for token, shard in self.shards.items() if shard.receipt is None}
        self.shards = {token: shard for token, shard in self.shards.items() if shard.receipt is not None}
        effects = super().expire(now)
        self.shards.update(kept)
        return effects


class TrustsTheClock(Catalog):
    def learn(self, run: str, attempt: str) -> None:
        pass


class FailsWhatHasEnded(Catalog):
    def failed(self, name: str, reason: str) -> None:
        self.attempts[name].state = FAILED


class KeepsTheRecordOfWhatWasEvicted(Catalog):
    def evicted(self, token: str) -> list[Effect]:
        return [effect for effect in super().evicted(token) if not isinstance(effect, Forget)]


class LeaksWhatSupersededAttemptsHeld(Catalog):
    def flushed(self, name: str, stored_bytes: int) -> list[Effect]:
        return [effect for effect in super().flushed(name, stored_bytes) if not isinstance(effect, Drop)]


SEEDED = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Catalog) and kind is not Catalog]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEEDED)
def test_the_machine_sees_a_seeded_bug(kind: type[Catalog]) -> None:
    machine = cast("type[CatalogMachine]", type("Seeded", (CatalogMachine,), {"kind": kind}))
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever it finds, and however many
        run(machine, examples=6000, shrink=False)
