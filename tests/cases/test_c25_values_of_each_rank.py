"""C25: values that differ per rank. Under one key DCP keeps those of one rank; under keys of their own every rank gets its own back.

What is defined here: every rank gets the same rank's value, the one that stock's planner
keeps too, never a mixture; and a key that no rank saved is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from daemons import DaemonProcess
from worlds import World


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    store = str(tmp_path_factory.mktemp("store"))
    with DaemonProcess(store) as own, DaemonProcess(store, memory="64MiB") as other:
        yield {"own": own.address, "other": other.address, "store": store}


@pytest.fixture(scope="module")
def saved(world: World, place: dict[str, Any]) -> str:
    """Three ranks' checkpoint."""
    world.call("own_values", place=place, checkpoint_id="c25/step-1", size=3)
    return "c25/step-1"


def test_under_one_key_one_ranks_value_is_kept_whole_as_by_stock(world: World, place: dict[str, Any], saved: str) -> None:
    found = world.call("load_own_values", place=place, checkpoint_id=saved, size=3)[:3]
    for rank in found:
        assert {key: value for key, value in rank.items() if "rng" not in key} == {
            key: value for key, value in found[0].items() if "rng" not in key
        }
        assert rank["n"] in (0, 1, 2)
        for key in ("w", "k1", "k5"):
            assert len(set(rank[key])) == 1
            assert rank[key][0] in (0, 1, 2)
    # They are spread over the ranks: there is no rank whose values they all are.
    assert len({found[0][key][0] for key in ("w", "k1", "k2", "k3", "k4", "k5")}) > 1


def test_under_keys_of_their_own_every_rank_gets_its_own_back(world: World, place: dict[str, Any], saved: str) -> None:
    for rank, found in enumerate(world.call("load_own_values", place=place, checkpoint_id=saved, size=3)[:3]):
        assert found[f"rng.rank{rank}"] == [rank] * 4


def test_fewer_ranks_ignore_the_keys_of_those_that_are_gone(world: World, place: dict[str, Any], saved: str) -> None:
    for rank, found in enumerate(world.call("load_own_values", place=place, checkpoint_id=saved, size=2)[:2]):
        assert found[f"rng.rank{rank}"] == [rank] * 4
        assert len([key for key in found if key.startswith("rng.")]) == 1


def test_a_new_ranks_missing_key_is_an_error_on_every_rank_and_no_hang(world: World, place: dict[str, Any], saved: str) -> None:
    found = world.call("load_own_values", place=place, checkpoint_id=saved, size=4)
    for rank in found:
        assert rank["error"] == "missing"
        assert "'rng.rank3'" in rank["said"]


def test_a_new_rank_may_ask_for_what_there_is(world: World, place: dict[str, Any], saved: str) -> None:
    found = world.call("load_own_values", place=place, checkpoint_id=saved, size=4, partial=True)
    assert [rank[f"rng.rank{number}"] for number, rank in enumerate(found)] == [[0] * 4, [1] * 4, [2] * 4, [-7] * 4]
