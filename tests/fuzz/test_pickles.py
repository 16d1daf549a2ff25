"""Hostile pickles: never run, never believed, and never more than their length's worth of memory and time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fuzz import pickles, sandbox

#: Depth, width or number.
QUICK, THOROUGH = 60_000, 1_000_000
#: Seconds of processor time for the larger ones.
PATIENCE = 120
GOOD = {sandbox.RETURNED, "Corrupt"}


def sizes(quick: int, thorough: int) -> pytest.MarkDecorator:
    """A size, and seconds of processor time for it."""
    slow = pytest.param(thorough, PATIENCE, marks=[pytest.mark.slow, pytest.mark.timeout(1000)])
    return pytest.mark.parametrize(("size", "seconds"), [(quick, sandbox.ALLOWED_SECONDS), slow])


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """The file that a pickle makes if it is run."""
    return tmp_path / "witness"


def test_each_hostile_pickle_runs_its_command_in_pythons_own_unpickler(tmp_path: Path) -> None:
    # Otherwise the next test would state nothing.
    kinds = list(pickles.calling(""))
    cases = {kind: pickles.calling(f"touch {tmp_path}/{number}")[kind] for number, kind in enumerate(kinds)}
    sandbox.run("pickle", cases, tmp_path, audited=False)
    for _ in range(1000):  # some start a process and do not wait for it
        silent = [kind for number, kind in enumerate(kinds) if not (tmp_path / str(number)).exists()]
        if not silent:
            break
        time.sleep(0.05)
    assert silent == []


def test_no_hostile_pickle_is_run(witness: Path) -> None:
    command = f"touch {witness}"
    cases = pickles.calling(command) | pickles.calling_in_metadata(command)
    assert sandbox.run("metadata", cases, witness.parent) == dict.fromkeys(cases, "Corrupt")
    assert not witness.exists()


def test_names_that_checkpoints_have_are_not_called_either(witness: Path) -> None:
    cases = pickles.naming(str(witness))
    outcomes = sandbox.run("metadata", cases, witness.parent)
    assert set(outcomes.values()) <= GOOD
    assert not witness.exists()


def test_lengths_and_memo_numbers_are_not_believed(tmp_path: Path) -> None:
    cases = pickles.claiming()
    assert sandbox.run("metadata", cases, tmp_path) == dict.fromkeys(cases, "Corrupt")


def test_deep_nesting_ends_pythons_own_unpickler(tmp_path: Path) -> None:
    # Otherwise the next test would state nothing.
    case = {"a key": b"\x80\x02})" + b"\x85" * QUICK + b"Ns."}
    assert sandbox.run("pickle", case, tmp_path) == {"a key": "was ended by signal 11"}


@sizes(QUICK, THOROUGH)
def test_deep_nesting_takes_no_stack(tmp_path: Path, size: int, seconds: int) -> None:
    cases = pickles.nesting(size)
    outcomes = sandbox.run("metadata", cases, tmp_path, seconds=seconds)
    assert {what: told for what, told in outcomes.items() if told not in GOOD} == {}
    assert sandbox.RETURNED in outcomes.values()


@sizes(QUICK // 20, QUICK)
def test_what_is_shared_is_not_written_out(tmp_path: Path, size: int, seconds: int) -> None:
    outcomes = sandbox.run("metadata", pickles.laughing(200, size), tmp_path, seconds=seconds)
    assert {what: told for what, told in outcomes.items() if told not in GOOD} == {}


@sizes(QUICK // 2, THOROUGH // 2)
def test_nothing_that_the_input_chose_is_hashed(tmp_path: Path, size: int, seconds: int) -> None:
    outcomes = sandbox.run("metadata", pickles.colliding(size), tmp_path, seconds=seconds)
    assert {what: told for what, told in outcomes.items() if told not in GOOD} == {}
    assert {what for what, told in outcomes.items() if told == "Corrupt"} == {"offsets of chunks", "offsets of items", "shapes"}
