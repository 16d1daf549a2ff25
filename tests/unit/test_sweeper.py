"""What a deletion takes away and when; what a sweep takes for debris; and all that neither ever touches."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd import sweeper as rooms
from ckptd import tombstone
from ckptd.debris import VOID_SECONDS
from ckptd.errors import Corrupt, NotFound, StoreError, Unavailable, WrongPhase
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, mint_attempt, mint_token
from ckptd.store import Store, temporary_name
from ckptd.sweeper import Sweeper, Swept, links
from ckptd.tombstone import COMMIT_SECONDS, DELETION_SECONDS, REFUSAL_SECONDS
from ckptd.v1.manifest_pb2 import Tombstone
from saved import PICKLE, DictStore, Stop, Watched, contents, save, save_stock, stopping, upload

HOUR = 3600.0
DAY = 24 * HOUR
GRACE = {"delete_grace_seconds": HOUR, "orphan_age_seconds": DAY}
AT_ONCE = {"delete_grace_seconds": 0.0, "orphan_age_seconds": 0.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    store = LocalStore(root)
    store.probe()
    return store


@pytest.fixture
def sweeper(store: Store) -> Sweeper:
    return Sweeper(store, Ledger(store))


def an_id(name: str) -> CheckpointId:
    return CheckpointId.parse(name)


def delete(store: Store, name: str) -> None:
    """By another process."""
    ledger = Ledger(store)
    Sweeper(store, ledger).delete(ledger.find(an_id(name)))


def sweep(store: Store, run: str | None = None, **options: Any) -> Swept:
    """By another process."""
    return Sweeper(store, Ledger(store)).sweep(run, **{**GRACE, **options})


def later(seconds: float) -> float:
    return time.time() + seconds


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink()}


def of_kind(root: Path, kind: str) -> list[str]:
    return sorted(name for name in files(root) if name.endswith(kind))


def age(root: Path, seconds: float, name: str = "") -> None:
    """Makes all files below look older."""
    for path in (root / name).rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


def refers(store: Store, name: str) -> set[str]:
    """Keys that the checkpoint consists of."""
    ledger = Ledger(store)
    entry = ledger.find(an_id(name))
    assert entry.save_id is not None
    names = [shard.file for shard in ledger.manifest(entry).shards if shard.file]
    return {f"{name}/{one}" for one in [".metadata", f".ckptd/{entry.save_id}", *names]}


def whole(store: Store, name: str) -> bool:
    return refers(store, name) <= {found.key for found in store.list()}


class Once:
    """Calls at the n-th time that a watched store is called like this."""

    def __init__(self, call: str, key: Callable[[str], bool], count: int, then: Callable[[], None]) -> None:
        self.wanted = (call, key)
        self.left = count
        self.then = then

    def __call__(self, call: str, key: str) -> None:
        if call == self.wanted[0] and self.wanted[1](key):
            self.left -= 1
            if self.left == 0:
                self.then()


# --- deleting ------------------------------------------------------------------------------------------------------


def test_a_deleted_checkpoint_is_gone_at_once_and_its_files_stay_for_the_grace(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "run/step-1", 1, ranks=3)
    save(store, "run/step-2", 2)
    parts = refers(store, "run/step-1")
    deleted = sweeper.delete(sweeper.ledger.find(an_id("run/step-1")))
    nbytes = sum((root / key).stat().st_size for key in parts - {"run/step-1/.metadata"})
    assert (str(deleted.id), deleted.files, deleted.nbytes) == ("run/step-1", 3, nbytes)
    assert [str(entry.id) for entry in sweeper.ledger.entries()] == ["run/step-2"]
    assert parts - {"run/step-1/.metadata"} <= files(root)

    assert sweep(store, now=later(HOUR - 60)) == Swept(later_files=3, later_nbytes=nbytes)
    assert parts - {"run/step-1/.metadata"} <= files(root)
    assert sweep(store, now=later(HOUR)) == Swept(files=3, nbytes=nbytes)
    assert not (root / "run/step-1").exists()
    assert whole(store, "run/step-2")
    assert sweep(store, now=later(9 * HOUR)) == Swept()


def test_the_tombstone_comes_first_and_metadata_goes_last(store: Store) -> None:
    save(store, "a", 1)
    effects: list[str] = []
    watched = Watched(store, after=lambda call, key: effects.append(f"{call} {key}") if call in ("put", "delete") else None)
    ledger = Ledger(watched)
    ledger.pin(an_id("a"))
    effects.clear()
    Sweeper(watched, ledger).delete(ledger.find(an_id("a")))
    first, *rest = effects
    assert first.startswith("put a/.ckptd/")
    assert first.endswith(".deleted")
    assert rest == ["delete a/.ckptd/pin", "delete a/.metadata"]


def test_without_a_grace_the_files_go_with_the_next_sweep(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "a", 1, ranks=3)
    sweeper.delete(sweeper.ledger.find(an_id("a")))
    assert sweeper.sweep(None, **AT_ONCE).files == 3
    assert files(root) == set()


def test_another_process_keeps_the_tombstone_until_no_other_deletion_can_be_under_way(root: Path, store: Store) -> None:
    save(store, "a", 1)
    delete(store, "a")
    assert sweep(store, **AT_ONCE).files == 2
    assert files(root) == {*of_kind(root, ".deleted")} != set()
    assert sweep(store, now=later(DELETION_SECONDS), **AT_ONCE) == Swept()
    assert files(root) == set()


def test_that_an_attempt_was_deleted_before_it_was_durable_is_remembered_for_a_day(root: Path, store: Store, sweeper: Sweeper) -> None:
    found = contents("a", mint_attempt(1, None))
    sweeper.refuse(an_id("a"), found.summary.attempt)
    save(store, "b", 1)
    sweeper.refuse(an_id("b"), found.summary.attempt)
    kept = of_kind(root, ".refused")
    assert len(kept) == 2
    assert sweep(store, now=later(REFUSAL_SECONDS - 60), **AT_ONCE) == Swept()
    assert of_kind(root, ".refused") == kept
    upload(store, found)
    with pytest.raises(WrongPhase, match="has been deleted"):
        Ledger(store).commit(an_id("a"), found, PICKLE)
    sweep(store, now=later(REFUSAL_SECONDS), **AT_ONCE)
    assert files(root) == refers(store, "b")


def test_what_was_saved_again_is_not_deleted(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "a", 1)
    entry = sweeper.ledger.find(an_id("a"))
    save(store, "a", 2)
    before = files(root)
    with pytest.raises(WrongPhase, match="saved again"):
        sweeper.delete(entry)
    assert files(root) == before
    assert whole(store, "a")


def test_what_has_been_deleted_since_it_was_seen_is_not_deleted_again(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "ours", 1)
    save_stock(store, "stock", {"__0_0.distcp": b"x"})
    for name in ("ours", "stock"):
        entry = sweeper.ledger.find(an_id(name))
        delete(store, name)
        before = files(root)
        with pytest.raises(WrongPhase, match="deleted meanwhile"):
            sweeper.delete(entry)
        assert files(root) == before


@pytest.mark.parametrize("by", ["us", "stock", "nobody"])
def test_what_is_saved_again_while_it_is_being_deleted_stays(root: Path, store: Store, by: str) -> None:
    """The new save's `.metadata` comes after the tombstone; its committer sees the tombstone, and here gives up looking."""
    save_stock(store, "a", {"__0_0.distcp": b"old"})
    newer = contents("a", mint_attempt(2, None))
    upload(store, newer)

    def save_now(call: str, key: str) -> None:
        if call == "put" and key.endswith(".deleted"):
            if by == "us":
                with pytest.raises(Unavailable, match="deletion"):
                    Ledger(store).commit(an_id("a"), newer, PICKLE)
            elif by == "stock":
                save_stock(store, "a", {"__0_0.distcp": b"new"})
            else:
                store.delete(["a/.metadata"])

    watched = Watched(store, after=save_now)
    ledger = Ledger(watched)
    with pytest.raises(WrongPhase, match="deleted meanwhile" if by == "nobody" else "saved again"):
        Sweeper(watched, ledger).delete(ledger.find(an_id("a")))
    assert of_kind(root, ".deleted") == []
    if by == "us":
        assert whole(store, "a")
        Ledger(store).commit(an_id("a"), newer, PICKLE)
    elif by == "stock":
        assert (root / "a" / "__0_0.distcp").read_bytes() == b"new"


