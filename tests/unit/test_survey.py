"""What retention is told of the checkpoints in a store: the last good one must not go for one that nobody can load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId
from ckptd.retention import Policy, decide
from ckptd.survey import KnownDamage, survey
from saved import save, save_stock


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    store.probe()
    return store


def kept(store: LocalStore, keep_last: int = 1) -> dict[str, bool]:
    found = survey(store, Ledger(store), None)
    return {str(one.id): one.keep for one in decide([candidate for _, candidate in found], Policy(keep_last), 10**9)}


def data_file(store: LocalStore, name: str) -> Path:
    return next(Path(store.url, name).glob("*.distcp"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_whose_files_are_not_whole_saves_the_one_before_it(store: LocalStore, damage: str) -> None:
    for step in (1, 2, 3, 4):
        save(store, f"step-{step}", step)
    save(store, "other/step-1", 1)
    for step in (3, 4):
        DAMAGE[damage](data_file(store, f"step-{step}"))
    assert kept(store) == {"step-1": False, "step-2": True, "step-3": True, "step-4": True, "other/step-1": True}
    found = {str(candidate.id): candidate.damaged for _, candidate in survey(store, Ledger(store), None)}
    assert data_file(store, "step-2").name not in found["step-3"]
    assert [bool(found[f"step-{step}"]) for step in (1, 2, 3, 4)] == [False, False, True, True]


def test_a_whole_run_is_judged_as_it_is(store: LocalStore) -> None:
    for step in (1, 2, 3):
        save(store, f"step-{step}", step)
    assert kept(store, 2) == {"step-1": False, "step-2": True, "step-3": True}


def test_a_damaged_manifest_or_metadata_is_told(store: LocalStore) -> None:
    save(store, "step-1", 1)
    save(store, "step-2", 2)
    save_stock(store, "step-3", {"__0_0.distcp": b"data"})
    Path(store.url, "step-3/.metadata").write_bytes(Path(store.url, "step-3/.metadata").read_bytes()[:-9])
    manifest = next(Path(store.url, "step-2/.ckptd").glob("*.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    found = {str(candidate.id): candidate.damaged for _, candidate in survey(store, Ledger(store), None)}
    assert ".manifest is damaged" in found["step-2"]
    assert found["step-3"]
    assert kept(store) == {"step-1": True, "step-2": True, "step-3": True}


def test_what_was_found_damaged_takes_no_place_until_it_is_saved_again_or_whole(store: LocalStore) -> None:
    for step in (1, 2):
        save(store, f"step-{step}", step)
    save_stock(store, "stock/step-1", {"__0_0.distcp": b"data"})
    ledger, known = Ledger(store), KnownDamage()

    def told(id: str) -> str:
        return {str(candidate.id): candidate.damaged for _, candidate in survey(store, ledger, None, known=known)}[id]

    assert told("step-2") == told("stock/step-1") == ""
    for id in ("step-2", "stock/step-1"):
        known.found(ledger.find(CheckpointId.parse(id)), f"{id}/a file is damaged; load another checkpoint, as fallback=True does")
        assert told(id) == f"found when it was read: {id}/a file is damaged"
    assert told("step-1") == ""
    found = survey(store, ledger, "", known=known)
    assert [one.keep for one in decide([candidate for _, candidate in found], Policy(1), 10**9)] == [True, True]
    old = ledger.find(CheckpointId.parse("step-2"))
    save(store, "step-2", 3)
    assert told("step-2") == ""
    assert known.of(old)
    known.whole(ledger.find(CheckpointId.parse("stock/step-1")))
    assert told("stock/step-1") == ""


def test_of_what_was_found_damaged_the_last_are_remembered(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.survey.REMEMBERED", 2)
    ledger, known = Ledger(store), KnownDamage()
    for step in (1, 2, 3):
        save(store, f"step-{step}", step)
    first, second, third = (ledger.find(CheckpointId.parse(f"step-{step}")) for step in (1, 2, 3))
    for entry in (first, second, first, third):
        known.found(entry, "a file is damaged")
    assert [bool(known.of(entry)) for entry in (first, second, third)] == [True, False, True]


def test_what_is_busy_says_why(store: LocalStore) -> None:
    for step in (1, 2):
        save(store, f"step-{step}", step)
    Ledger(store).pin(CheckpointId.parse("step-2"))
    found = survey(store, Ledger(store), "", lambda entry: "a load reads it" if entry.id.name == "step-1" else "")
    assert [(candidate.busy, candidate.pinned) for _, candidate in found] == [("a load reads it", False), ("", True)]
