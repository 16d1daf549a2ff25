"""The ledger over real stores: what exists, in which order, and how it comes to exist."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import saved
from ckptd import codec, metadata, tombstone
from ckptd import manifest as manifests
from ckptd.errors import Corrupt, InvalidRequest, NotFound, StoreError, Unavailable, WrongPhase
from ckptd.ledger import Ledger, WasDeleted, data_key, manifest_key, metadata_key
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, mint_attempt, mint_token
from ckptd.store import Object, Source, Store
from ckptd.sweeper import Sweeper
from ckptd.v1.manifest_pb2 import Form, Item, Manifest, Stored, StoredShard, Summary, Table, Tombstone
from saved import Watched

#: What a trainer's pickle of Metadata looks like from here: some pickle of protocol 2.
PICKLE = pickle.dumps({"state_dict_metadata": {"weight": None}}, protocol=2)
BLOCK = 4 * 1024 * 1024


def attempt_at(us: int) -> str:
    return mint_attempt(us, None)


def contents(id: CheckpointId, attempt: str, *, tags: dict[str, str] | None = None, nbytes: int = 100) -> Manifest:
    """An attempt of two ranks: one item on the first, none on the second."""
    item = Item(fqn=b"weight", offset=[0], has_offset=True, index=0, kind=Item.RAW, at=0, raw_at=64, nbytes=nbytes)
    table = Table(forms=[Form(pkl=b"pkl", dtype="uint8", shape=[nbytes], strides=[1])], items=[item], end=64 + nbytes + 36)
    stored = Stored(offset=0, lengths=[table.end], hashes=codec.block_hash(bytes(table.end)))
    shards = [
        StoredShard(rank=0, file=f"__0_{mint_token()}.distcp", nbytes=table.end, table=table, stored=[stored]),
        StoredShard(rank=1, table=Table()),
    ]
    summary = Summary(id=str(id), attempt=attempt, accepted_us=int(attempt[:16], 16), world_size=2, raw_bytes=nbytes, codec="none")
    summary.tags.update(tags or {})
    return Manifest(summary=summary, shards=shards, block_nbytes=BLOCK)


def upload(store: Store, id: CheckpointId, manifest: Manifest) -> None:
    for shard in manifest.shards:
        if shard.file:
            store.put(data_key(id, shard.file), lambda nbytes=shard.nbytes: [bytes(nbytes)])


def save(store: Store, name: str, us: int) -> Manifest:
    """Commits an attempt accepted at `us` microseconds."""
    id = CheckpointId.parse(name)
    manifest = contents(id, attempt_at(us))
    upload(store, id, manifest)
    Ledger(store).commit(id, manifest, PICKLE)
    return manifest


def save_stock(root: Path, name: str, modified: float = 1.0) -> None:
    """What stock DCP leaves, seen from outside."""
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "__0_0.distcp").write_bytes(b"12345")
    (root / name / ".metadata").write_bytes(pickle.dumps({"storage_data": {}, "storage_meta": "save_id"}, protocol=2))
    os.utime(root / name / ".metadata", (modified, modified))


def metadata_of_stock() -> bytes:
    """A `.metadata` without tensors, as opcodes: the rooms under test know no torch."""
    return b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(X\x13\0\0\0state_dict_metadata}X\x0c\0\0\0storage_data}ub."


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    store = LocalStore(root)
    store.probe()
    return store


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store)


def names(ledger: Ledger, run: str | None = None) -> list[str]:
    return [str(entry.id) for entry in ledger.entries(run)]


# --- what exists -------------------------------------------------------------------------------------------------


def test_a_committed_checkpoint_gives_back_what_was_committed(store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("run-a/step-10")
    manifest = contents(id, attempt_at(1_000_000), tags={"lr": "0.1"})
    upload(store, id, manifest)
    ledger.commit(id, manifest, PICKLE)

    entry = ledger.find(id)
    assert entry.attempt == manifest.summary.attempt
    assert entry.save_id is not None
    assert entry.save_id.startswith(f"{entry.attempt}-")
    assert entry.accepted_us == 1_000_000
    assert ledger.manifest(entry) == manifest
    assert ledger.summary(entry) == manifest.summary
    assert manifest.summary.stored_bytes == 200
    assert ledger.metadata_pickle(entry, manifest) == PICKLE
    assert {found.key for found in store.list()} == {
        data_key(id, manifest.shards[0].file),
        manifest_key(id, entry.save_id),
        metadata_key(id),
    }


def test_metadata_says_what_stock_needs(store: Store, ledger: Ledger) -> None:
    manifest = save(store, "step-1", 1)
    data = store.get("step-1/.metadata")
    assert manifest.metadata_nbytes == len(data)
    assert data.startswith(PICKLE[:-1])
    assert metadata.save_id(data[-512:]) == ledger.find(CheckpointId.parse("step-1")).save_id


def test_checkpoints_are_listed_by_number_and_strangers_left_out(root: Path, store: Store, ledger: Ledger) -> None:
    for number, step in enumerate([9, 10, 99, 100, 1000]):
        save(store, f"step-{step}", number)
    save(store, "run-b/step-3", 100)
    save(store, "run-a/step-20", 101)
    save(store, "run-a/final", 102)
    for stray in ("step-abc/x", "step-10.bak/x", "step_10/x", "deep/er/still/.metadata", "-x/.metadata", "run-a/latest/.metadata"):
        store.put(stray, lambda: [b"stray"])
    (root / "latest").write_text("step-9")
    (root / ".metadata").write_bytes(b"at the top")
    assert names(ledger) == [
        *("step-9", "step-10", "step-99", "step-100", "step-1000"),
        *("run-a/final", "run-a/step-20", "run-b/step-3"),
    ]
    assert names(ledger, "") == ["step-9", "step-10", "step-99", "step-100", "step-1000"]
    assert names(ledger, "run-a") == ["run-a/final", "run-a/step-20"]
    assert names(ledger, "run") == []
    assert str(ledger.latest("").id) == "step-1000"


def test_steps_may_be_zero_and_huge(store: Store, ledger: Ledger) -> None:
    for number, step in enumerate([0, 10**30, 5]):
        save(store, f"step-{step}", number)
    assert names(ledger) == ["step-0", "step-5", f"step-{10**30}"]


def test_a_run_may_have_the_name_of_a_checkpoint(store: Store, ledger: Ledger) -> None:
    outer = save(store, "a", 1)
    save(store, "a/step-1", 2)
    entry = ledger.find(CheckpointId.parse("a"))
    assert names(ledger) == ["a", "a/step-1"]
    assert ledger.manifest(entry) == outer
    assert names(ledger, "a") == ["a/step-1"]


def test_an_empty_store_has_no_checkpoint_and_a_missing_one_is_an_error(ledger: Ledger, tmp_path: Path) -> None:
    assert ledger.entries() == []
    with pytest.raises(NotFound, match="step-1"):
        ledger.find(CheckpointId.parse("step-1"))
    for run in ("", "run-a"):
        with pytest.raises(NotFound, match="no checkpoint"):
            ledger.latest(run)
    gone = Ledger(LocalStore(tmp_path / "elsewhere"))
    id = CheckpointId.parse("step-1")
    calls: list[Callable[[], object]] = [gone.entries, gone.incomplete, lambda: gone.latest(""), lambda: gone.find(id)]
    for call in calls:
        with pytest.raises(StoreError):
            call()


def test_latest_is_the_one_accepted_last_so_a_rollback_wins(store: Store, ledger: Ledger) -> None:
    save(store, "run/step-100", 10)
    save(store, "run/step-200", 20)
    save(store, "run/step-150", 30)
    assert str(ledger.latest("run").id) == "run/step-150"
    save(store, "other/step-1", 40)
    assert str(ledger.latest("run").id) == "run/step-150"


def test_stock_checkpoints_count_by_step_and_their_newest_by_its_time(root: Path, store: Store, ledger: Ledger) -> None:
    save_stock(root, "step-9", modified=500.0)
    save_stock(root, "step-10", modified=100.0)
    assert str(ledger.latest("").id) == "step-10"
    save(store, "ours-3", 99_000_000)
    assert str(ledger.latest("").id) == "step-10"
    save(store, "ours-2", 101_000_000)
    assert str(ledger.latest("").id) == "ours-2"


def test_a_stock_checkpoint_is_told_by_what_the_listing_knows(root: Path, ledger: Ledger) -> None:
    save_stock(root, "run/step-7", modified=12.5)
    entry = ledger.find(CheckpointId.parse("run/step-7"))
    assert (entry.attempt, entry.save_id) == (None, None)
    assert ledger.summary(entry) == Summary(id="run/step-7", accepted_us=12_500_000, stored_bytes=5)
    with pytest.raises(NotFound, match="stock"):
        ledger.manifest(entry)


def test_a_copied_directory_is_a_checkpoint_under_its_new_name(root: Path, store: Store, ledger: Ledger) -> None:
    save(store, "run-a/step-1", 1)
    shutil.copytree(root / "run-a", root / "run-b")
    entry = ledger.find(CheckpointId.parse("run-b/step-1"))
    assert ledger.summary(entry).id == "run-b/step-1"
    assert ledger.manifest(entry).summary.id == "run-b/step-1"
    assert ledger.metadata_pickle(entry, ledger.manifest(entry)) == PICKLE


def test_a_summary_longer_than_the_first_read_is_read_again(store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1), tags={"long": "x" * (2 * manifests.HEAD_NBYTES)})
    upload(store, id, manifest)
    ledger.commit(id, manifest, PICKLE)
    assert ledger.summary(ledger.find(id)) == manifest.summary


def test_summaries_come_in_order_and_damage_hides_no_other(root: Path, store: Store, ledger: Ledger) -> None:
    for step in range(5):
        save(store, f"step-{step}", step)
    entries = ledger.entries()
    (root / manifest_key(entries[2].id, entries[2].save_id or "")).write_bytes(b"ckptd/1\n")
    told = ledger.summaries(entries)
    assert [summary.id for summary in told if isinstance(summary, Summary)] == ["step-0", "step-1", "step-3", "step-4"]
    assert isinstance(told[2], Corrupt)
    assert entries[2].save_id is not None
    assert entries[2].save_id in str(told[2])


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: data[:50], lambda _: b"", lambda data: bytes([data[0] ^ 1]) + data[1:], None],
    ids=["short", "shorter", "empty", "flipped", "missing"],
)
def test_a_damaged_or_missing_manifest_is_named(root: Path, store: Store, ledger: Ledger, damage: Callable[[bytes], bytes] | None) -> None:
    save(store, "step-1", 1)
    entry = ledger.find(CheckpointId.parse("step-1"))
    path = root / manifest_key(entry.id, entry.save_id or "")
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Corrupt, match=path.name):
        ledger.manifest(entry)


def test_a_flipped_bit_in_metadata_is_damage_and_names_it(root: Path, store: Store, ledger: Ledger) -> None:
    manifest = save(store, "step-1", 1)
    path = root / "step-1" / ".metadata"
    whole = path.read_bytes()
    entry = ledger.find(CheckpointId.parse("step-1"))
    for damaged in (whole[:10] + bytes([whole[10] ^ 4]) + whole[11:], whole[:-1], whole + b"."):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt, match=r"step-1/\.metadata"):
            ledger.metadata_pickle(entry, manifest)


METADATA_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut-by-one": lambda data: data[:-1],
    "cut-in-half": lambda data: data[: len(data) // 2],
    "cut-to-the-trainers": lambda data: data[: len(PICKLE) - 1],
    "longer": lambda data: data + b".",
    "zeros-behind": lambda data: data + bytes(4096),
    "another-id": lambda data: data[:-40] + b"g" + data[-39:],
    "noise": lambda data: b"\0" * len(data),
}


@pytest.mark.parametrize("damage", METADATA_DAMAGE.values(), ids=METADATA_DAMAGE)
def test_a_damaged_metadata_is_still_ours_stays_the_latest_and_is_named(
    root: Path, store: Store, ledger: Ledger, damage: Callable[[bytes], bytes]
) -> None:
    id = CheckpointId.parse("run/step-2")
    save(store, "run/step-1", 1)
    save(store, "run/step-2", 2)
    manifest = save(store, "run/step-2", 3)
    path = root / "run" / "step-2" / ".metadata"
    path.write_bytes(damage(path.read_bytes()))
    os.utime(path, (1.0, 1.0))  # as a stock one it would be the oldest

    entry = ledger.find(id)
    assert entry.damaged
    assert entry == ledger.latest("run") == ledger.entries("run")[-1]
    assert entry.attempt == manifest.summary.attempt
    assert entry.accepted_us == 3
    assert ledger.summary(entry) == manifest.summary
    with pytest.raises(Corrupt, match=r"run/step-2/\.metadata is damaged"):
        ledger.metadata_pickle(entry, ledger.manifest(entry))


def test_a_checkpoint_that_stock_wrote_over_ours_is_stock(root: Path, store: Store, ledger: Ledger) -> None:
    save(store, "step-1", 1)
    path = root / "step-1" / ".metadata"
    path.write_bytes(metadata_of_stock())
    entry = ledger.find(CheckpointId.parse("step-1"))
    assert (entry.attempt, entry.save_id, entry.damaged) == (None, None, False)


def test_a_whole_checkpoint_is_listed_from_its_tail_alone(store: Store) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1))
    upload(store, id, manifest)
    Ledger(store).commit(id, manifest, pickle.dumps({"state_dict_metadata": {"x" * 5000: None}}, protocol=2))

    class Counting(Recording):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            assert start > 0
            return super().get(key, start, end)

    assert not Ledger(Counting(store)).find(id).damaged


def test_a_damaged_metadata_is_no_success_of_a_commit_and_is_written_anew(root: Path, store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    path = root / "step-1" / ".metadata"
    save(store, "step-1", 1)
    path.write_bytes(path.read_bytes()[:-1])
    newer = contents(id, attempt_at(2))
    upload(store, id, newer)
    recording = Recording(store)
    Ledger(recording).commit(id, newer, PICKLE)
    assert len(recording.puts) == 2
    path.write_bytes(b"")
    Ledger(recording).commit(id, newer, PICKLE)
    assert len(recording.puts) == 4
    entry = ledger.find(id)
    assert (entry.damaged, entry.attempt) == (False, newer.summary.attempt)
    path.write_bytes(b"")
    older = contents(id, attempt_at(1))
    upload(store, id, older)
    with pytest.raises(WrongPhase, match="superseded"):
        ledger.commit(id, older, PICKLE)


def test_a_checkpoint_that_is_saved_again_while_it_is_read_is_no_damage(store: Store, ledger: Ledger) -> None:
    manifest = save(store, "step-1", 1)
    entry = ledger.find(CheckpointId.parse("step-1"))
    save(store, "step-1", 2)
    with pytest.raises(NotFound, match="again"):
        ledger.metadata_pickle(entry, manifest)


def test_incomplete_saves_are_told_with_how_far_they_got(root: Path, store: Store, ledger: Ledger) -> None:
    save(store, "run/step-10", 1)
    uploaded = CheckpointId.parse("run/step-20")
    upload(store, uploaded, contents(uploaded, attempt_at(2)))
    save(store, "run/step-30", 3)
    store.delete(["run/step-30/.metadata"])
    (root / "stock").mkdir()
    (root / "stock" / "__0_0.distcp").write_bytes(b"not of ours")
    (root / "mine").mkdir()
    (root / "mine" / "notes.txt").write_bytes(b"")
    told = dict(ledger.incomplete())
    assert {str(id) for id in told} == {"run/step-20", "run/step-30"}
    assert "1 data file and no manifest" in told[uploaded]
    assert ".metadata is not" in told[CheckpointId.parse("run/step-30")]
    assert names(ledger) == ["run/step-10"]


# --- how it comes to exist ---------------------------------------------------------------------------------------


class Recording:
    """A store that keeps the order of puts, and may fail at the n-th one, before or after it took effect."""

    def __init__(self, store: Store, *, fail_at: int = -1, after: bool = False) -> None:
        self._store = store
        self._fail_at = fail_at
        self._after = after
        self.puts: list[str] = []
        self.before_get: Callable[[str], None] = lambda _: None
        self.after_put: Callable[[str], object] = lambda _: None

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def conditional(self) -> bool:
        return self._store.conditional

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        self.puts.append(key)
        fails = len(self.puts) - 1 == self._fail_at
        if fails and not self._after:
            raise Unavailable("told to fail")
        nbytes = self._store.put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)
        self.after_put(key)
        if fails:
            raise Unavailable("told to fail, but it is done")
        return nbytes

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.before_get(key)
        return self._store.get(key, start, end)

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        return self._store.list(prefix, temporary=temporary)

    def children(self, directory: str = "") -> tuple[list[Object], list[str]]:
        return self._store.children(directory)

    def abort_uploads(self, older_than_seconds: float) -> int:
        return self._store.abort_uploads(older_than_seconds)

    def delete(self, keys) -> None:
        raise AssertionError("a ledger deletes nothing")

    def remove(self, key, version) -> None:
        raise AssertionError("a ledger deletes nothing")

    def probe(self) -> None:
        self._store.probe()


def test_metadata_is_put_last_and_the_manifest_before_it(store: Store) -> None:
    recording = Recording(store)
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1))
    upload(store, id, manifest)
    Ledger(recording).commit(id, manifest, PICKLE)
    first, last = recording.puts
    assert first.startswith(f"step-1/.ckptd/{manifest.summary.attempt}-")
    assert last == "step-1/.metadata"


@pytest.mark.parametrize(("fail_at", "after"), [*itertools.product([0, 1], [False, True])])
def test_a_commit_that_fails_is_there_whole_or_not_at_all_and_can_be_tried_again(store: Store, fail_at: int, after: bool) -> None:
    id = CheckpointId.parse("step-1")
    old = save(store, "step-1", 1)
    manifest = contents(id, attempt_at(2))
    upload(store, id, manifest)
    with pytest.raises(Unavailable):
        Ledger(Recording(store, fail_at=fail_at, after=after)).commit(id, manifest, PICKLE)
    ledger = Ledger(store)
    there = ledger.manifest(ledger.find(id))
    assert there == (manifest if (fail_at, after) == (1, True) else old)
    again = Manifest(summary=manifest.summary, shards=manifest.shards, block_nbytes=BLOCK)
    ledger.commit(id, again, PICKLE)
    entry = ledger.find(id)
    assert entry.attempt == manifest.summary.attempt
    assert ledger.metadata_pickle(entry, ledger.manifest(entry)) == PICKLE


def test_committing_what_is_durable_does_nothing(store: Store) -> None:
    id = CheckpointId.parse("step-1")
    manifest = save(store, "step-1", 1)
    before = {found.key: found for found in store.list()}
    recording = Recording(store)
    Ledger(recording).commit(id, manifest, PICKLE)
    assert recording.puts == []
    assert {found.key: found for found in store.list()} == before


def test_an_older_attempt_never_replaces_a_newer_one(store: Store, ledger: Ledger) -> None:
    newer = save(store, "step-1", 2)
    id = CheckpointId.parse("step-1")
    older = contents(id, attempt_at(1))
    upload(store, id, older)
    recording = Recording(store)
    with pytest.raises(WrongPhase, match=f"superseded by attempt {newer.summary.attempt}"):
        Ledger(recording).commit(id, older, PICKLE)
    assert recording.puts == []
    assert ledger.find(id).attempt == newer.summary.attempt


def test_an_attempt_that_is_superseded_between_its_puts_stops(store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    older = contents(id, attempt_at(1))
    upload(store, id, older)

    class Overtaken(Recording):
        def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
            nbytes = super().put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)
            save(store, "step-1", 2)
            return nbytes

    overtaken = Overtaken(store)
    with pytest.raises(WrongPhase, match="superseded"):
        Ledger(overtaken).commit(id, older, PICKLE)
    assert len(overtaken.puts) == 1
    assert ledger.find(id).accepted_us == 2


def held(store: Store, meanwhile: Callable[[], object]) -> Watched:
    """A store whose first put of a `.metadata` is held, by whoever knows what, until something else has happened."""

    def before(call: str, key: str) -> None:
        if call == "put" and key.endswith("/.metadata") and watched.before is before:
            watched.before = lambda _call, _key: None
            meanwhile()

    watched = Watched(store, before)
    return watched


@pytest.mark.parametrize("there", ["nothing", "an older one", "a stock one"])
def test_an_attempt_that_is_held_before_its_last_put_does_not_replace_a_newer_one(
    root: Path, store: Store, ledger: Ledger, there: str
) -> None:
    if there == "a stock one":
        save_stock(root, "step-1")
    elif there == "an older one":
        save(store, "step-1", 1)
    id = CheckpointId.parse("step-1")
    older = contents(id, attempt_at(2))
    upload(store, id, older)
    newer: list[Manifest] = []
    with pytest.raises(WrongPhase, match="superseded"):
        Ledger(held(store, lambda: newer.append(save(store, "step-1", 3)))).commit(id, older, PICKLE)
    entry = ledger.find(id)
    assert entry.attempt == newer[0].summary.attempt
    assert ledger.manifest(entry) == newer[0]


def test_an_attempt_that_is_held_while_an_older_one_is_put_is_committed_again(root: Path, store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    meanwhile: list[Callable[[], object]] = [
        lambda: save(store, "step-1", 1),
        lambda: store.delete([metadata_key(id)]),
        lambda: save_stock(root, "step-1"),
    ]
    for us, happens in enumerate(meanwhile, start=2):
        manifest = contents(id, attempt_at(us))
        upload(store, id, manifest)
        slow = Ledger(held(store, happens))
        with pytest.raises(Unavailable, match="commit it again"):
            slow.commit(id, manifest, PICKLE)
        slow.commit(id, manifest, PICKLE)
        assert ledger.manifest(ledger.find(id)) == manifest


def test_a_last_put_that_is_sent_twice_because_its_answer_was_lost_is_a_commit(store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    save(store, "step-1", 1)
    manifest = contents(id, attempt_at(2))
    upload(store, id, manifest)

    class SentTwice(Recording):
        def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
            super().put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)
            return super().put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)

    twice = SentTwice(store)
    Ledger(twice).commit(id, manifest, PICKLE)
    assert twice.puts[2:] == ["step-1/.metadata"] * 2
    assert ledger.manifest(ledger.find(id)) == manifest


def test_with_only_new_what_came_after_the_last_look_is_not_replaced(store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(2))
    upload(store, id, manifest)
    slow = Ledger(held(store, lambda: save(store, "step-1", 1)))
    with pytest.raises(Unavailable, match="commit it again"):
        slow.commit(id, manifest, PICKLE, only_new=True)
    with pytest.raises(InvalidRequest, match="durable already"):
        slow.commit(id, manifest, PICKLE, only_new=True)
    assert ledger.find(id).accepted_us == 1


def test_a_newer_attempt_and_a_stock_checkpoint_are_replaced(root: Path, store: Store, ledger: Ledger) -> None:
    save(store, "step-1", 1)
    newer = save(store, "step-1", 2)
    assert ledger.find(CheckpointId.parse("step-1")).attempt == newer.summary.attempt
    save_stock(root, "step-2", modified=9e9)
    ours = save(store, "step-2", 3)
    assert ledger.find(CheckpointId.parse("step-2")).attempt == ours.summary.attempt


@pytest.mark.parametrize(("present", "kind"), [(None, NotFound), (199, Corrupt), (201, Corrupt), (0, Corrupt)])
def test_nothing_is_committed_over_a_data_file_that_is_not_there_whole(
    store: Store, ledger: Ledger, present: int | None, kind: type[Exception]
) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1))
    key = data_key(id, manifest.shards[0].file)
    if present is not None:
        store.put(key, lambda: [bytes(present)])
    with pytest.raises(kind, match=key):
        ledger.commit(id, manifest, PICKLE)
    assert names(ledger) == []


@pytest.mark.parametrize("attempt", ["", "1", "z" * 24, "../../../../../../../../x"])
def test_an_attempt_that_names_no_manifest_is_refused_before_anything_is_put(store: Store, attempt: str) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1))
    manifest.summary.attempt = attempt
    upload(store, id, manifest)
    recording = Recording(store)
    with pytest.raises(InvalidRequest):
        Ledger(recording).commit(id, manifest, PICKLE)
    assert recording.puts == []


def test_a_checkpoint_without_any_item_can_be_committed(ledger: Ledger) -> None:
    id = CheckpointId.parse("step-0")
    summary = Summary(id="step-0", attempt=attempt_at(1), codec="zstd:1")
    manifest = Manifest(summary=summary, shards=[StoredShard(table=Table())], block_nbytes=BLOCK)
    ledger.commit(id, manifest, PICKLE)
    assert ledger.manifest(ledger.find(id)) == manifest


def test_a_tail_that_is_replaced_while_it_is_read_is_looked_at_again(store: Store) -> None:
    save(store, "step-1", 1)
    recording = Recording(store)
    newer: list[Manifest] = []

    def replace(_: str) -> None:
        recording.before_get = lambda _: None
        id = CheckpointId.parse("step-1")
        manifest = contents(id, attempt_at(2))
        upload(store, id, manifest)
        Ledger(store).commit(id, manifest, pickle.dumps({"state_dict_metadata": {"longer": "x" * 2000}}, protocol=2))
        newer.append(manifest)

    recording.before_get = replace
    entry = Ledger(recording).find(CheckpointId.parse("step-1"))
    assert entry.attempt == newer[0].summary.attempt
    assert entry.metadata.nbytes == newer[0].metadata_nbytes


def test_a_checkpoint_that_is_deleted_while_it_is_listed_is_left_out(store: Store) -> None:
    save(store, "step-1", 1)
    recording = Recording(store)
    recording.before_get = lambda key: store.delete([key])
    assert Ledger(recording).entries() == []


# --- deletions -----------------------------------------------------------------------------------------------------


def bury(store: Store, root: Path, name: str, save_id: str, *, before: float) -> str:
    """Puts the tombstone of a save, `before` seconds before now by the store's clock."""
    key = f"{name}/.ckptd/{tombstone.name(int(time.time() * 1e6))}"
    store.put(key, lambda: [tombstone.encode(Tombstone(id=name, save_id=save_id))])
    then = time.time() - before
    os.utime(root / key, (then, then))
    return key