def test_a_damaged_one_that_is_saved_again_while_it_is_being_deleted_stays(root: Path, store: Store) -> None:
    save(store, "a", 1)
    (root / "a" / ".metadata").write_bytes(b"damaged")
    newer = contents("a", mint_attempt(2, None))
    upload(store, newer)

    def save_now(call: str, key: str) -> None:
        if key.endswith(".deleted") and call == "put":
            with pytest.raises(Unavailable):
                Ledger(store).commit(an_id("a"), newer, PICKLE)

    watched = Watched(store, after=save_now)
    ledger = Ledger(watched)
    with pytest.raises(WrongPhase):
        Sweeper(watched, ledger).delete(ledger.find(an_id("a")))
    assert whole(store, "a")


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("by", ["us", "stock"])
def test_a_deletion_that_is_held_before_it_takes_metadata_away_does_not_take_a_newer_one(
    root: Path, store: Store, by: str, pinned: bool
) -> None:
    save(store, "a", 1)
    if pinned:
        Ledger(store).pin(an_id("a"))

    def held(call: str, key: str) -> None:
        if (call, key) == ("delete", "a/.metadata"):
            watched.before = lambda _call, _key: None
            age(root, 60.0)  # so long that a commit thinks nothing of the tombstone
            if by == "us":
                save(store, "a", 2)
            else:
                save_stock(store, "a", {"__0_0.distcp": b"new"})

    watched = Watched(store, before=held)
    ledger = Ledger(watched)
    with pytest.raises(WrongPhase, match="saved again"):
        Sweeper(watched, ledger).delete(ledger.find(an_id("a")))
    now = ledger.find(an_id("a"))
    assert now.pinned == pinned
    assert now.save_id is None if by == "stock" else now.accepted_us == 2
    assert of_kind(root, ".deleted") == []


def test_a_deletion_that_takes_too_long_gives_up(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, "a", 1)
    before = files(root)
    clock = [100.0]

    def slow(call: str, _key: str) -> None:
        clock[0] += 1.0 if call != "put" else 0.0

    watched = Watched(store, after=slow)
    ledger = Ledger(watched)
    entry = ledger.find(an_id("a"))
    monkeypatch.setattr(rooms.time, "monotonic", lambda: clock[0])
    watched.before = lambda call, _key: clock.__setitem__(0, clock[0] + (rooms.DELETE_SECONDS if call == "put" else 0.0))
    with pytest.raises(Unavailable, match="too long"):
        Sweeper(watched, ledger).delete(entry)
    assert files(root) == before
    watched.before = lambda _call, _key: None
    Sweeper(watched, ledger).delete(entry)
    assert ledger.entries() == []


def test_a_pin_goes_with_its_checkpoint_and_does_not_meet_the_next_one(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "a", 1)
    sweeper.ledger.pin(an_id("a"))
    sweeper.delete(sweeper.ledger.find(an_id("a")))
    age(root, 60)
    save(store, "a", 2)
    assert not Ledger(store).find(an_id("a")).pinned


