"""C47 and C48: keys that are not text, Counters, lists whose length has changed.

DCP makes every key text. What that does to a state is DCP's; here stands what it is, that
it is the same through ckptd, and that the second save says so instead of mixing anything up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from client.pairs import Pair
from daemons import DaemonProcess


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store)) as saving, DaemonProcess(str(store), memory="64MiB") as other:
        yield Pair(store, saving, other)


def loaded(pair: Pair, checkpoint_id: str, state: Any, template: Any, tmp_path: Path) -> Any:
    """What comes back, which is the same every way."""
    dcp.save({"x": state}, checkpoint_id=tmp_path / checkpoint_id)
    expected = {"x": template()}
    dcp.load(expected, checkpoint_id=tmp_path / checkpoint_id)
    pair.save(checkpoint_id, {"x": state})
    pair.wait(checkpoint_id)
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        found = load(checkpoint_id, {"x": template()})
        assert (found, type(found["x"])) == (expected, type(expected["x"]))
    return expected["x"]


def test_integer_keys_come_back_as_text_beside_the_old_ones(pair: Pair, tmp_path: Path) -> None:
    found = loaded(pair, "ints/step-1", {0: 1, 1: 2}, lambda: {0: -1, 1: -1}, tmp_path)
    assert found == {0: -1, 1: -1, "0": 1, "1": 2}


def test_integer_keys_without_a_template_come_back_as_text(pair: Pair, tmp_path: Path) -> None:
    found = loaded(pair, "text/step-1", {0: 1, 1: 2}, lambda: {"0": None, "1": None}, tmp_path)
    assert found == {"0": 1, "1": 2}


def test_what_came_back_with_both_keys_cannot_be_saved_again_and_says_which(pair: Pair, tmp_path: Path) -> None:
    both = {0: -1, "0": 1}
    for save in (lambda: dcp.save({"x": both}, checkpoint_id=tmp_path), lambda: pair.save("both/step-1", {"x": both})):
        with pytest.raises(CheckpointException, match=r"duplicated flatten key x\.0"):
            save()
    assert "both/step-1" not in pair.saving.list()


def test_tensors_below_integer_keys_are_filled_in_place(pair: Pair) -> None:
    pair.save("state/step-1", {"state": {0: {"m": torch.ones(3)}, 1: {"m": torch.ones(2)}}})
    found = pair.load_from_memory("state/step-1", {"state": {0: {"m": torch.zeros(3)}, 1: {"m": torch.zeros(2)}}})
    assert list(found["state"]) == [0, 1]
    assert torch.equal(found["state"][0]["m"], torch.ones(3))


def test_a_counter_is_a_container_and_its_counts_come_back_below_text(pair: Pair, tmp_path: Path) -> None:
    found = loaded(pair, "counter/step-1", Counter({25: 1, 26: 3}), lambda: Counter({25: 0, 26: 0}), tmp_path)
    assert found == Counter({25: 0, 26: 0, "25": 1, "26": 3})
    assert loaded(pair, "words/step-1", Counter("aab"), lambda: Counter("ab"), tmp_path) == Counter("aab")


def test_an_empty_counter_as_template_gets_nothing(pair: Pair, tmp_path: Path) -> None:
    assert loaded(pair, "none/step-1", Counter({25: 1}), Counter, tmp_path) == Counter()


def test_what_must_come_back_as_it_is_goes_in_as_one_object(pair: Pair, tmp_path: Path) -> None:
    value = (Counter({25: 1}), {0: 1})
    assert loaded(pair, "whole/step-1", value, lambda: None, tmp_path) == value


def test_a_list_of_dicts_is_missing_from_a_checkpoint_for_whom_the_list_was_empty(pair: Pair) -> None:
    """C48: a list of plain values is one object, a list with a dict in it is a container."""
    pair.save("lists/step-1", {"l": [{"a": 1}, {"a": 2}]})
    pair.wait("lists/step-1")
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: '?l'?\."):
            load("lists/step-1", {"l": []})
        with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: '?l\.2\.a'?\."):
            load("lists/step-1", {"l": [{"a": 0}, {"a": 0}, {"a": 0}]})
        assert load("lists/step-1", {"l": [{"a": 0}, {"a": 0}]}) == {"l": [{"a": 1}, {"a": 2}]}
        assert load("lists/step-1", {"l": [{"a": 0}]}) == {"l": [{"a": 1}]}


def test_the_error_about_a_list_shows_what_the_checkpoint_has(pair: Pair) -> None:
    pair.save("hint/step-1", {"l": [{"a": 1}, {"a": 2}]})
    with pytest.raises(CheckpointException, match=r"it has 'l\.0\.a', 'l\.1\.a'"):
        pair.load_from_memory("hint/step-1", {"l": []})


def test_a_list_of_plain_values_changes_its_length_freely(pair: Pair, tmp_path: Path) -> None:
    assert loaded(pair, "plain/step-1", [1, 2, 3], list, tmp_path) == [1, 2, 3]
    assert loaded(pair, "plain/step-2", [], lambda: [1, 2], tmp_path) == []