@pytest.mark.parametrize("before", [0, 2, 60])
def test_a_commit_does_not_count_while_a_deletion_of_the_id_may_still_undo_it(
    root: Path, store: Store, ledger: Ledger, before: int
) -> None:
    id = CheckpointId.parse("step-1")
    save(store, "step-1", 1)
    old = ledger.find(id)
    key = bury(store, root, "step-1", str(old.save_id), before=before)
    manifest = contents(id, attempt_at(2))
    upload(store, id, manifest)
    if before < 10:
        with pytest.raises(Unavailable, match="deletion"):
            ledger.commit(id, manifest, PICKLE)
        store.delete([metadata_key(id)])  # what the deletion may do
        os.utime(root / key, (time.time() - 60,) * 2)
    ledger.commit(id, manifest, PICKLE)
    assert ledger.find(id).attempt == manifest.summary.attempt


def test_a_deletion_that_has_ended_in_this_process_threatens_nothing(root: Path, store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    ledger.ended_deletions.add(bury(store, root, "step-1", "", before=0))
    manifest = contents(id, attempt_at(2))
    upload(store, id, manifest)
    ledger.commit(id, manifest, PICKLE)
    assert ledger.find(id).attempt == manifest.summary.attempt


def test_an_attempt_that_was_deleted_does_not_come_back(root: Path, store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    manifest = save(store, "step-1", 1)
    ledger.ended_deletions.add(bury(store, root, "step-1", str(ledger.find(id).save_id), before=0))
    store.delete([metadata_key(id)])
    with pytest.raises(WrongPhase, match="has been deleted"):
        ledger.commit(id, manifest, PICKLE)
    assert ledger.entries() == []


@pytest.mark.parametrize("there", ["nothing", "an older one", "a stock one"])
def test_an_attempt_that_was_deleted_before_it_was_durable_never_is(root: Path, store: Store, ledger: Ledger, there: str) -> None:
    id = CheckpointId.parse("step-1")
    if there == "an older one":
        save(store, "step-1", 1)
    if there == "a stock one":
        save_stock(root, "step-1")
    before = ledger.entries()
    refused, other = contents(id, attempt_at(3)), contents(id, attempt_at(2))
    Sweeper(store, ledger).refuse(id, refused.summary.attempt)
    upload(store, id, refused)
    with pytest.raises(WrongPhase, match="has been deleted"):
        ledger.commit(id, refused, PICKLE)
    with pytest.raises(WrongPhase, match="has been deleted"):
        ledger.stands(id, refused.summary.attempt)
    assert ledger.entries() == before
    # It is no deletion of anything else.
    upload(store, id, other)
    ledger.commit(id, other, PICKLE)
    assert ledger.find(id).attempt == other.summary.attempt


def test_an_attempt_that_was_deleted_does_not_replace_what_stock_has_saved_since(store: Store, ledger: Ledger) -> None:
    id = CheckpointId.parse("step-1")
    manifest = save(store, "step-1", 1)
    Sweeper(store, ledger).delete(ledger.find(id))
    saved.save_stock(store, "step-1", {"__0_0.distcp": b"data"})
    before = store.get(metadata_key(id))
    with pytest.raises(WasDeleted):
        Ledger(store).commit(id, manifest, PICKLE)
    assert store.get(metadata_key(id)) == before


@pytest.mark.parametrize("late", [False, True])
def test_a_deletion_that_a_commit_meets_at_its_last_put_counts(root: Path, store: Store, late: bool) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1))
    upload(store, id, manifest)
    recording = Recording(store)

    def delete(key: str) -> None:
        if key == metadata_key(id) and late:  # what another node had committed of the same attempt
            bury(store, root, "step-1", f"{manifest.summary.attempt}-{mint_token()}.manifest", before=0)
        elif key == metadata_key(id):
            Sweeper(store, Ledger(store)).refuse(id, manifest.summary.attempt)

    recording.after_put = delete
    with pytest.raises(WasDeleted) as raised:
        Ledger(recording).commit(id, manifest, PICKLE)
    assert raised.value.entry == Ledger(store).find(id)
    Sweeper(store, Ledger(store)).delete(raised.value.entry)
    assert Ledger(store).entries() == []