@pytest.mark.parametrize("meets", ["a pin a deletion", "a deletion a pin"])
def test_of_a_pin_and_a_deletion_that_meet_one_succeeds(store: Store, meets: str) -> None:
    def pins(by: Store, name: str) -> bool:
        try:
            Ledger(by).pin(an_id(name))
        except NotFound:
            return False
        return True

    def deletes(by: Store, name: str) -> bool:
        ledger = Ledger(by)
        try:
            entry = ledger.find(an_id(name))
            if not entry.pinned:  # who deletes asks that first
                Sweeper(by, ledger).delete(entry)
        except WrongPhase:
            return False
        return not entry.pinned

    one, other = (pins, deletes) if meets == "a pin a deletion" else (deletes, pins)
    with ThreadPoolExecutor(1) as thread:
        for moment in range(100):
            name = f"a-{moment}"
            save(store, name, 1)
            beside: list[Future[bool]] = []
            left = [moment]

            def meet(_call: str, _key: str, *, name: str = name, left: list[int] = left, beside: list[Future[bool]] = beside) -> None:
                left[0] -= 1
                if left[0] == -1:
                    beside.append(thread.submit(other, store, name))
                    futures.wait(beside, 0.3)  # then it waits for this one

            did = one(Watched(store, before=meet), name)
            if not beside:  # it has fewer calls
                assert moment > 4
                return
            assert beside[0].result() is not did, moment
            there = [entry for entry in Ledger(store).entries() if entry.id == an_id(name)]
            assert [entry.pinned for entry in there] == [True] * (did if one == pins else not did)
    pytest.fail("it has no end")


def test_a_pin_that_a_killed_deletion_left_goes_with_the_files_but_never_from_what_is_there(root: Path, store: Store) -> None:
    for name in ("a", "b"):
        save(store, name, 1)
        Ledger(store).pin(an_id(name))
        age(root, 60)
        ledger = Ledger(store)
        Sweeper(store, ledger).delete(ledger.find(an_id(name)))
        store.put(f"{name}/.ckptd/pin", lambda: [b""])  # as if the process had died before it
        age(root, 60)
        then = time.time() - 30
        os.utime(root / of_kind(root, ".deleted")[-1], (then, then))
    save(store, "b", 2)
    sweep(store, now=later(HOUR))
    assert not (root / "a").exists()
    assert Ledger(store).find(an_id("b")).pinned


def test_what_stock_wrote_is_deleted_by_what_its_metadata_lists(root: Path, store: Store, sweeper: Sweeper) -> None:
    dcp.save({"w": torch.ones(10), "o": "text"}, checkpoint_id=root / "run/step-5", no_dist=True)
    (root / "run/step-5/README.md").write_text("mine")
    (root / "run/step-5/logs").mkdir()
    (root / "run/step-5/logs/events").write_text("mine")
    (root / "run/step-5/__9_9.distcp").write_text("not listed")
    age(root, 60)
    deleted = sweeper.delete(sweeper.ledger.find(an_id("run/step-5")))
    assert deleted.files == 1
    assert sweep(store, now=later(HOUR)).files == 1
    assert files(root) == {"run/step-5/README.md", "run/step-5/logs/events", "run/step-5/__9_9.distcp"}


def test_a_stock_one_that_cannot_be_read_is_left_alone(root: Path, store: Store, sweeper: Sweeper) -> None:
    save_stock(store, "a", {"__0_0.distcp": b"x"})
    (root / "a/.metadata").write_bytes((root / "a/.metadata").read_bytes()[:-1])
    before = files(root)
    with pytest.raises(Corrupt, match="by hand"):
        sweeper.delete(sweeper.ledger.find(an_id("a")))
    assert files(root) == before


def test_names_that_a_stock_metadata_must_not_have_are_never_deleted(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "a/b", 1)
    before = files(root)
    save_stock(store, "a", {"__0_0.distcp": b"x", "sub/part": b"y", "whole.bin": b"z"})
    listed = {"b/.metadata": 1, "b/.ckptd/x": 1, ".ckptd/y": 1, "__0_0.distcp": 1, "sub/part": 1, "whole.bin": 1, "gone": 1}
    listed |= {key.removeprefix("a/"): 1 for key in refers(store, "a/b")}
    from saved import stock_metadata

    store.put("a/.metadata", lambda: [stock_metadata(listed)])
    store.put("a/.ckptd/y", lambda: [b"foreign"])
    age(root, 60)
    assert sweeper.delete(sweeper.ledger.find(an_id("a"))).files == 4
    assert sweep(store, now=later(HOUR)).files == 3
    assert files(root) == before | {"a/.ckptd/y"}
    assert whole(store, "a/b")


def test_a_damaged_checkpoint_can_be_deleted_and_leaves_nothing(root: Path, store: Store) -> None:
    for name, damage in {"a": ".metadata", "b": "manifest", "c": "missing", "d": "both"}.items():
        save(store, name, 1, ranks=3)
        save(store, name, 2, ranks=3)
        entry = Ledger(store).find(an_id(name))
        if damage in (".metadata", "both"):
            (root / name / ".metadata").write_bytes(b"noise")
        if damage in ("manifest", "both"):
            (root / name / ".ckptd" / str(entry.save_id)).write_bytes(b"noise")
        if damage == "missing":
            (root / name / ".ckptd" / str(entry.save_id)).unlink()
        delete(store, name)
        assert not (root / name / ".metadata").exists()
        sweep(store, now=later(HOUR))
        if damage != "both":
            assert not (root / name).exists(), damage
    assert len(files(root / "d")) == 2, "nothing says that these files belonged to it"
    assert sweep(store, now=later(DAY)).later_files == 2
    assert sweep(store, now=later(DAY + HOUR)).files == 2
    assert files(root) == set()


def test_what_older_attempts_left_goes_with_the_checkpoint_and_a_newer_upload_stays(root: Path, store: Store) -> None:
    save(store, "a", 1)
    save(store, "a", 2)
    newer = contents("a", mint_attempt(3, None))
    upload(store, newer)
    with pytest.raises(Stop):
        Ledger(stopping(store, 0, after=True)).commit(an_id("a"), newer, PICKLE)
    delete(store, "a")
    assert sweep(store, now=later(HOUR)).files == 4
    assert len(files(root)) == 2
    assert f"a/{newer.shards[0].file}" in files(root)
    Ledger(store).commit(an_id("a"), newer, PICKLE)
    assert whole(store, "a")


