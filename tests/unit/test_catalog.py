"""The catalogue: what is accepted, what is dropped, and what may be lost for whom."""

from __future__ import annotations

import pytest

from ckptd import binding, errors
from ckptd.attempt import Drop, Forget, StopFlush, checkpoint_of, irreplaceable
from ckptd.catalog import REMEMBERED, Catalog
from ckptd.model import CLOCK_LAST_US, CheckpointId, is_attempt
from ckptd.v1.daemon_pb2 import Checkpoint, CommitRequest
from ckptd.v1.manifest_pb2 import Receipt, Record

NODE = "node"


def prepare(catalog: Catalog, request: CommitRequest, now_us: int) -> Record:
    binding.check(catalog, request)
    binding.others(catalog, request, "")
    return binding.record_of(catalog, request, now_us)


class Driver:
    """Saves into a catalogue with a clock of its own."""

    def __init__(self) -> None:
        self.catalog = Catalog(NODE, open_timeout_seconds=60.0, codec="zstd:1")
        self.catalog.lease("trainer")
        self.now_us = 1_000_000
        self.serial = 0

    def open(self, id: str, rank: int, *, metadata: bool = False, owner: str = "trainer") -> str:
        self.serial += 1
        token = f"{self.serial:016x}"
        self.catalog.opened(token, CheckpointId.parse(id), rank, owner, 0.0, metadata=metadata)
        return token

    def seal(self, token: str, now: float = 0.0) -> Receipt:
        shard = self.catalog.open_shard(token, self.catalog.shards[token].owner)
        receipt = Receipt(node=NODE, token=token, rank=shard.rank, nbytes=10, raw_bytes=8)
        self.catalog.sealed(token, receipt, now)
        return receipt

    def request(self, id: str, world: int = 2, *, durable: bool = True) -> CommitRequest:
        shards = [self.seal(self.open(id, rank)) for rank in range(world)]
        return CommitRequest(id=id, shards=shards, metadata=self.seal(self.open(id, 0, metadata=True)), durable=durable)

    def save(self, id: str, world: int = 2, *, durable: bool = True) -> tuple[Record, list[object]]:
        self.now_us += 1_000
        record = prepare(self.catalog, self.request(id, world, durable=durable), self.now_us)
        return record, list(self.catalog.accept(record))


def tokens(record: Record) -> list[str]:
    return [*(receipt.token for receipt in record.shards), record.metadata.token]


def test_large_tags_are_refused() -> None:
    driver = Driver()
    request = driver.request("run/step-1")
    request.tags["note"] = "n" * 65_533
    with pytest.raises(errors.InvalidRequest, match="tags may take 65536 bytes together, and these take 65537"):
        prepare(driver.catalog, request, 1_000)
    request.tags["note"] = "n" * 65_532
    prepare(driver.catalog, request, 1_000)


def test_an_accepted_attempt_is_latest_and_waits_to_be_flushed() -> None:
    driver = Driver()
    record, effects = driver.save("run/step-1")
    assert effects == []
    newest = driver.catalog.newest_of(CheckpointId.parse("run/step-1"))
    assert newest is not None
    assert newest.name == record.summary.attempt
    assert driver.catalog.to_flush() == [newest]
    assert driver.catalog.newest_of(CheckpointId.parse("step-1")) is None


def test_attempts_of_a_run_are_ordered_whatever_the_clock_says() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    driver.now_us = 5
    second, _ = driver.save("step-2")
    assert second.summary.attempt > first.summary.attempt
    driver.catalog.learn("", f"{CLOCK_LAST_US - 1:016x}" + "f" * 8)
    third, _ = driver.save("step-3")
    assert third.summary.attempt > f"{CLOCK_LAST_US - 1:016x}" + "f" * 8


@pytest.mark.parametrize("us", [CLOCK_LAST_US + 1, 2**63, 2**64 - 1])
def test_a_time_that_no_clock_tells_is_not_learnt_from(us: int) -> None:
    driver = Driver()
    driver.catalog.learn("run", f"{5_000_000:016x}" + "0" * 8)
    driver.catalog.learn("run", f"{us:016x}" + "f" * 8)
    record, _ = driver.save("run/step-1")
    assert is_attempt(record.summary.attempt)
    assert f"{5_000_000:016x}" < record.summary.attempt < f"{us:016x}"


