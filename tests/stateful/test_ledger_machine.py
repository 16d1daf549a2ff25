"""Saves, deletions and sweeps of several processes on one store, any of which may end at any call, against a model.

The store is a real directory; its clock is the model's, fine or coarse, and so are the clocks of the processes, which may be
wrong. After every step: what is durable is whole and is what the model says, nothing that was deleted is back, foreign files
are as they were. In the end, once time has passed, no debris is left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from ckptd import codec, debris, sweeper, tombstone
from ckptd import ledger as ledger_room
from ckptd.directory import stock_files
from ckptd.errors import CkptdError, NotFound, Unavailable, WrongPhase
from ckptd.ledger import Ledger, WasDeleted
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, data_key, mint_attempt
from ckptd.scan import Entry
from ckptd.store import Source, is_temporary
from ckptd.sweeper import Sweeper
from ckptd.v1.manifest_pb2 import Manifest
from saved import EFFECTS, PICKLE, Stop, Watched, contents, save_stock, stopping, upload

IDS = ["r/x", "r/y", "r", "s/x"]
HOUR, DAY = 3600.0, 86400.0
PAYLOAD = b"payload"


#: What is interleaved. Not stock DCP beside a sweep: it asks nobody, and what it writes between the last look and the deletion is
#: lost.
TOGETHER = [
    *[["commit", "sweep"]] * 4,
    *[["commit", "delete"], ["commit", "delete", "sweep"], ["commit", "delete", "delete", "sweep"]] * 2,
    *[["commit", "commit"], ["commit", "commit"], ["commit", "commit", "sweep"], ["commit", "commit", "delete"]],
    *[["delete", "delete", "sweep"], ["commit", "sweep", "sweep"], ["delete", "stock"], ["commit", "stock"]],
    *[["commit", "refuse"], ["commit", "refuse", "sweep"], ["commit", "refuse", "commit"]] * 2,
]


class Clock:
    """The store's time, and how far the clock of the process that runs is ahead of it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.skew = 0.0


class ClockedStore(LocalStore):
    """A directory whose files have the model's times, in steps of `grain` seconds."""

    def __init__(self, root: Path, clock: Clock, grain: float) -> None:
        super().__init__(root)
        self.root = root
        self.clock = clock
        self.grain = grain

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        nbytes = super().put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)
        self.clock.now += 0.01
        self.stamp(self.root / key)
        return nbytes

    def stamp(self, path: Path) -> None:
        then = self.clock.now // self.grain * self.grain
        os.utime(path, (then, then))


@dataclass
class Process:
    """What a process remembers between two operations."""

    ended: set[str] = field(default_factory=set)
    skew: float = 0.0


#: What is there under an id: the name of our manifest, or the bytes of a stock `.metadata`.
Identity = str | bytes


@dataclass
class Operation:
    """Something that a process does; `work` gets a ledger over a store that may stop it."""

    kind: str
    id: str
    work: Callable[[Watched, Ledger], None]
    target: Identity | None = None
    """A deletion's: what it means to delete. A commit's: its attempt."""
    pinned: bool = False
    """A deletion's: whether it knows that its target is pinned."""


class Actor(threading.Thread):
    """Runs an operation, one call of the store at a time, whenever it is told to go on."""

    def __init__(self, machine: LedgerMachine, operation: Operation, process: Process) -> None:
        super().__init__(daemon=True)
        self.operation = operation
        self.outcome: str | None = None
        self.machine = machine
        self.process = process
        self.turn = threading.Semaphore(0)
        self.paused = threading.Semaphore(0)
        self.killed = False
        self.next = self.next_key = ""
        self.did_effect = False
        self.start()
        self.paused.acquire()

    def run(self) -> None:
        try:
            self.outcome = self.machine.perform(self.operation, self.process, Watched(self.machine.store, before=self.wait))
        except BaseException as exc:  # noqa: BLE001 - told by the thread that waits
            self.outcome = f"{type(exc).__name__}: {exc}"
        finally:
            self.paused.release()

    @property
    def must_not_wait(self) -> bool:
        """It has looked at the time and now takes `.metadata` away, or puts it: a request that is held back is what no look can see."""
        return self.outcome is None and self.next in EFFECTS and self.next_key.rpartition("/")[2] in (".metadata", "pin")

    def wait(self, call: str, key: str) -> None:
        self.next, self.next_key = call, key
        self.paused.release()
        self.turn.acquire()
        if self.killed:
            raise Stop

    def step(self) -> None:
        """To its next call of the store, or to its end."""
        self.machine.clock.skew = self.process.skew
        self.did_effect = self.next in EFFECTS
        self.turn.release()
        self.paused.acquire()

    def end(self) -> None:
        """Ends it where it is."""
        self.killed = True
        while self.outcome is None:
            self.step()
        self.join()