def test_nothing_is_deleted_through_a_symbolic_link(root: Path, store: Store, sweeper: Sweeper) -> None:
    save(store, "run/step-1", 1)
    save(store, "run/step-2", 2)
    (root / "run/best").symlink_to("step-1")
    (root / "other").symlink_to("run")
    before = files(root)
    for name in ("run/best", "other/step-1"):
        with pytest.raises(WrongPhase, match="symbolic link"):
            sweeper.delete(sweeper.ledger.find(an_id(name)))
    assert files(root) == before
    reasons = {str(id): why for id, why in links(sweeper.ledger.entries("run")).items()}
    assert reasons == {"run/best": "it lies behind a symbolic link", "run/step-1": "the symbolic link run/best leads to it"}
    delete(store, "run/step-1")
    sweep(store, "other", **AT_ONCE, now=later(DAY))
    assert len(files(root / "run/step-1")) == 3
    sweep(store, **AT_ONCE, now=later(DAY))
    assert (root / "run/best").is_symlink()
    assert whole(store, "run/step-2")


# --- tombstones ----------------------------------------------------------------------------------------------------


def test_a_tombstone_whose_metadata_is_still_there_is_void_and_goes_alone(root: Path, store: Store) -> None:
    save(store, "ours", 1)
    save_stock(store, "stock", {"__0_0.distcp": b"x"})
    age(root, 60)
    before = files(root)
    for name in ("ours", "stock"):
        ledger = Ledger(stopping(store, 0, after=True))
        with pytest.raises(Stop):
            Sweeper(ledger._store, ledger).delete(ledger.find(an_id(name)))
    assert len(of_kind(root, ".deleted")) == 2
    assert sweep(store, **AT_ONCE) == Swept(), "the deletion may be under way"
    assert len(of_kind(root, ".deleted")) == 2
    assert sweep(store, now=later(VOID_SECONDS)) == Swept()
    assert files(root) == before
    assert whole(store, "ours")


def test_a_tombstone_of_another_save_than_the_one_that_is_there_counts(root: Path, store: Store) -> None:
    old = save(store, "a", 1)
    delete(store, "a")
    age(root, HOUR)
    new = save(store, "a", 2)
    sweep(store)
    assert of_kind(root, ".distcp") == [f"a/{new.shards[0].file}"] != [f"a/{old.shards[0].file}"]
    assert whole(store, "a")


def test_files_that_stock_wrote_again_stay_and_those_it_did_not_go(root: Path, store: Store) -> None:
    save_stock(store, "a", {"__0_0.distcp": b"old", "__1_0.distcp": b"old", "__2_0.distcp": b"old"})
    age(root, 60)
    delete(store, "a")
    (root / "a/__0_0.distcp").write_bytes(b"new")  # a save is under way: its .metadata comes later
    os.utime(root / "a/__0_0.distcp", (later(1), later(1)))
    assert sweep(store, now=later(HOUR)).files == 2
    assert files(root) == {"a/__0_0.distcp"}


def test_files_that_a_new_stock_save_refers_to_stay_even_if_they_look_older(root: Path, store: Store) -> None:
    save_stock(store, "a", {"__0_0.distcp": b"old", "__1_0.distcp": b"old"})
    age(root, 60)
    delete(store, "a")
    from saved import stock_metadata

    store.put("a/.metadata", lambda: [stock_metadata({"__0_0.distcp": 3})])
    os.utime(root / "a/.metadata", (later(5), later(5)))
    assert sweep(store, now=later(HOUR)).files == 1
    assert files(root) == {"a/__0_0.distcp", "a/.metadata"}


def test_of_the_same_moment_only_names_of_our_own_go(root: Path, store: Store) -> None:
    save_stock(store, "stock", {"__0_0.distcp": b"x"})
    save(store, "ours", 1)
    for name in ("stock", "ours"):
        delete(store, name)
    for path in root.rglob("*"):
        os.utime(path, (1e9, 1e9))
    sweep(store)
    assert files(root) == {"stock/__0_0.distcp"}


def test_where_no_times_are_told_only_names_of_our_own_go_and_by_the_deleters_clock() -> None:
    store = DictStore()
    save(store, "ours", 1)
    save_stock(store, "stock", {"__0_0.distcp": b"x"})
    save(store, "live", 1)
    upload(store, contents("live", mint_attempt(2, None)))
    for name in ("ours", "stock"):
        delete(store, name)
    kept = {*store.objects}
    assert sweep(store, now=later(HOUR - 60)).files == 0
    assert {*store.objects} == kept
    assert sweep(store, now=later(HOUR)).files == 2
    assert {key for key in store.objects if not key.startswith("live/")} == {"stock/__0_0.distcp"}
    assert sweep(store, now=later(9 * DAY)).files == 0, "orphans have no age"
    assert whole(store, "live")
    assert len([key for key in store.objects if key.startswith("live/__")]) == 2


def test_a_copied_directory_is_another_checkpoint_whatever_lists_came_with_it(root: Path, store: Store) -> None:
    old = save(store, "a", 1)
    delete(store, "a")
    age(root, 60)
    save(store, "a", 2)
    shutil.copytree(root / "a", root / "b")
    copied = files(root / "b")
    assert sweep(store, now=later(2 * HOUR)).files == 2
    assert copied < files(root / "b")
    assert whole(store, "a")
    assert whole(store, "b")
    # In the copy the list means nothing: what it named is found as superseded, and has a grace of its own.
    assert len(of_kind(root / "b", ".debris")) == 1
    sweep(store, now=later(DAY))
    assert of_kind(root, ".deleted") == []
    assert files(root / "b") == {key.removeprefix("b/") for key in refers(store, "b")}
    assert old.shards[0].file not in files(root / "b")


def test_a_copy_of_a_deleted_checkpoint_loses_nothing_to_its_tombstone(root: Path, store: Store) -> None:
    save(store, "a", 1)
    shutil.copytree(root / "a", root / "kept")
    delete(store, "a")
    shutil.copy(root / of_kind(root, ".deleted")[0], root / "kept/.ckptd")
    sweep(store, now=later(2 * DAY))
    assert files(root) == refers(store, "kept")


