"""C10 and C25's missing keys: what is missing is named, all of it; what is left out is not fetched; partial loads are asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import InvalidRequest
from ckptd_client import DaemonStorageReader
from client.pairs import Pair
from client.states import assert_equal, blank
from daemons import DaemonProcess
from worlds import World

MIB = 1024 * 1024


@pytest.fixture(scope="module", params=["none", "zstd:1"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store), "--codec", request.param) as saving, DaemonProcess(str(store), memory="64MiB") as other:
        made = Pair(store, saving, other)
        made.save("run/step-1", {"a": torch.ones(2), "b": torch.full((3,), 2.0), "o": {"n": 1, "gone": torch.empty(0, 4)}})
        made.wait("run/step-1")
        yield made


def failure_of(call: Any, *arguments: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(CheckpointException) as caught:
        call(*arguments, **options)
    (error, _) = caught.value.failures[0]
    assert isinstance(error, InvalidRequest), error
    return error


def test_fewer_keys_load_and_the_others_are_left_out(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ckptd_client"):
        for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
            assert_equal(load("run/step-1", {"a": torch.zeros(2)}), {"a": torch.ones(2)})
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ckptd_client")]
    assert said == ["ckptd: 2 keys of 'run/step-1' are not loaded: 'b', 'o.n'"] * 2


def test_a_load_of_everything_reports_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ckptd_client"):
        state = {"a": torch.zeros(2), "b": torch.zeros(3), "o": {"n": 0, "gone": torch.empty(0, 4)}}
        pair.load_from_memory("run/step-1", state)
    assert [record for record in caplog.records if record.name.startswith("ckptd_client")] == []
    assert state["o"] == {"n": 1, "gone": state["o"]["gone"]}  # type: ignore[index]


def test_every_missing_key_is_named_and_what_is_there_instead(pair: Pair) -> None:
    for load in (pair.load_from_memory, pair.load_from_store):
        state = {"a": torch.zeros(2), "c": torch.zeros(1), "o": {"n": 0, "m": 0}, "list": [{"x": torch.zeros(1)}]}
        error = failure_of(load, "run/step-1", state)
        assert str(error).startswith("Missing key in checkpoint state_dict: 'c', 'list.0.x', 'o.m'. "), error
        assert "lacks 3 of the 5 keys" in str(error)
        assert "it has 'b', 'o.gone', which nobody asked for" in str(error)
        assert "allow_partial_load" in str(error)
        assert_equal(state["a"], torch.zeros(2))


def test_thousands_of_missing_keys_are_a_message_of_bearable_size(pair: Pair) -> None:
    error = failure_of(pair.load_from_memory, "run/step-1", {f"layer.{number}.weight": 0 for number in range(20_000)})
    assert "'layer.0.weight'" in str(error)
    assert "lacks 20000 of the 20000 keys" in str(error)
    assert len(str(error)) < 100_000


def test_partial_loads_leave_the_others_untouched(pair: Pair) -> None:
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        state = {"a": torch.zeros(2), "c": torch.full((1,), 7.0), "o": {"m": 5}}
        load("run/step-1", state, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        assert_equal(state, {"a": torch.ones(2), "c": torch.full((1,), 7.0), "o": {"m": 5}})


def test_a_planner_that_looks_keys_up_itself_is_not_disturbed(pair: Pair) -> None:
    class Own(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            assert self.metadata is not None
            there = self.metadata.state_dict_metadata
            self.state_dict = {key: value for key, value in self.state_dict.items() if key in there}
            assert "c" not in there
            assert there.get("c") is None
            return super().create_local_plan()

    state = pair.load_from_memory("run/step-1", {"a": torch.zeros(2), "c": torch.zeros(1)}, planner=Own())
    assert_equal(state, {"a": torch.ones(2), "c": torch.zeros(1)})


def test_another_shape_is_named_with_its_key_and_both_shapes(pair: Pair) -> None:
    for load in (pair.load_from_memory, pair.load_from_store):
        with pytest.raises(CheckpointException, match=r"Size mismatch .*\[3\].*\[2, 2\].* for b") as caught:
            load("run/step-1", {"b": torch.zeros(2, 2)})
        assert isinstance(caught.value.failures[0][0], ValueError)


def test_another_dtype_is_cast_silently_as_by_stock(pair: Pair) -> None:
    for load in (pair.load_from_memory, pair.load_from_store, pair.load_with_stock):
        assert_equal(load("run/step-1", {"b": torch.zeros(3, dtype=torch.int8)}), {"b": torch.full((3,), 2, dtype=torch.int8)})


def bytes_from(daemon: DaemonProcess) -> dict[str, int]:
    done = daemon.cli("status", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)["bytes_from"]
    return found


def test_a_load_of_the_model_does_not_fetch_the_optimizer(pair: Pair) -> None:
    model = {f"layer{number}": torch.randn(256, 1024) for number in range(4)}
    optimizer = {f"layer{number}": {"exp_avg": torch.randn(256, 1024), "exp_avg_sq": torch.randn(256, 1024)} for number in range(4)}
    state = {"model": model, "optimizer": optimizer, "rng": bytes(3 * MIB)}
    pair.save("parts/step-1", state)
    pair.wait("parts/step-1")
    for daemon, load, source in ((pair.saving, pair.load_from_memory, "memory"), (pair.other, pair.load_from_store, "store")):
        before = bytes_from(daemon)
        assert_equal(load("parts/step-1", blank({"model": model})), {"model": model})
        after = bytes_from(daemon)
        fetched = {name: after[name] - before[name] for name in after}
        # Four mebibytes of model, as they are stored; what else is in their blocks, the metadata and the tables come with them.
        assert 3 * MIB < fetched.pop(source) < 6 * MIB
        assert set(fetched.values()) == {0}
        assert_equal(load("parts/step-1", blank(state)), state)
        assert bytes_from(daemon)[source] - after[source] > 6 * MIB


def test_a_key_that_is_missing_on_one_rank_is_told_to_all(world: World, pair: Pair) -> None:
    place = {"own": pair.saving.address}
    for found in world.call("missing_on_one_rank", place=place):
        assert len(found) == 1
        assert found[0].startswith("2: Missing key in checkpoint state_dict: 'x', 'y', 'z.deep'. "), found


def test_what_is_in_it_can_be_asked_before_loading(pair: Pair) -> None:
    metadata = DaemonStorageReader("run/latest", address=pair.saving.address).read_metadata()
    assert set(metadata.state_dict_metadata) == {"a", "b", "o.n", "o.gone"}
    assert "c" not in metadata.state_dict_metadata
