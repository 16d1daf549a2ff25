"""What a scan finds, what it leaves out, and that its cost does not grow with the data files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd import codec, tombstone
from ckptd.errors import NotFound, StoreError
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, data_key, manifest_key, metadata_key, mint_attempt, mint_token, pin_key
from ckptd.scan import scan
from ckptd.store import Object
from ckptd.v1.manifest_pb2 import Item, Manifest, Stored, StoredShard, Summary, Table, Tombstone

PICKLE = b"\x80\x02N."


class Counting(LocalStore):
    """Counts its calls."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: Counter[str] = Counter()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.calls["get"] += 1
        return super().get(key, start, end)

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        self.calls["list"] += 1
        return super().list(prefix, temporary=temporary)

    def children(self, directory: str = "") -> tuple[list[Object], list[str]]:
        self.calls["children"] += 1
        return super().children(directory)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    store = Counting(tmp_path / "store")
    store.probe()
    return store


def save(store: LocalStore, name: str, us: int, ranks: int = 1) -> None:
    id = CheckpointId.parse(name)
    shards = []
    for rank in range(ranks):
        item = Item(fqn=b"t%d" % rank, kind=Item.OPAQUE_OBJECT, nbytes=4)
        stored = Stored(lengths=[4], hashes=codec.block_hash(bytes(4)))
        shards.append(
            StoredShard(rank=rank, file=f"__{rank}_{mint_token()}.distcp", nbytes=4, table=Table(items=[item], end=4), stored=[stored])
        )
        store.put(data_key(id, shards[-1].file), lambda: [bytes(4)])
    summary = Summary(id=name, attempt=mint_attempt(us, None), accepted_us=us, world_size=ranks, codec="none")
    Ledger(store).commit(id, Manifest(summary=summary, shards=shards, block_nbytes=4096), PICKLE)


def names(found: list) -> list[str]:
    return [str(entry.id) for entry in found]


@pytest.mark.parametrize("run", [None, "run"])
def test_what_a_list_costs_grows_with_checkpoints_and_not_with_files(store: Counting, run: str | None) -> None:
    costs = {}
    for ranks in (1, 40):
        for number in range(3):
            save(store, f"run/step-{number}", 10 * ranks + number, ranks)
        store.calls.clear()
        ledger = Ledger(store)
        entries = ledger.entries(run)
        assert [summary.world_size for summary in ledger.summaries(entries)] == [ranks] * 3
        costs[ranks] = dict(store.calls)
    assert costs[1] == costs[40]
    assert costs[1]["get"] == 2 * 3
    assert costs[1]["list"] == 3


def test_runs_and_checkpoints_of_the_same_name_stand_beside_each_other(store: Counting) -> None:
    for us, name in enumerate(("a", "a/b", "c/d"), start=1):
        save(store, name, us)
    assert names(scan(store, None).entries) == ["a", "a/b", "c/d"]
    assert names(scan(store, "").entries) == ["a"]
    assert names(scan(store, "a").entries) == ["a/b"]
    assert names(scan(store, "nothing").entries) == []


def test_what_has_not_become_a_checkpoint_is_told_and_what_was_deleted_is_not(store: Counting) -> None:
    save(store, "gone", 1)
    save(store, "half", 2)
    save(store, "x/kept", 3)
    for name in ("early", "x/early"):
        store.put(f"{name}/__0_{'0' * 16}.distcp", lambda: [b"data"])
    store.put("foreign/__0_0.distcp", lambda: [b"of a stock save that is on its way"])
    for name in ("gone", "half"):
        store.delete([f"{name}/.metadata"])
    store.put(f"gone/.ckptd/{tombstone.name(5)}", lambda: [tombstone.encode(Tombstone(id="gone"))])
    found = scan(store, None)
    assert names(found.entries) == ["x/kept"]
    told = {str(id): reason for id, reason in found.incomplete}
    assert list(told) == ["early", "half", "x/early"]
    assert "1 data file and no manifest" in told["early"]
    assert ".metadata is not" in told["half"]


def test_a_pin_is_seen_and_goes(store: Counting) -> None:
    save(store, "a", 1)
    ledger, id = Ledger(store), CheckpointId.parse("a")
    assert not ledger.find(id).pinned
    ledger.pin(id)
    assert ledger.find(id).pinned
    assert [entry.pinned for entry in ledger.entries()] == [True]
    ledger.unpin(id)
    ledger.unpin(id)
    assert not ledger.find(id).pinned
    for call in (ledger.pin, ledger.unpin):
        with pytest.raises(NotFound):
            call(CheckpointId.parse("b"))
    assert not (Path(store.url) / pin_key(CheckpointId.parse("b"))).exists()


def test_a_manifest_that_is_missing_does_not_hide_the_checkpoint(store: Counting) -> None:
    save(store, "a", 1)
    id = CheckpointId.parse("a")
    entry = Ledger(store).find(id)
    assert entry.save_id is not None
    store.delete([manifest_key(id, entry.save_id)])
    (again,) = scan(store, None).entries
    assert (again.save_id, again.manifest_nbytes) == (entry.save_id, None)
    assert "missing" in str(Ledger(store).summaries([again])[0])


def test_a_root_that_is_not_there_is_an_error_and_not_empty(tmp_path: Path) -> None:
    for run in (None, "", "run"):
        with pytest.raises(StoreError):
            scan(LocalStore(tmp_path / "nothing"), run)


def test_a_metadata_that_goes_while_it_is_looked_at_is_no_checkpoint(store: Counting) -> None:
    save(store, "a", 1)
    save(store, "b", 2)
    get = store.get

    def gone(key: str, start: int = 0, end: int | None = None) -> bytes:
        if key == metadata_key(CheckpointId.parse("a")):
            store.delete([key])
        return get(key, start, end)

    store.get = gone  # type: ignore[method-assign]
    assert names(scan(store, None).entries) == ["b"]