def test_a_checkpoint_that_was_restored_from_a_copy_is_not_deleted_again(root: Path, tmp_path: Path, store: Store) -> None:
    save(store, "ours", 1)
    save_stock(store, "stock", {"__0_0.distcp": b"x"})
    age(root, 60)
    shutil.copytree(root, tmp_path / "backup", copy_function=shutil.copy2)
    for name in ("ours", "stock"):
        delete(store, name)
    shutil.copytree(tmp_path / "backup", root, dirs_exist_ok=True, copy_function=shutil.copy2)
    before = files(tmp_path / "backup")
    sweep(store, now=later(HOUR))
    sweep(store, now=later(9 * DAY))
    assert files(root) == before


def test_files_that_are_being_copied_back_stay(root: Path, tmp_path: Path, store: Store) -> None:
    """Their names are our own, but they were written after the tombstone: their `.metadata` is to come."""
    save(store, "a", 1)
    shutil.copytree(root, tmp_path / "backup")
    delete(store, "a")
    age(root, 60)
    for name in files(tmp_path / "backup"):
        if not name.endswith(".metadata"):
            shutil.copyfile(tmp_path / "backup" / name, root / name)
    sweep(store, now=later(HOUR))
    shutil.copyfile(tmp_path / "backup/a/.metadata", root / "a/.metadata")
    sweep(store, now=later(9 * DAY))
    assert files(root) == files(tmp_path / "backup")


def test_what_stock_writes_between_the_look_and_the_last_look_stays(root: Path, store: Store) -> None:
    save_stock(store, "a", {"__0_0.distcp": b"old", "__1_0.distcp": b"old"})
    age(root, 60)
    delete(store, "a")
    age(root, 60)
    once = Once("list", lambda key: key == "a/__", 1, lambda: store.put("a/__0_0.distcp", lambda: [b"new"]) and None)
    sweep(Watched(store, after=once), now=later(HOUR))
    assert files(root) == {"a/__0_0.distcp"}
    assert (root / "a/__0_0.distcp").read_bytes() == b"new"