def test_what_is_no_attempt_is_not_learnt_from() -> None:
    driver = Driver()
    for text in ("", "z" * 24, "f" * 23, "f" * 25, "F" * 24):
        driver.catalog.learn("", text)
    record, _ = driver.save("step-1")
    assert is_attempt(record.summary.attempt)
    assert driver.catalog.newest == {"": record.summary.attempt}


def test_a_newer_attempt_of_an_id_ends_the_older_and_its_flush() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    _, effects = driver.save("step-1")
    name = first.summary.attempt
    assert Forget(name) in effects
    assert StopFlush(name) in effects
    assert {effect.token for effect in effects if isinstance(effect, Drop)} == set(tokens(first))
    assert driver.catalog.attempts[name].state == Checkpoint.ABORTED


def test_a_superseded_attempt_keeps_its_memory_while_it_is_read() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    driver.catalog.pin(first.summary.attempt)
    _, effects = driver.save("step-1")
    assert not [effect for effect in effects if isinstance(effect, Drop)]
    assert {effect.token for effect in driver.catalog.unpin(first.summary.attempt) if isinstance(effect, Drop)} == set(tokens(first))


def test_a_durable_checkpoint_survives_in_memory_until_its_overwrite_is_durable() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    driver.catalog.flushed(first.summary.attempt, 9)
    second, effects = driver.save("step-1")
    assert effects == []
    assert driver.catalog.attempts[first.summary.attempt].state == Checkpoint.DURABLE
    effects = driver.catalog.flushed(second.summary.attempt, 9)
    assert {effect.token for effect in effects if isinstance(effect, Drop)} == set(tokens(first))


def test_a_deletion_takes_what_it_meant_and_not_what_was_accepted_after_it_was_asked_for() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    driver.catalog.flushed(first.summary.attempt, 9)
    second, _ = driver.save("step-1")
    effects = driver.catalog.deleted(CheckpointId.parse("step-1"), durable_only=False, but={second.summary.attempt})
    assert {effect.token for effect in effects if isinstance(effect, Drop)} == set(tokens(first))
    assert [attempt.record for attempt in driver.catalog.to_flush()] == [second]
    effects = driver.catalog.deleted(CheckpointId.parse("step-1"), durable_only=False)
    assert {effect.token for effect in effects if isinstance(effect, Drop)} == set(tokens(second))


def test_a_lost_lease_takes_what_is_unsealed_and_nothing_else() -> None:
    driver = Driver()
    sealed = driver.open("step-1", 0)
    driver.seal(sealed)
    unsealed = driver.open("step-1", 1)
    assert driver.catalog.lease_ended("trainer") == [Drop(unsealed)]
    assert sealed in driver.catalog.shards
    with pytest.raises(errors.LeaseLost, match="save again"):
        driver.catalog.open_shard(unsealed, "trainer")


def test_unbound_shards_expire_after_the_last_seal_of_their_save() -> None:
    driver = Driver()
    first = driver.open("step-1", 0)
    driver.seal(first, now=10.0)
    second = driver.open("step-1", 1)
    driver.seal(second, now=50.0)
    assert driver.catalog.expire(109.9) == []
    assert sorted(effect.token for effect in driver.catalog.expire(110.0) if isinstance(effect, Drop)) == sorted([first, second])


def test_the_timer_stands_still_while_a_live_lease_writes_a_shard_of_the_save() -> None:
    driver = Driver()
    driver.seal(driver.open("step-1", 0), now=0.0)
    slow = driver.open("step-1", 1)
    assert driver.catalog.expire(1_000.0) == []
    driver.catalog.released(slow)
    assert driver.catalog.expire(1_059.0) == []
    assert len(driver.catalog.expire(1_060.0)) == 1


def test_bound_shards_never_expire() -> None:
    driver = Driver()
    driver.save("step-1")
    assert driver.catalog.expire(1e9) == []


def test_a_rank_that_starts_an_id_again_drops_what_it_had_sealed_for_it() -> None:
    driver = Driver()
    stale = driver.open("step-1", 0)
    driver.seal(stale)
    other = driver.open("step-1", 1)
    driver.seal(other)
    assert driver.catalog.restarted(CheckpointId.parse("step-1"), 0, "trainer") == [Drop(stale)]
    assert driver.catalog.restarted(CheckpointId.parse("step-2"), 1, "trainer") == []
    assert other in driver.catalog.shards


