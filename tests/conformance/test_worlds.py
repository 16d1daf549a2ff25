"""Many ranks: any world and placement into any other, models in training, and the oddities, as stock does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conformance.ways import Ways
from daemons import DaemonProcess
from s3 import S3Server
from worlds import CONFORMANCE, World

MESHES = [[1], [2], [3], [4], [2, 2]]
#: Those pairs that differ in what they are a case of; all others are slow.
QUICK = [([4], [3]), ([2], [4]), ([3], [1]), ([1], [2]), ([4], [4]), ([4], [2, 2]), ([2, 2], [3])]
MODELS = [
    ([4], [2], "adamw", 3),
    ([2, 2], [3], "adamw", 1),
    ([1], [4], "adamw", 0),
    ([4], [3], "sgd", 2),
]


def place_of(ways: Ways) -> dict[str, Any]:
    """What the world's functions have to know."""
    return {"own": ways.pair.saving.address, "other": ways.pair.other.address, "store": str(ways.pair.store)}


@pytest.fixture
def place(ways_of: Callable[[str], Ways]) -> dict[str, Any]:
    return place_of(ways_of("zstd:1"))


@pytest.mark.parametrize(("saved", "loaded"), QUICK, ids=str)
def test_every_placement_on_a_mesh_loads_into_every_placement_on_another(
    world: World, place: dict[str, Any], saved: list[int], loaded: list[int]
) -> None:
    counts = world.call("reshard", place=place, saved=saved, loaded=loaded, rows=10 if len(saved + loaded) == 2 else 4)
    assert sum(count > 0 for count in counts) == (4 if loaded == [2, 2] else loaded[0])


def test_ranks_in_another_order(world: World, place: dict[str, Any]) -> None:
    world.call("reshard", place=place, saved=[4], loaded=[4], backwards=True, rows=4)
    world.call("ranks_in_another_order", place=place)


@pytest.mark.parametrize(("saved", "loaded", "optimizer", "steps"), MODELS, ids=str)
def test_a_model_of_fsdp2_in_training(
    world: World, place: dict[str, Any], saved: list[int], loaded: list[int], optimizer: str, steps: int
) -> None:
    counts = world.call("fsdp", place=place, saved=saved, loaded=loaded, optimizer=optimizer, steps=steps)
    assert max(counts) > 30


def test_tensor_parallelism_below_fsdp2_makes_strided_shards(world: World, place: dict[str, Any]) -> None:
    assert "_StridedShard" in world.call("tensor_parallel", place=place)[0]


@pytest.mark.parametrize(
    "name", ["sharded_tensors", "meshes_of_some_ranks", "shards_of_every_layout", "hollow_targets", "a_part_of_the_world"]
)
def test_oddities(world: World, place: dict[str, Any], name: str) -> None:
    world.call(name, place=place)


def test_what_is_not_summed_up_yet_is_refused(world: World, place: dict[str, Any]) -> None:
    assert world.call("a_pending_sum", place=place) == ["refused"] * 4


def test_planners_and_their_options(world: World, place: dict[str, Any]) -> None:
    assert world.call("planners", place=place) == [["", "", "", "missing", "missing"]] * 4


def test_dcps_plan_cache_follows_states_that_change_on_some_ranks(world: World, place: dict[str, Any]) -> None:
    world.call("cached_plans", place=place, steps=10)


def test_each_rank_loads_on_its_own_what_it_wants(world: World, place: dict[str, Any]) -> None:
    found = world.call("each_on_its_own", place=place)
    assert [error for error, _ in found] == ["", "", "missing", "shape"]


def test_ranks_that_save_different_things_under_one_key(world: World, place: dict[str, Any]) -> None:
    # A tensor on some and an object on others is refused; of several shapes one is kept.
    assert world.call("one_key_of_several_kinds", place=place) == [["refused", ""]] * 4


def test_ranks_that_ask_for_different_things(world: World, place: dict[str, Any]) -> None:
    assert world.call("disagreeing_ranks", place=place) == [["missing", "shape", "", "", ""]] * 4


@pytest.fixture(scope="module")
def s3_place() -> Iterator[dict[str, Any]]:
    with (
        S3Server() as s3,
        DaemonProcess(s3.url("worlds"), *s3.arguments) as saving,
        DaemonProcess(s3.url("worlds"), *s3.arguments, memory="64MiB") as other,
    ):
        options = {"key": "test-key", "secret": "test-secret", "client_kwargs": {"endpoint_url": s3.endpoint}}
        yield {"own": saving.address, "other": other.address, "store": s3.url("worlds"), "options": options}


def test_worlds_and_placements_on_s3(world: World, s3_place: dict[str, Any]) -> None:
    world.call("reshard", place=s3_place, saved=[4], loaded=[3], rows=3)


# --- the long tail -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loaded", MESHES, ids=str)
@pytest.mark.parametrize("saved", MESHES, ids=str)
def test_every_mesh_into_every_other(world: World, ways_of: Callable[[str], Ways], saved: list[int], loaded: list[int]) -> None:
    for codec, backwards in (("none", False), ("zstd:3", True)):
        world.call("reshard", place=place_of(ways_of(codec)), saved=saved, loaded=loaded, backwards=backwards)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", MESHES, ids=str)
@pytest.mark.parametrize("saved", MESHES, ids=str)
def test_models_on_every_mesh(world: World, place: dict[str, Any], saved: list[int], loaded: list[int]) -> None:
    for optimizer, steps in (("adamw", 2), ("sgd", 0)):
        world.call("fsdp", place=place, saved=saved, loaded=loaded, optimizer=optimizer, steps=steps)


@pytest.fixture(scope="module")
def world_of_eight() -> Iterator[World]:
    with World(CONFORMANCE, 8) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("saved", "loaded"), [([8], [3]), ([3], [8]), ([8], [4, 2]), ([2, 4], [8]), ([4, 2], [5]), ([2, 4], [4, 2])], ids=str
)
def test_eight_ranks(world_of_eight: World, place: dict[str, Any], saved: list[int], loaded: list[int]) -> None:
    world_of_eight.call("reshard", seconds=250, place=place, saved=saved, loaded=loaded)
    world_of_eight.call("fsdp", seconds=250, place=place, saved=saved, loaded=loaded, optimizer="adamw", steps=2)


@pytest.mark.slow
def test_worlds_and_models_on_s3(world: World, s3_place: dict[str, Any]) -> None:
    for saved, loaded in (([4], [2, 2]), ([2], [4]), ([2, 2], [1])):
        world.call("reshard", place=s3_place, saved=saved, loaded=loaded, rows=4)
        world.call("fsdp", place=s3_place, saved=saved, loaded=loaded, optimizer="adamw", steps=1)