def test_a_damaged_tombstone_deletes_nothing_and_stays(root: Path, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    save_stock(store, "a", {"__0_0.distcp": b"x"})
    age(root, 60)
    delete(store, "a")
    (path,) = (root / name for name in of_kind(root, ".deleted"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = files(root)
    assert sweep(store, now=later(9 * DAY)) == Swept()
    assert files(root) == before
    assert path.name in caplog.text


def test_a_tombstone_from_the_future_waits_unless_there_is_no_grace(root: Path, store: Store) -> None:
    save(store, "a", 1)
    delete(store, "a")
    age(root, -2 * HOUR)
    assert sweep(store, now=later(HOUR)).files == 0
    assert sweep(store, now=later(0), **AT_ONCE).files == 2


def test_a_clock_that_is_ahead_of_the_stores_deletes_nothing_early(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, "a", 1)
    delete(store, "a")
    upload(store, contents("b", mint_attempt(2, None)))
    before = files(root)
    real = time.time
    monkeypatch.setattr(rooms.time, "time", lambda: real() + 9 * DAY)
    assert sweep(store).files == 0
    assert files(root) == before
    age(root, HOUR)
    assert sweep(store).files == 2


# --- what overwritten saves left -----------------------------------------------------------------------------------


def test_what_an_overwrite_left_is_listed_first_and_goes_after_the_grace(root: Path, store: Store) -> None:
    save(store, "a", 1, ranks=3)
    save(store, "a", 2, ranks=3)
    save(store, "a", 3, ranks=2)
    kept = refers(store, "a")
    before = files(root)
    left = before - kept
    told = sweep(store)
    assert (told.files, told.later_files) == (0, 6)
    assert {*of_kind(root, ".debris")} == files(root) - before
    assert len(of_kind(root, ".debris")) == 1
    assert sweep(store, now=later(HOUR - 60)).later_files == 6
    assert len(of_kind(root, ".debris")) == 1, "what is listed is not listed again"
    assert sweep(store, now=later(HOUR)).files == 6
    assert files(root) == kept == before - left


def test_without_a_grace_it_goes_at_once(root: Path, store: Store) -> None:
    save(store, "a", 1)
    save(store, "a", 2)
    assert sweep(store, delete_grace_seconds=0.0).files == 2
    assert files(root) == refers(store, "a")


def test_only_what_a_manifest_of_an_older_attempt_lists_is_superseded(root: Path, store: Store) -> None:
    save(store, "a", 2)
    unfinished = contents("a", mint_attempt(1, None))
    upload(store, unfinished)
    newer = contents("a", mint_attempt(3, None))
    upload(store, newer)
    watched = stopping(store, 0, after=True)
    with pytest.raises(Stop):  # its manifest is there, its .metadata is not
        Ledger(watched).commit(an_id("a"), newer, PICKLE)
    before = files(root)
    assert sweep(store, delete_grace_seconds=0.0) == Swept()
    assert files(root) == before


def test_another_manifest_of_the_same_attempt_is_no_more_than_an_orphan(root: Path, store: Store) -> None:
    """Another node may be committing it, and put its `.metadata` over this one any moment."""
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    with pytest.raises(Stop):
        Ledger(stopping(store, 0, after=True)).commit(an_id("a"), found, PICKLE)
    Ledger(store).commit(an_id("a"), found, PICKLE)
    assert len(of_kind(root, ".manifest")) == 2
    assert sweep(store, delete_grace_seconds=0.0) == Swept()
    assert len(of_kind(root, ".manifest")) == 2
    assert sweep(store, **AT_ONCE).files == 1
    assert files(root) == refers(store, "a")


# --- orphans -------------------------------------------------------------------------------------------------------


def test_what_an_upload_left_goes_when_all_of_it_is_old(root: Path, store: Store) -> None:
    first, second = contents("run/a", mint_attempt(1, None), ranks=3), contents("run/a", mint_attempt(2, None))
    upload(store, first)
    store.put(f"run/a/.ckptd/{mint_attempt(1, None)}-{mint_token()}.manifest", lambda: [b"x"])
    shutil.rmtree(root / "run/a/.ckptd")
    age(root, DAY)
    upload(store, second)
    before = files(root)
    assert sweep(store) == Swept()
    assert files(root) == before, "something of it is young: it may be under way"
    age(root, DAY)
    assert sweep(store).later_files == 3
    assert len(of_kind(root, ".debris")) == 1
    assert sweep(store, now=later(HOUR)).files == 3
    assert files(root) == set()


def test_a_commit_that_died_after_its_manifest_leaves_orphans(root: Path, store: Store) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    with pytest.raises(Stop):
        Ledger(stopping(store, 0, after=True)).commit(an_id("a"), found, PICKLE)
    assert len(files(root)) == 2
    assert sweep(store, now=later(DAY - 60)) == Swept()
    assert len(files(root)) == 2
    sweep(store, now=later(DAY))
    assert sweep(store, now=later(DAY + HOUR)).files == 2
    assert files(root) == set()


def test_foreign_files_are_never_touched(root: Path, store: Store) -> None:
    save(store, "run/a", 1)
    upload(store, contents("run/b", mint_attempt(1, None)))
    foreign = [
        *("README", "run/notes.txt", "run/a/README.md", "run/a/.git/config", "run/a/events.out.tfevents.1", "run/a/logs/x"),
        *("run/a/__0_0.distcp", "run/b/__0_0.distcp", "run/b/__0_0123456789abcde.distcp", "run/b/__0_0123456789ABCDEF.distcp"),
        *("run/b/x__0_0123456789abcdef.distcp", "run/b/__0_0123456789abcdef.distcp.bak", "run/b/sub/__0_0123456789abcdef.distcp"),
        *("run/b/.ckptd/other", "run/b/.ckptd/x.manifest", "run/b/.ckptd/deep/x.manifest", "run/b/.ckptd.tmp", "run/b/.ckptd-x.tmp"),
        *("run/b/.ckptd-0123456789abcdef.tmp/mine", ".ckptd-0123456789abcdef.tmp/mine", ".ckptd-mine", "run/.ckptd/pin"),
        *("__0_0123456789abcdef.distcp", "-odd/__0_0123456789abcdef.distcp", "deep/er/still/__0_0123456789abcdef.distcp"),
    ]
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"mine")
    (root / "run/b/link").symlink_to("/etc/hostname")
    (root / "run/b/empty").mkdir()
    (root / "run/__1_0123456789abcdef.distcp").mkdir()
    kept = refers(store, "run/a")
    age(root, 9 * DAY)
    assert sweep(store, **AT_ONCE).files == 1
    sweep(store, now=later(9 * DAY))
    assert files(root) == {*foreign, "run/b/link", *kept}
    assert (root / "run/b/empty").is_dir()


def test_temporary_files_go_when_they_are_old(root: Path, store: Store) -> None:
    save(store, "run/a", 1)
    kept = files(root)
    name = temporary_name()
    left = [name, f"{temporary_name()}/{name}", f"x/{name}", f"run/a/{name}", f"run/a/.ckptd/{name}", f"run/b/{name}", f"x/.ckptd/{name}"]
    for one in left:
        (root / one).parent.mkdir(parents=True, exist_ok=True)
        (root / one).write_bytes(b"12")
    before = files(root)
    assert sweep(store, now=later(DAY - 60)).files == 0
    assert files(root) == before
    assert sweep(store, now=later(DAY), dry_run=True).files == 7
    swept = sweep(store, now=later(DAY))
    assert (swept.files, swept.nbytes) == (7, 14)
    assert files(root) == kept


def test_a_young_temporary_file_shows_that_an_upload_is_under_way(root: Path, store: Store) -> None:
    upload(store, contents("a", mint_attempt(1, None)))
    age(root, 2 * DAY)
    (root / "a" / temporary_name()).write_bytes(b"")
    assert sweep(store) == Swept()
    assert of_kind(root, ".debris") == []


# --- commits beside a sweep ----------------------------------------------------------------------------------------


def test_a_commit_of_files_that_are_listed_to_go_uploads_them_again(root: Path, store: Store) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    age(root, DAY)
    sweep(store)
    with pytest.raises(NotFound, match="upload it again"):
        Ledger(store).commit(an_id("a"), found, PICKLE)
    assert Ledger(store).entries() == []
    again = contents("a", found.summary.attempt)
    upload(store, again)
    Ledger(store).commit(an_id("a"), again, PICKLE)
    sweep(store, now=later(HOUR))
    assert whole(store, "a")
    sweep(store, now=later(DAY))
    sweep(store, now=later(2 * DAY))
    assert files(root) == refers(store, "a")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("call", ["list", "put"])
def test_a_commit_in_the_middle_of_a_sweep_without_any_grace_is_whole_or_fails(store: Store, call: str, count: int) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    outcome: list[str] = []

    def commit() -> None:
        try:
            Ledger(store).commit(an_id("a"), found, PICKLE)
            outcome.append("durable")
        except NotFound:
            outcome.append("upload again")

    watched = Watched(store, after=Once(call, lambda key: key.startswith("a/__") or key.endswith(".debris"), count, commit))
    sweep(watched, **AT_ONCE)
    if outcome == ["durable"]:
        assert whole(store, "a")
    else:
        assert Ledger(store).entries() == []
        assert outcome == ["upload again"] or (call, count) not in (("list", 1), ("list", 2), ("list", 3), ("put", 1))


@pytest.mark.parametrize("moment", ["its manifest", "the lists", "the files", "its metadata"])
def test_a_sweep_without_any_grace_in_the_middle_of_a_commit_leaves_it_whole_or_fails_it(root: Path, store: Store, moment: str) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)

    def sweep_now() -> None:
        sweep(store, **AT_ONCE)
        sweep(store, **AT_ONCE)

    once = {
        "its manifest": Once("put", lambda key: key.endswith(".manifest"), 1, sweep_now),
        "the lists": Once("list", lambda key: key == "a/.ckptd/", 1, sweep_now),
        "the files": Once("list", lambda key: key == "a/__", 2, sweep_now),
        "its metadata": Once("put", lambda key: key.endswith(".metadata"), 1, sweep_now),
    }[moment]
    Ledger(Watched(store, after=once)).commit(an_id("a"), found, PICKLE)
    assert once.left <= 0
    assert files(root) == refers(store, "a")


def test_a_commit_whose_files_a_list_names_already_takes_fresh_ones_whatever_the_sweep_does(root: Path, store: Store) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    listed = Tombstone(id="a", deleted_us=1, files=[found.shards[0].file])
    store.put(f"a/.ckptd/{tombstone.debris_name(1)}", lambda: [tombstone.encode(listed)])
    once = Once("put", lambda key: key.endswith(".manifest"), 1, lambda: None)
    with pytest.raises(NotFound, match="about to be swept"):
        Ledger(Watched(store, after=once)).commit(an_id("a"), found, PICKLE)
    assert once.left == 0
    assert Ledger(store).entries() == []
    assert sweep(store, **AT_ONCE).files == 0, "a manifest says that it may still be wanted"
    assert f"a/{found.shards[0].file}" in files(root)


def test_a_commit_asks_for_the_lists_before_it_asks_for_the_files(store: Store) -> None:
    """A sweep that looked before the manifest was there deletes the file, and then the list, while the commit looks."""
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    file, listed = f"a/{found.shards[0].file}", f"a/.ckptd/{tombstone.debris_name(1)}"
    note = Tombstone(id="a", deleted_us=1, files=[found.shards[0].file])
    for number in range(1, 8):
        upload(store, found)
        store.put(listed, lambda: [tombstone.encode(note)])
        once = Once("list", lambda _: True, number, lambda: store.delete([file, listed]))
        with pytest.raises(NotFound):
            Ledger(Watched(store, after=once)).commit(an_id("a"), found, PICKLE)
        assert Ledger(store).entries() == [], number


def test_a_commit_that_takes_too_long_after_its_manifest_starts_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    clock = [100.0]
    monkeypatch.setattr(rooms.time, "monotonic", lambda: clock[0])
    slow = Once("put", lambda key: key.endswith(".manifest"), 1, lambda: clock.__setitem__(0, 100.5 + COMMIT_SECONDS / 2))
    with pytest.raises(Unavailable, match="too long"):
        Ledger(Watched(store, after=slow)).commit(an_id("a"), found, PICKLE)
    assert Ledger(store).entries() == []
    Ledger(Watched(store, after=slow)).commit(an_id("a"), found, PICKLE)
    assert whole(store, "a")


def test_a_young_manifest_is_no_debris_whatever_age_is_asked_for(root: Path, store: Store) -> None:
    found = contents("a", mint_attempt(1, None))
    upload(store, found)
    with pytest.raises(Stop):
        Ledger(stopping(store, 0, after=True)).commit(an_id("a"), found, PICKLE)
    before = files(root)
    sweep(store, now=later(COMMIT_SECONDS - 60), **AT_ONCE)
    assert files(root) == before
    sweep(store, now=later(COMMIT_SECONDS), **AT_ONCE)
    assert files(root) == set()


# --- what cannot be read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["metadata", "manifest", "missing manifest", "older manifest", "newer manifest", "stock"])
def test_beside_what_cannot_be_read_nothing_goes(root: Path, store: Store, what: str, caplog: pytest.LogCaptureFixture) -> None:
    save(store, "a", 1)
    older = next((root / "a/.ckptd").iterdir())
    delete(store, "a")
    age(root, 60)
    save(store, "a", 2)
    if what == "stock":
        save_stock(store, "a", {"__0_0.distcp": b"x"})
    upload(store, contents("a", mint_attempt(3, None)))
    newest = max((root / "a/.ckptd").glob("*.manifest"))
    path = {"metadata": root / "a/.metadata", "older manifest": older, "stock": root / "a/.metadata"}.get(what, newest)
    if what == "missing manifest":
        path.unlink()
    elif what == "newer manifest":
        store.put(f"a/.ckptd/{mint_attempt(4, None)}-{mint_token()}.manifest", lambda: [b"noise"])
    elif what == "stock":
        path.write_bytes(path.read_bytes()[:-1])
        for one in (root / "a/.ckptd").glob("*.manifest"):
            one.unlink()  # else it would be a damaged one of ours
    else:
        then = path.stat().st_mtime
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, (then, then))
    before = files(root)
    caplog.set_level(logging.WARNING)
    told = sweep(store, now=later(9 * DAY))
    if what == "older manifest":  # its tombstone names it and its file; what is not listed stays
        assert told.files == 2
        assert len(before - files(root)) == 3
        assert whole(store, "a")
    else:
        assert told.files == 0
        assert files(root) == before
        assert "a/" in caplog.text or what == "missing manifest"