def test_receipts_that_the_daemon_does_not_hold_are_refused() -> None:
    driver = Driver()
    request = driver.request("step-1")
    request.shards[0].token = "f" * 16
    with pytest.raises(errors.LeaseLost, match="rank 0"):
        prepare(driver.catalog, request, 1)
    request = driver.request("step-2")
    request.shards[1].node = "elsewhere"
    with pytest.raises(errors.InvalidRequest, match="another daemon"):
        prepare(driver.catalog, request, 1)
    request = driver.request("step-3")
    request.id = "step-4"
    with pytest.raises(errors.InvalidRequest, match=r"step-3.*step-4"):
        prepare(driver.catalog, request, 1)
    with pytest.raises(errors.InvalidRequest, match="at least one shard"):
        prepare(driver.catalog, CommitRequest(id="step-5"), 1)


def test_shards_cannot_be_bound_twice() -> None:
    driver = Driver()
    request = driver.request("step-1")
    driver.catalog.accept(prepare(driver.catalog, request, 1))
    with pytest.raises(errors.LeaseLost):
        prepare(driver.catalog, request, 2)


def test_two_shards_of_one_rank_are_refused() -> None:
    driver = Driver()
    request = driver.request("step-1", world=1)
    request.shards.append(driver.seal(driver.open("step-1", 0)))
    with pytest.raises(errors.InvalidRequest, match="more than one shard"):
        prepare(driver.catalog, request, 1)


def test_what_is_accepted_and_not_durable_is_no_victim() -> None:
    driver = Driver()
    driver.save("step-1")
    driver.save("step-2")
    assert list(driver.catalog.victims()) == []


def test_older_durable_checkpoints_go_before_the_newest() -> None:
    driver = Driver()
    records = [driver.save(f"step-{step}")[0] for step in range(3)]
    for record in records:
        driver.catalog.flushed(record.summary.attempt, 9)
    victims = list(driver.catalog.victims())
    assert [token for token, _ in victims] == [token for record in records for token in sorted(tokens(record))]
    assert [precious for _, precious in victims] == [False] * 6 + [True] * 3


def test_an_outrun_promise_goes_after_what_the_store_has_and_only_if_nothing_else_makes_room() -> None:
    driver = Driver()
    promised, failed, older, newest = (driver.save(f"step-{step}")[0] for step in range(4))
    for record in (older, newest):
        driver.catalog.flushed(record.summary.attempt, 9)
    driver.catalog.failed(failed.summary.attempt, "denied")
    passing, _ = driver.save("step-4", durable=False)
    driver.save("step-5")
    over = [(token, False) for record in (passing, older) for token in sorted(tokens(record))]
    precious = [(token, True) for record in (promised, failed, newest) for token in sorted(tokens(record))]
    assert list(driver.catalog.victims()) == [*over, *precious]


def test_what_not_all_have_accepted_loses_its_memory_before_what_is_a_promise() -> None:
    driver = Driver()
    promised, _ = driver.save("step-1")
    driver.now_us += 1_000
    adopted = prepare(driver.catalog, driver.request("step-1"), driver.now_us)
    driver.catalog.accept(adopted, confirmed=False)
    for attempt in driver.catalog.attempts.values():
        attempt.doubtful = True
    assert [token for token, _ in driver.catalog.victims()] == [*sorted(tokens(adopted)), *sorted(tokens(promised))]


def test_a_pinned_attempt_is_no_victim() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    driver.catalog.flushed(record.summary.attempt, 9)
    driver.catalog.pin(record.summary.attempt)
    assert list(driver.catalog.victims()) == []


def test_a_failed_attempt_is_kept_until_its_memory_is_needed() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    driver.catalog.failed(record.summary.attempt, "denied")
    assert driver.catalog.newest_of(CheckpointId.parse("step-1")) is not None
    assert "denied" in driver.catalog.warning
    first = next(token for token, _ in driver.catalog.victims())
    assert Forget(record.summary.attempt) in driver.catalog.evicted(first)
    assert driver.catalog.newest_of(CheckpointId.parse("step-1")) is None
    assert driver.catalog.newest_of(CheckpointId.parse("step-1"), restorable=False) is not None


def test_an_attempt_says_why_it_is_not_durable_yet_until_it_is() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    attempt = driver.catalog.attempts[record.summary.attempt]
    assert checkpoint_of(attempt).reason == ""
    for tried in ("1 try failed", "2 tries failed"):
        driver.catalog.delayed(attempt.name, tried)
        assert (checkpoint_of(attempt).state, checkpoint_of(attempt).reason) == (Checkpoint.ACCEPTED, tried)
    driver.catalog.flushed(attempt.name, 9)
    assert (checkpoint_of(attempt).state, checkpoint_of(attempt).reason) == (Checkpoint.DURABLE, "")