class LedgerMachine(RuleBasedStateMachine):
    @initialize(grain=st.sampled_from([0.001, 1.0]), skew=st.sampled_from([0.0, 0.0, 2 * HOUR, -2 * HOUR, 2 * DAY]))
    def begin(self, grain: float, skew: float) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
        self.clock = NOW.clock = Clock()
        self.store = ClockedStore(self.root / "store", self.clock, grain)
        self.store.probe()
        self.processes = [Process(), Process(skew=skew), Process(), Process()]
        self.live: dict[str, Identity] = {}
        self.pins: set[str] = set()
        self.foreign: dict[str, bytes] = {}
        self.pending: list[Manifest] = []
        self.seen: list[Entry] = []
        self.attempts = 0

    def teardown(self) -> None:
        if not hasattr(self, "root"):
            return
        try:
            self.nothing_is_left()
        finally:
            shutil.rmtree(self.root)

    # -- doing ------------------------------------------------------------------------------------

    def perform(self, operation: Operation, process: Process, store: Watched) -> str:
        """Returns how it ended: "done", "stopped", or the kind of the error."""
        ledger = Ledger(store)
        ledger.ended_deletions = process.ended
        self.clock.skew = process.skew
        try:
            operation.work(store, ledger)
        except Stop:
            process.ended = set()
            return "stopped"
        except CkptdError as exc:
            return type(exc).__name__
        return "done"

    def do(self, operation: Operation, process: int = 0) -> str:
        """Undisturbed."""
        return self.perform(operation, self.processes[process], Watched(self.store))

    def observe(self, id: str) -> Identity | None:
        try:
            entry = Ledger(self.store).find(CheckpointId.parse(id))
        except NotFound:
            return None
        assert not entry.damaged
        return entry.save_id if entry.save_id is not None else self.store.get(entry.metadata.key)

    def learn(self, id: str) -> None:
        """The model takes over what is there."""
        now = self.observe(id)
        self.live.pop(id, None)
        self.pins.discard(id)
        if now is not None:
            self.live[id] = now
            if Ledger(self.store).find(CheckpointId.parse(id)).pinned:
                self.pins.add(id)

    def commit_of(self, found: Manifest) -> Operation:
        """Until it is durable or superseded: files that a sweep took are put again, and time passes between the tries."""
        id = CheckpointId.parse(found.summary.id)

        def work(store: Watched, ledger: Ledger) -> None:
            trial = Manifest()
            trial.CopyFrom(found)
            for _ in range(20):  # a sweep looks at most three times, and each look can cost a commit two tries; two sweeps may run
                try:
                    ledger.commit(id, trial, PICKLE)
                except NotFound:
                    trial.CopyFrom(contents(str(id), found.summary.attempt, len(found.shards), PAYLOAD))
                    upload(store, trial, PAYLOAD)
                except Unavailable:
                    self.clock.now += 11
                except WasDeleted as exc:
                    while exc.entry is not None:  # until it has been taken away, by this one or another
                        try:
                            Sweeper(store, ledger).delete(exc.entry)
                        except Unavailable:
                            continue
                        except WrongPhase:
                            break
                        break
                    raise
                else:
                    return
            raise AssertionError(f"the commit of {found.summary.attempt} never ends")

        return Operation("commit", str(id), work, found.summary.attempt)

    def deletion_of(self, entry: Entry) -> Operation:
        target = entry.save_id if entry.save_id is not None else self.store.get(entry.metadata.key)
        return Operation("delete", str(entry.id), lambda store, ledger: void(Sweeper(store, ledger).delete(entry)), target, entry.pinned)

    def refusal_of(self, id: str, attempt: str) -> Operation:
        """A deletion of what is not durable as far as is known."""

        def work(store: Watched, ledger: Ledger) -> None:
            checkpoint = CheckpointId.parse(id)
            Sweeper(store, ledger).refuse(checkpoint, attempt)
            with suppress(NotFound, WrongPhase):  # the commit may take it away itself
                if (entry := ledger.find(checkpoint)).attempt == attempt:
                    Sweeper(store, ledger).delete(entry)

        return Operation("refuse", id, work, attempt)

    def sweep_of(self, run: str | None, grace: float, age: float) -> Operation:
        def work(store: Watched, ledger: Ledger) -> None:
            Sweeper(store, ledger).sweep(run, delete_grace_seconds=grace, orphan_age_seconds=age)

        return Operation("sweep", "", work)

    def stock_save_of(self, id: str, ranks: int) -> Operation:
        return Operation(
            "stock", id, lambda store, _: save_stock(store, id, {f"__{rank}_0.distcp": os.urandom(4) for rank in range(ranks)})
        )

    def settle(self, operation: Operation, outcome: str) -> None:
        """What an operation that nobody disturbed must have done; a stopped one may have done it or not."""
        before, now = self.live.get(operation.id), self.observe(operation.id) if operation.id else None
        attempt = now[:24] if isinstance(now, str) else None
        if operation.kind == "commit":
            newer = isinstance(before, str) and before[:24] > str(operation.target)
            if outcome == "stopped":
                assert now == before or attempt == operation.target
            else:
                assert outcome == ("WrongPhase" if newer else "done")
                assert now == before if newer else attempt == operation.target
        elif operation.kind == "delete":
            same = before == operation.target and (operation.pinned or operation.id not in self.pins)
            if outcome == "stopped":
                assert now == before or (same and now is None)
            else:
                assert outcome == ("done" if same else "WrongPhase")
                assert now == (None if same else before)
        elif operation.kind == "stock":
            assert outcome in ("done", "stopped")
            assert (now != before and isinstance(now, bytes)) or outcome == "stopped"
        else:
            assert outcome in ("done", "stopped")
        if operation.id:
            self.learn(operation.id)

    # -- rules ------------------------------------------------------------------------------------

    @rule(id=st.sampled_from(IDS), ranks=st.integers(1, 3))
    def upload(self, id: str, ranks: int) -> None:
        self.attempts += 1
        found = contents(id, mint_attempt(self.attempts, None), ranks, PAYLOAD)
        upload(self.store, found, PAYLOAD)
        self.pending.append(found)

    @rule(id=st.sampled_from(IDS), ranks=st.integers(1, 3))
    def save(self, id: str, ranks: int) -> None:
        self.upload(id, ranks)
        self.act(self.commit_of(self.pending.pop()))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        found = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        self.act(self.commit_of(found))
        if data.draw(st.booleans()):  # another node, which does not know
            self.act(self.commit_of(found), 1)

    @precondition(lambda self: self.pending)
    @rule()
    def give_up(self) -> None:
        self.pending.pop()

    @rule(id=st.sampled_from(IDS), ranks=st.integers(1, 3))
    def save_by_stock(self, id: str, ranks: int) -> None:
        self.act(self.stock_save_of(id, ranks))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.seen.append(Ledger(self.store).find(CheckpointId.parse(data.draw(st.sampled_from(sorted(self.live))))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), process=st.integers(0, 1))
    def delete(self, data: st.DataObject, process: int) -> None:
        self.look(data)
        self.act(self.deletion_of(self.seen.pop()), process)

    @precondition(lambda self: self.seen)
    @rule(process=st.integers(0, 1))
    def delete_what_was_seen(self, process: int) -> None:
        entry = self.seen.pop()
        if entry.save_id is not None:
            self.act(self.deletion_of(entry), process)

    @rule(
        run=st.sampled_from([None, "", "r"]), grace=st.sampled_from([0.0, HOUR]), age=st.sampled_from([0.0, DAY]), process=st.integers(0, 1)
    )
    def sweep(self, run: str | None, grace: float, age: float, process: int) -> None:
        self.act(self.sweep_of(run, grace, age), process)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        ledger = Ledger(self.store)
        if pinned:
            ledger.pin(CheckpointId.parse(id))
            self.pins.add(id)
        else:
            ledger.unpin(CheckpointId.parse(id))
            self.pins.discard(id)

    @rule(id=st.sampled_from(IDS), name=st.sampled_from(["README", "__9_9.distcp", "logs/events", ".ckptd/mine", "__0_x.distcp"]))
    def write_a_foreign_file(self, id: str, name: str) -> None:
        self.foreign[f"{id}/{name}"] = os.urandom(3)
        self.store.put(f"{id}/{name}", lambda: [self.foreign[f"{id}/{name}"]])

    @precondition(lambda self: (self.root / "store/r/x").exists() and not (self.root / "store/s/copy").exists())
    @rule(dated=st.booleans())
    def copy(self, dated: bool) -> None:
        shutil.copytree(self.root / "store/r/x", self.root / "store/s/copy", copy_function=shutil.copy2)
        if not dated:
            self.clock.now += 0.01
            for path in (self.root / "store/s/copy").rglob("*"):
                if path.is_file():
                    self.store.stamp(path)
        self.foreign |= {key.replace("r/x/", "s/copy/", 1): data for key, data in self.foreign.items() if key.startswith("r/x/")}
        self.learn("s/copy")
        assert self.live.get("s/copy") == self.live.get("r/x")

    @rule(seconds=st.sampled_from([3.0, 12.0, 61.0, 301.0, HOUR, DAY]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def act(self, operation: Operation, process: int = 0) -> None:
        self.settle(operation, self.do(operation, process))

    def an_operation(self, data: st.DataObject) -> Operation:
        kind = data.draw(st.sampled_from(["commit", "delete", "sweep", "stock"]))
        if kind == "sweep":
            grace, age = data.draw(st.sampled_from([(0.0, 0.0), (0.0, DAY), (HOUR, DAY), (HOUR, 0.0)]))
            return self.sweep_of("r", grace, age)
        if kind == "commit" and self.pending:
            return self.commit_of(self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1))))
        if kind == "delete" and self.live:
            self.look(data)
            return self.deletion_of(self.seen.pop())
        return self.stock_save_of(data.draw(st.sampled_from(IDS)), data.draw(st.integers(1, 2)))

    @rule(data=st.data(), number=st.integers(0, 8), after=st.booleans(), process=st.integers(0, 1))
    def crash(self, data: st.DataObject, number: int, after: bool, process: int) -> None:
        """An operation whose process ends before or after its n-th put or deletion."""
        operation = self.an_operation(data)
        self.settle(operation, self.perform(operation, self.processes[process], stopping(self.store, number, after=after)))

    @rule(data=st.data(), id=st.sampled_from(["r/x", "r/x", "r"]), kinds=st.sampled_from(TOGETHER))
    def several_at_once(self, data: st.DataObject, id: str, kinds: list[str]) -> None:
        """Operations by several processes on one id, call by call; one may end in the middle."""
        if "delete" in kinds and id not in self.live:
            self.save(id, 2)
        operations = []
        for kind in kinds:
            if kind == "commit":
                self.upload(id, 2)
                operations.append(self.commit_of(self.pending.pop()))
            elif kind == "delete":
                operations.append(self.deletion_of(Ledger(self.store).find(CheckpointId.parse(id))))
            elif kind == "refuse":
                operations.append(self.refusal_of(id, str(operations[0].target)))
            elif kind == "stock":
                operations.append(self.stock_save_of(id, 2))
            else:
                grace, age = data.draw(st.sampled_from([(0.0, 0.0), (0.0, 0.0), (0.0, DAY), (HOUR, DAY), (HOUR, 0.0)]))
                operations.append(self.sweep_of(CheckpointId.parse(id).run, grace, age))
        before = {**self.live}
        actors = [Actor(self, operation, self.processes[number]) for number, operation in enumerate(operations)]
        kill = data.draw(st.integers(0, 60)) if data.draw(st.integers(0, 3)) == 0 else -1
        last_put_last, late_refusal = data.draw(st.booleans()), data.draw(st.booleans())
        count = 0
        try:
            while running := [actor for actor in actors if actor.outcome is None]:
                if late_refusal and actors[0].outcome is None and not actors[0].must_not_wait:
                    running = [actor for actor in running if actor.operation.kind != "refuse"] or running
                if last_put_last:  # who has looked for the last time is held until all others have done the same, or are done
                    running = [actor for actor in running if not actor.must_not_wait] or running
                actor = data.draw(st.sampled_from(running)) if len(running) > 1 and count < 100 else running[0]
                actor.killed = count == kill
                actor.step()
                if count < 100 and not any(actor.must_not_wait for actor in actors):
                    # The longest makes a commit begin anew, and its tries are counted: so only early on.
                    self.clock.now += data.draw(st.sampled_from([0.0] * 16 + [2.0, 6.0, 11.0, 400.0 if count < 40 else 0.0]))
                count += 1
                if actor.did_effect:
                    self.what_is_ours_is_whole()
        finally:
            for actor in actors:
                actor.end()
        for one in [*IDS, "s/copy"]:
            self.judge(one, before.get(one), [(actor.operation, actor.outcome) for actor in actors if actor.operation.id == one])
            self.learn(one)
        outcomes = [actor.outcome for actor in actors]
        assert {*outcomes} <= {"done", "stopped", "WrongPhase", "WasDeleted", "Unavailable"}, outcomes

    def judge(self, id: str, before: Identity | None, ended: list[tuple[Operation, str | None]]) -> None:
        """What operations on an id at the same time may have left, whatever their order."""
        now = self.observe(id)
        attempt = now[:24] if isinstance(now, str) else None
        possible: set[Identity | None] = {before} | {None for operation, _ in ended if operation.kind in ("delete", "refuse")}
        attempts = {str(operation.target) for operation, _ in ended if operation.kind == "commit"}
        stock = any(operation.kind == "stock" for operation, _ in ended)
        assert now in possible or attempt in attempts or (stock and isinstance(now, bytes))
        for operation, outcome in ended:
            if operation.kind == "commit" and outcome == "done" and not stock:
                gone = [one for one, end in ended if one.kind in ("delete", "refuse") and end in ("done", "stopped")]
                deleted = {str(one.target)[:24] for one in gone}
                newer = {one for one in attempts if one > str(operation.target)}
                assert attempt in {operation.target, *newer} or operation.target in deleted, "a durable one was lost"
            if operation.kind == "delete" and outcome == "done":
                assert now != operation.target, "a deleted one came back"
            if operation.kind == "refuse" and outcome == "done":
                cut_off = any(one.target == operation.target and end == "stopped" for one, end in ended if one.kind == "commit")
                assert attempt != operation.target or cut_off, "one that was deleted before it was durable is"

    # -- what always holds --------------------------------------------------------------------------

    @invariant()
    def entries_are_those_of_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        entries = {str(entry.id): entry for entry in Ledger(self.store).entries()}
        assert entries.keys() == self.live.keys()
        for id, entry in entries.items():
            assert self.live[id] == (entry.save_id if entry.save_id is not None else self.store.get(entry.metadata.key))
        assert {id for id, entry in entries.items() if entry.pinned} == self.pins

    @invariant()
    def foreign_files_are_untouched(self) -> None:
        if hasattr(self, "store"):
            for key, data in self.foreign.items():
                assert self.store.get(key) == data

    @invariant()
    def what_is_ours_is_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        ledger = Ledger(self.store)
        for entry in ledger.entries():
            if entry.save_id is None:
                for place in self.stock_files(entry):
                    assert self.store.get(f"{entry.id}/{place}"), f"{entry.id} lacks {place}"
                continue
            for shard in ledger.manifest(entry).shards:
                if shard.file:
                    data = self.store.get(data_key(entry.id, shard.file))
                    assert len(data) == shard.nbytes
                    assert codec.block_hash(data) == shard.stored[0].hashes

    def stock_files(self, entry: Entry) -> set[str]:
        return {*stock_files(self.store.get(entry.metadata.key))}

    def nothing_is_left(self) -> None:
        """Time passes, sweeps come, and all that nobody needs is gone."""
        self.processes = [Process() for _ in self.processes]
        for _ in range(4):
            self.clock.now += 2 * DAY
            assert self.do(self.sweep_of(None, HOUR, DAY)) == "done"
        self.entries_are_those_of_the_model()
        self.foreign_files_are_untouched()
        self.what_is_ours_is_whole()
        ledger = Ledger(self.store)
        kept: set[str] = set()
        for entry in ledger.entries():
            if entry.save_id is None:
                kept |= {f"{entry.id}/{name}" for name in self.stock_files(entry)}
            else:
                names = [shard.file for shard in ledger.manifest(entry).shards if shard.file]
                kept |= {f"{entry.id}/{name}" for name in [*names, f".ckptd/{entry.save_id}"]}
        for found in self.store.list(temporary=True):
            id, _, name = found.key.rpartition("/")
            if id.endswith("/.ckptd"):
                id, name = id.removesuffix("/.ckptd"), f".ckptd/{name}"
            ours = (
                debris.is_own(name)
                or is_temporary(name)
                or tombstone.is_list(name.rpartition("/")[2])
                or tombstone.refused(name.rpartition("/")[2])
            )
            assert not ours or found.key in kept, f"{found.key} was left"


def void(_: Any) -> None:
    """An operation returns nothing."""


class Now:
    """Stands in for the module `time` where the rooms under test ask it: the clock of the machine that runs."""

    clock = Clock()

    def time(self) -> float:
        return self.clock.now + self.clock.skew

    def monotonic(self) -> float:
        return self.clock.now


NOW = Now()


def run(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(sweeper, "time", NOW)
    monkeypatch.setattr(ledger_room, "time", NOW)
    monkeypatch.setattr(sweeper, "parallel", lambda call, arguments: [call(one) for one in arguments])  # for the order of calls
    checks = settings(deadline=None, suppress_health_check=[*HealthCheck], print_blob=False, **options)
    run_state_machine_as_test(LedgerMachine, settings=checks)


def test_no_interleaving_and_no_interruption_loses_mixes_or_revives_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, max_examples=40, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_interleaving_and_no_interruption_loses_mixes_or_revives_anything_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, max_examples=120, stateful_step_count=40)