def test_a_damaged_manifest_that_nothing_lists_protects_all_files_beside_it(root: Path, store: Store) -> None:
    save(store, "a", 1)
    first = next((root / "a/.ckptd").iterdir())
    save(store, "a", 2)
    first.write_bytes(b"noise")
    before = files(root)
    sweep(store, now=later(9 * DAY))
    sweep(store, now=later(10 * DAY))
    assert files(root) == before


# --- the scope of a sweep ------------------------------------------------------------------------------------------


def test_a_sweep_of_one_run_leaves_the_others(root: Path, store: Store) -> None:
    names = ["a", "a/b", "c/d", "e"]
    for name in names:
        save(store, name, 1)
        delete(store, name)
    gone = {"a": {"a/b"}, "": {"a", "e"}, "c": {"c/d"}, "none": set()}
    for run in ("a", "none", "", "c"):
        told = sweep(store, run, now=later(HOUR))
        assert told.files == 2 * len(gone[run])
        names = [name for name in names if name not in gone[run]]
        assert {key.rpartition("/")[0] for key in of_kind(root, ".distcp")} == {*names}


def test_a_checkpoint_and_a_run_of_the_same_name_do_not_meet(root: Path, store: Store) -> None:
    save(store, "a", 1)
    save(store, "a/b", 1)
    save(store, "a/c", 1)
    delete(store, "a")
    sweep(store, now=later(9 * DAY))
    assert files(root) == refers(store, "a/b") | refers(store, "a/c")
    save(store, "a", 2)
    delete(store, "a/b")
    sweep(store, now=later(9 * DAY))
    assert files(root) == refers(store, "a") | refers(store, "a/c")