def test_a_file_that_went_during_the_commit_is_noticed(store: Store) -> None:
    id = CheckpointId.parse("step-1")
    manifest = contents(id, attempt_at(1))
    upload(store, id, manifest)
    recording = Recording(store)
    recording.after_put = lambda key: store.delete([data_key(id, manifest.shards[0].file)]) if key == metadata_key(id) else None
    ledger = Ledger(recording)
    with pytest.raises(NotFound, match="upload it again"):
        ledger.commit(id, manifest, PICKLE)
    assert ledger.stands(id, manifest.summary.attempt) is None
    # `.metadata` is there, and says that the attempt is durable: with the file in place it is committed all the same.
    recording.after_put = lambda _: None
    again = contents(id, manifest.summary.attempt)
    upload(store, id, again)
    ledger.commit(id, again, PICKLE)
    assert [shard.file for shard in ledger.manifest(ledger.find(id)).shards] == [shard.file for shard in again.shards]
    assert ledger.stands(id, manifest.summary.attempt) is not None


@pytest.mark.parametrize("at", [".manifest", ".metadata"])
def test_what_another_node_commits_of_the_same_attempt_counts_as_done(store: Store, ledger: Ledger, at: str) -> None:
    id = CheckpointId.parse("step-1")
    ours = contents(id, attempt_at(1))
    theirs = contents(id, ours.summary.attempt)
    upload(store, id, ours)
    upload(store, id, theirs)

    def forestall(call: str, key: str) -> None:
        if call == "put" and key.endswith(at):
            ledger.commit(id, theirs, PICKLE)
            store.delete([data_key(id, ours.shards[0].file)])

    Ledger(Watched(store, before=forestall)).commit(id, ours, PICKLE)
    assert ledger.manifest(ledger.find(id)).shards[0].file == theirs.shards[0].file