def test_an_attempt_that_was_superseded_while_it_was_flushed_stays_so_whatever_the_store_says() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    name = first.summary.attempt
    driver.catalog.pin(name)
    driver.save("step-1")
    driver.catalog.delayed(name, "the store is away")
    driver.catalog.failed(name, "denied")
    assert driver.catalog.attempts[name].state == Checkpoint.ABORTED
    assert driver.catalog.warning == ""
    dropped = {effect.token for effect in driver.catalog.unpin(name) if isinstance(effect, Drop)}
    assert dropped == set(tokens(first))


def test_memory_only_attempts_go_when_a_newer_one_of_the_run_is_accepted() -> None:
    driver = Driver()
    first, _ = driver.save("step-1", durable=False)
    assert driver.catalog.to_flush() == []
    assert list(driver.catalog.victims()) == []
    driver.save("step-2", durable=False)
    assert {*driver.catalog.victims()} == {(token, False) for token in tokens(first)}


def test_an_accepted_attempt_may_go_once_a_newer_one_is_durable() -> None:
    driver = Driver()
    first, _ = driver.save("step-1")
    second, _ = driver.save("step-2")
    driver.catalog.flushed(second.summary.attempt, 9)
    order = [token for token, _ in driver.catalog.victims()]
    assert order[:3] == sorted(tokens(first))
    effects = driver.catalog.evicted(order[0])
    assert StopFlush(first.summary.attempt) in effects
    assert driver.catalog.attempts[first.summary.attempt].state == Checkpoint.ABORTED


def test_a_durable_attempt_is_forgotten_when_the_last_of_it_is_evicted() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    driver.catalog.flushed(record.summary.attempt, 9)
    for token in tokens(record):
        assert driver.catalog.evicted(token) == [Forget(record.summary.attempt)]
    assert driver.catalog.attempts == {}
    assert driver.catalog.bound == {}


def test_what_is_lost_goes_as_a_whole_once_a_part_of_it_is_evicted_and_nobody_reads_it() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    name = record.summary.attempt
    assert driver.catalog.lost(name, "told so") == [StopFlush(name)]
    pickle, *shards = reversed(tokens(record))
    driver.catalog.pin(name)
    assert driver.catalog.evicted(pickle) == [Forget(name)]
    assert {*driver.catalog.unpin(name)} == {Drop(token) for token in shards}
    again, _ = driver.save("step-2")
    driver.catalog.lost(again.summary.attempt, "told so")
    pickle, *shards = reversed(tokens(again))
    assert {*driver.catalog.evicted(pickle)} == {Forget(again.summary.attempt), *(Drop(token) for token in shards)}


def test_what_no_copy_may_displace_is_the_newest_of_a_run_if_memory_alone_has_it() -> None:
    driver = Driver()
    older, _ = driver.save("run/step-1")
    driver.catalog.failed(older.summary.attempt, "told so")
    assert irreplaceable(driver.catalog.attempts.values()) == set(tokens(older))
    newer, _ = driver.save("run/step-2")
    other, _ = driver.save("other/step-1")
    driver.catalog.attempts[other.summary.attempt].doubtful = True
    assert irreplaceable(driver.catalog.attempts.values()) == set(tokens(other))
    driver.catalog.aborted(newer.summary.attempt, "told so")
    assert irreplaceable(driver.catalog.attempts.values()) == {*tokens(older), *tokens(other)}


def test_an_ended_attempt_is_not_forgotten_while_somebody_reads_it() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    name = record.summary.attempt
    driver.catalog.pin(name)
    for token in tokens(record):
        driver.catalog.evicted(token)
    for number in range(REMEMBERED + 10):
        driver.catalog.aborted(driver.save(f"step-{number + 2}")[0].summary.attempt, "told so")
    assert driver.catalog.attempts[name].ended
    driver.catalog.delayed(name, "a flush that ends late")
    driver.catalog.unpin(name)
    driver.catalog.aborted(driver.save("step-1000")[0].summary.attempt, "told so")
    assert name not in driver.catalog.attempts


def test_ended_attempts_are_not_remembered_without_end() -> None:
    driver = Driver()
    for _ in range(600):
        driver.save("step-1")
    assert len(driver.catalog.attempts) < 300
    assert len(driver.catalog.shards) == 3