def test_busy_ids_are_left_alone(root: Path, store: Store) -> None:
    for name in ("run/a", "run/b"):
        save(store, name, 1)
        save(store, name, 2)
        upload(store, contents(name, mint_attempt(3, None)))
    before = files(root / "run/a")
    told = sweep(store, busy=[an_id("run/a")], **AT_ONCE)
    assert (told.files, told.later_files) == (3, 0)
    assert files(root / "run/a") == before


def test_a_dry_run_changes_nothing_and_says_what_would_happen(root: Path, store: Store) -> None:
    save(store, "a", 1)
    save(store, "a", 2)
    save(store, "b", 1)
    delete(store, "b")
    upload(store, contents("c", mint_attempt(3, None)))
    (root / temporary_name()).write_bytes(b"1")
    before = {name: (root / name).read_bytes() for name in files(root)}
    for options in (GRACE, {**GRACE, "now": later(HOUR)}, {**GRACE, "now": later(DAY)}, AT_ONCE):
        copy = root.with_name("copy")
        shutil.copytree(root, copy, copy_function=shutil.copy2)
        told = sweep(store, dry_run=True, **options)
        assert {name: (root / name).read_bytes() for name in files(root)} == before
        done = sweep(LocalStore(copy), **options)
        assert told == done
        shutil.rmtree(copy)


def test_uploads_of_other_runs_are_only_given_up_when_they_are_surely_nobodys() -> None:
    ages: list[float] = []

    class Bucket(DictStore):
        def abort_uploads(self, older_than_seconds: float) -> int:
            ages.append(older_than_seconds)
            return 3

    for run, options in ((None, {}), ("a", {}), ("a", {"orphan_age_seconds": 9 * DAY}), ("", {"orphan_age_seconds": 0.0})):
        assert sweep(Bucket(), run, **options).uploads == 3
    assert sweep(Bucket(), **AT_ONCE).uploads == 3
    assert sweep(Bucket(), dry_run=True).uploads == 0
    assert ages == [DAY, DAY, 9 * DAY, DAY, 0.0]


def test_a_checkpoint_without_debris_costs_two_listings_and_two_short_reads(store: Store) -> None:
    save(store, "run/a", 1, ranks=40)
    calls: list[tuple[str, str]] = []
    sweep(Watched(store, after=lambda call, key: calls.append((call, key))), "run")
    assert [call for call, _ in calls] == ["children", "list", "list", "get", "get"]


def test_a_store_that_cannot_be_read_or_written_is_an_error(tmp_path: Path, store: Store) -> None:
    with pytest.raises(StoreError):
        sweep(LocalStore(tmp_path / "nowhere"))
    save(store, "a", 1)
    save(store, "a", 2)

    def deny(wanted: str, error: type[Exception]) -> Callable[[str, str], None]:
        def before(call: str, key: str) -> None:
            if call == wanted:
                raise error(key)

        return before

    for call in ("list", "children", "get", "put", "delete"):
        for error in (StoreError, Unavailable):
            with pytest.raises(error):
                sweep(Watched(store, before=deny(call, error)), **AT_ONCE)
    sweep(store, now=later(HOUR))
    assert whole(store, "a")


# --- interruptions -------------------------------------------------------------------------------------------------


def scene(store: Store) -> None:
    """Something of everything: deleted, overwritten, cut off, stock, copied."""
    save(store, "run/kept", 1, ranks=3)
    save(store, "run/over", 1, ranks=3)
    save(store, "run/over", 2)
    save(store, "run/gone", 3, ranks=3)
    save_stock(store, "run/stock", {"__0_0.distcp": b"x", "__1_0.distcp": b"y"})
    save_stock(store, "run/stays", {"__0_0.distcp": b"x"})
    upload(store, contents("run/half", mint_attempt(4, None)))
    store.put("run/gone/README", lambda: [b"mine"])
    Ledger(store).pin(an_id("run/gone"))


def clean_up(store: Store) -> None:
    ledger = Ledger(store)
    sweeper = Sweeper(store, ledger)
    for name in ("run/gone", "run/stock"):
        try:
            entry = ledger.find(an_id(name))
        except NotFound:
            continue
        sweeper.delete(entry)
    sweeper.sweep(None, delete_grace_seconds=HOUR, orphan_age_seconds=DAY, now=later(DAY))
    sweeper.sweep(None, delete_grace_seconds=HOUR, orphan_age_seconds=DAY, now=later(2 * DAY))


def test_whatever_call_is_the_last_one_nothing_live_is_lost_and_the_next_one_goes_on(shm_dir: Path) -> None:
    root = shm_dir / "store"
    store = LocalStore(root)
    store.probe()
    scene(store)
    age(root, 60)
    kept = refers(store, "run/kept") | refers(store, "run/over")
    kept |= {"run/stays/__0_0.distcp", "run/stays/.metadata", "run/gone/README"}
    pristine = root.with_name("pristine")
    shutil.copytree(root, pristine, copy_function=shutil.copy2)
    moments = 0
    for after in (False, True):
        for number in range(1000):
            shutil.rmtree(root)
            shutil.copytree(pristine, root, copy_function=shutil.copy2)
            try:
                clean_up(stopping(store, number, after=after))
            except Stop:
                moments += 1
            else:
                break
            assert kept <= files(root), (number, after)
            for entry in Ledger(store).entries():
                if entry.save_id is not None:
                    assert whole(store, str(entry.id)), (number, after)
                elif str(entry.id) == "run/stock":
                    assert {"run/stock/__0_0.distcp", "run/stock/__1_0.distcp"} <= files(root), (number, after)
            clean_up(store)
            assert files(root) == kept, (number, after)
    assert moments >= 2 * 20