def test_the_metadata_pickle_is_no_shard_and_a_shard_no_metadata_pickle() -> None:
    driver = Driver()
    request = driver.request("step-1", world=1)
    for shards, metadata in (([request.shards[0]], request.shards[0]), ([request.metadata], request.shards[0])):
        with pytest.raises(errors.InvalidRequest):
            prepare(driver.catalog, CommitRequest(id="step-1", shards=shards, metadata=metadata, durable=True), 1)


def test_a_process_that_lives_keeps_its_shard_when_another_saves_the_same_id() -> None:
    driver = Driver()
    driver.catalog.lease("other")
    kept = driver.open("step-1", 0, owner="other")
    driver.seal(kept)
    assert driver.catalog.restarted(CheckpointId.parse("step-1"), 0, "trainer") == []
    driver.catalog.lease_ended("other")
    assert driver.catalog.restarted(CheckpointId.parse("step-1"), 0, "trainer") == [Drop(kept)]


def test_the_timer_stands_still_while_a_rank_waits_for_memory() -> None:
    driver = Driver()
    driver.seal(driver.open("step-1", 0), now=0.0)
    driver.catalog.waits(CheckpointId.parse("step-1"), 1)
    assert driver.catalog.expire(1_000.0) == []
    driver.catalog.waits(CheckpointId.parse("step-1"), -1)
    assert len(driver.catalog.expire(1_060.0)) == 1


def test_a_memory_only_save_does_not_supersede_one_on_its_way_to_the_store() -> None:
    driver = Driver()
    driver.save("step-1")
    with pytest.raises(errors.WrongPhase, match="durable=False"):
        driver.save("step-1", durable=False)


def test_an_attempt_whose_memory_was_removed_is_lost_with_the_reason() -> None:
    driver = Driver()
    record, _ = driver.save("step-1")
    effects = driver.catalog.vanished(tokens(record)[0])
    assert StopFlush(record.summary.attempt) in effects
    attempt = driver.catalog.attempts[record.summary.attempt]
    assert attempt.state == Checkpoint.LOST
    assert "removed" in attempt.reason
    assert driver.catalog.newest_of(CheckpointId.parse("step-1")) is None


def test_saves_that_fail_at_commit_leave_no_metadata_pickles_behind() -> None:
    driver = Driver()
    for _ in range(5):
        driver.request("step-1", world=1)  # sealed, and never bound
        driver.catalog.restarted(CheckpointId.parse("step-1"), 0, "trainer")
    assert driver.catalog.shards == {}


def test_an_attempt_is_later_than_its_shards_although_the_clock_went_back() -> None:
    driver = Driver()
    token = driver.open("step-1", 0)
    receipt = Receipt(node=NODE, token=token, rank=0, nbytes=10, sealed_us=9_000_000)
    driver.catalog.sealed(token, receipt, 0.0)
    pickle = driver.seal(driver.open("step-1", 0, metadata=True))
    record = prepare(driver.catalog, CommitRequest(id="step-1", shards=[receipt], metadata=pickle, durable=True), 5)
    assert int(record.summary.attempt[:16], 16) > 9_000_000


def test_an_attempt_that_others_have_yet_to_accept_supersedes_nothing_and_is_not_flushed() -> None:
    driver = Driver()
    older, _ = driver.save("run/step-1")
    driver.now_us += 1_000
    newer = prepare(driver.catalog, driver.request("run/step-1"), driver.now_us)
    assert driver.catalog.accept(newer, confirmed=False) == []
    assert [attempt.record for attempt in driver.catalog.to_flush()] == [older]
    assert driver.catalog.attempts[older.summary.attempt].pending
    # It comes to nothing: what was accepted before is still there.
    driver.catalog.aborted(newer.summary.attempt, "not accepted by all")
    newest = driver.catalog.newest_of(CheckpointId.parse("run/step-1"))
    assert newest is not None
    assert newest.record == older


def test_an_attempt_that_is_confirmed_supersedes_older_ones() -> None:
    driver = Driver()
    older, _ = driver.save("run/step-1")
    driver.now_us += 1_000
    newer = prepare(driver.catalog, driver.request("run/step-1"), driver.now_us)
    driver.catalog.accept(newer, confirmed=False)
    effects = driver.catalog.confirm(newer.summary.attempt)
    assert Forget(older.summary.attempt) in effects
    assert StopFlush(older.summary.attempt) in effects
    assert [attempt.record for attempt in driver.catalog.to_flush()] == [newer]
