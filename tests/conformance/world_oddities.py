"""What else users do with DCP on many ranks, as functions of the conformance world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ckptd_client import DaemonStorageReader, DaemonStorageWriter
from conformance.outcomes import Outcome
from conformance.world_places import RANK, UNFILLED, WORLD, Place, State, full, group, mesh, placed, unfilled


def conform(where: Place, checkpoint_id: str, state: Callable[[], State], template: Callable[[], State], **options: Any) -> Outcome:
    """Saves and loads on all ranks, every way."""
    assert not where.save(checkpoint_id, state)
    dist.barrier()
    return where.assert_conforms(checkpoint_id, template, **options)


def sharded_tensors(place: dict[str, Any]) -> None:
    """The older ShardedTensor, with shards of unequal size, several on a rank."""
    where, value = Place(**place), full((22, 3), 5)
    saved = [(0, 0, 1), (0, 1, 5), (1, 5, 6), (2, 6, 15), (3, 15, 22)]
    loaded = [(0, 0, 10), (1, 10, 12), (2, 12, 13), (2, 13, 20), (3, 20, 22)]

    def of(cuts: list[tuple[int, int, int]], whole: torch.Tensor) -> State:
        shards = [
            sharded_tensor.Shard(whole[start:end].clone(), ShardMetadata([start, 0], [end - start, 3], f"rank:{rank}/cpu"))
            for rank, start, end in cuts
            if rank == RANK
        ]
        return {"deep": {"x": sharded_tensor.init_from_local_shards(shards, [22, 3])}, "n": 1}

    assert not where.save("sharded/step-1", lambda: of(saved, value))
    dist.barrier()
    for way, outcome in where.loads("sharded/step-1", lambda: of(loaded, torch.full_like(value, UNFILLED))).items():
        assert not outcome.error, (way, outcome.said)
        for shard in outcome.value["deep"]["x"].local_shards():
            start, length = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            assert torch.equal(shard.tensor, value[start : start + length]), (way, start)


def meshes_of_some_ranks(place: dict[str, Any]) -> None:
    """One state with tensors on meshes that not every rank is in."""
    two, three, four, value = mesh((2,)), mesh((3,)), mesh((4,)), full((9, 4), 3)

    def state() -> State:
        return {"two": placed(two, value, Shard(0)), "three": placed(three, value, Replicate()), "four": placed(four, value, Shard(1))}

    outcome = conform(Place(**place), "submeshes/step-1", state, lambda: unfilled(state()))
    assert not outcome.error, outcome.said


def shards_of_every_layout(place: dict[str, Any]) -> None:
    """Local parts that are views, transposed or strided, of a parameter too."""
    on, base = mesh((4,)), full((12, 8), 4).to(torch.float32)

    def state(fill: float) -> State:
        whole = base * fill
        parts = {"transposed": whole[:, RANK : RANK + 2].t(), "strided": whole[RANK::4, ::2], "row": whole[RANK]}
        made: State = {name: DTensor.from_local(part, on, [Shard(0)], run_check=False) for name, part in parts.items()}
        made["parameter"] = torch.nn.Parameter(DTensor.from_local(whole[RANK::4, 1::2], on, [Shard(1)], run_check=False))
        return made

    outcome = conform(Place(**place), "layouts-of-shards/step-1", lambda: state(1.0), lambda: state(0.0))
    assert not outcome.error, outcome.said
    for name, expected in state(1.0).items():
        assert torch.equal(outcome.value[name].to_local(), expected.to_local()), name


def one_key_of_several_kinds(place: dict[str, Any]) -> list[str]:
    """A tensor on one rank and an object on another; tensors of several shapes. The kinds of error."""
    where = Place(**place)
    kinds = where.save("kinds/step-1", lambda: {"x": torch.ones(2) if RANK % 2 else "text", "y": 1})
    shapes = where.save("shapes/step-1", lambda: {"x": torch.full((RANK + 1,), float(RANK)), "y": torch.ones(3) * RANK})
    if not shapes:
        dist.barrier()
        for size in range(1, WORLD + 1):
            where.assert_conforms("shapes/step-1", lambda size=size: {"x": torch.zeros(size), "y": torch.zeros(3)})
    return [kinds, shapes]


def a_pending_sum(place: dict[str, Any]) -> str:
    """A DTensor that is not summed up yet; the kind of error."""
    on = mesh((4,))
    return Place(**place).save("pending/step-1", lambda: {"sum": DTensor.from_local(torch.ones(3), on, [Partial()], run_check=False)})


def ranks_in_another_order(place: dict[str, Any]) -> None:
    where, value = Place(**place), full((9, 4), 3)
    orders = {"forwards": mesh((4,)), "backwards": mesh((4,), backwards=True)}
    for name, on in orders.items():
        other = orders["backwards" if name == "forwards" else "forwards"]
        outcome = conform(
            where,
            f"{name}/step-1",
            lambda on=on: {"rows": placed(on, value, Shard(0)), "columns": placed(on, value, Shard(1))},
            lambda other=other: unfilled({"rows": placed(other, value, Shard(0)), "columns": placed(other, value, Shard(1))}),
        )
        assert not outcome.error, outcome.said
        assert torch.equal(outcome.value["rows"].to_local(), placed(other, value, Shard(0)).to_local())


def hollow_targets(place: dict[str, Any]) -> None:
    """Targets on the meta device: DCP makes them real."""
    on, value = mesh((4,)), full((9, 4), 3).to(torch.float32)

    def template() -> State:
        with torch.device("meta"):
            model = torch.nn.Linear(4, 9)
        fully_shard(model, mesh=on)
        return {
            "sharded": get_model_state_dict(model)["weight"],
            "plain": torch.empty(9, 4, device="meta"),
            "list": [torch.empty(2, device="meta")],
        }

    def state() -> State:
        return {"sharded": placed(on, value, Shard(0)), "plain": value, "list": [torch.ones(2)]}

    outcome = conform(Place(**place), "hollow/step-1", state, template)
    assert not outcome.error, outcome.said
    assert torch.equal(outcome.value["sharded"].full_tensor(), value)
    assert torch.equal(outcome.value["plain"], value)


def planners(place: dict[str, Any]) -> list[str]:
    """DCP's own planners with their options; the kinds of error."""
    where, on, value = Place(**place), mesh((4,)), full((9, 4), 3)
    kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "default": (dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner),
        "lowest": (lambda: dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True), dcp.DefaultLoadPlanner),
        "unflattened": (
            lambda: dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        ),
        "unflattened_save": (lambda: dcp.DefaultSavePlanner(flatten_state_dict=False), dcp.DefaultLoadPlanner),
        "unflattened_load": (dcp.DefaultSavePlanner, lambda: dcp.DefaultLoadPlanner(flatten_state_dict=False)),
    }

    def state() -> State:
        return {"model": {"rows": placed(on, value, Shard(0)), "all": placed(on, value, Replicate())}, "plain": value.clone(), "n": 5}

    errors = []
    for name, (saving, loading) in kinds.items():
        assert not where.save(f"planner-{name}/step-1", state, planners=(saving, saving))
        dist.barrier()
        errors.append(where.assert_conforms(f"planner-{name}/step-1", lambda: unfilled(state()), planner=loading).error)
    return errors


def cached_plans(place: dict[str, Any], steps: int) -> None:
    """Saves with DCP's plan cache while the state changes on some ranks and not on others."""
    where, on = Place(**place), mesh((4,))
    # The cache is one per planner class.
    saving = tuple(type(name, (dcp.DefaultSavePlanner,), {}) for name in ("Stocks", "Ours"))

    def state(step: int) -> State:
        shape, placement = (9, 4) if step < 8 else (7, 4), Shard(1) if step in (5, 6) else Shard(0)
        made: State = {"rows": placed(on, full(shape, step), placement), "n": step, f"own{RANK}": torch.full((3,), float(step * 10 + RANK))}
        if step >= 2 and RANK == 1:
            made["new"] = torch.full((5,), float(step))
        if step == 4 and RANK == 2:
            del made["own2"]
        if step == 6:
            made[f"own{RANK}"] = made[f"own{RANK}"].to(torch.bfloat16)
        if step == 7 and RANK == 3:
            made["own3"] = "an object now"
        return made

    for step in range(steps):
        made = state(step)
        planners = tuple(lambda kind=kind: kind(enable_plan_caching=True) for kind in saving)
        assert not where.save(f"caching/step-{step}", lambda made=made: dict(made), planners=planners)
        dist.barrier()
        outcome = where.assert_conforms(f"caching/step-{step}", lambda made=made: unfilled(made))
        assert not outcome.error, outcome.said
        assert torch.equal(outcome.value["rows"].to_local(), made["rows"].to_local()), step


def a_part_of_the_world(place: dict[str, Any]) -> None:
    """Two ranks save and load while the others train."""
    where, pair, rest = Place(**place), dist.new_group([1, 3]), dist.new_group([0, 2])
    if RANK in (1, 3):
        state = {f"own{RANK}": torch.full((3,), float(RANK)), "all": torch.ones(2)}
        assert not where.save("part/step-1", lambda: dict(state), process_group=pair)
        dist.barrier(pair)
        outcome = where.assert_conforms("part/step-1", lambda: unfilled(state), process_group=pair)
        assert not outcome.error, outcome.said
    else:
        for _ in range(200):
            dist.all_reduce(torch.ones(1000), group=rest)
    dist.barrier()


def each_on_its_own(place: dict[str, Any]) -> list[str]:
    """Loads without collectives, of something else on each rank; the kind of error and what was said."""
    where, on, value = Place(**place), mesh((4,)), full((9, 4), 3)
    assert not where.save("alone/step-1", lambda: {"rows": placed(on, value, Shard(0)), "plain": value})
    dist.barrier()

    def template() -> State:
        choice: list[State] = [{"rows": torch.zeros(9, 4)}, {"plain": torch.zeros(9, 4)}, {"missing": 1}, {"rows": torch.zeros(3, 3)}]
        return choice[RANK]

    outcome = where.assert_conforms("alone/step-1", template, no_dist=True)
    return [outcome.error, outcome.said]


def disagreeing_ranks(place: dict[str, Any]) -> list[str]:
    """Ranks that ask for different things; the kinds of error."""
    where = Place(**place)
    assert not where.save("disagreeing/step-1", lambda: {"a": torch.ones(3), f"own{RANK}": RANK})
    dist.barrier()
    templates: list[Callable[[], State]] = [
        lambda: {"a": torch.zeros(3), **({"b": 1} if RANK == 2 else {})},
        lambda: {"a": torch.zeros(3 + (RANK == 1))},
        lambda: {f"own{RANK}": 0},
        lambda: {f"own{(RANK + 1) % WORLD}": 0},
        lambda: {"a": torch.zeros(3)} if RANK else {},
    ]
    return [where.assert_conforms("disagreeing/step-1", template).error for template in templates]


def own_values(place: dict[str, Any], checkpoint_id: str, size: int) -> None:
    """C25: the first ranks save values of their own, under the same keys and under keys of their own."""
    where, saving = Place(**place), group(size)
    if size > RANK:
        state = {"w": torch.full((3,), float(RANK)), "n": RANK, f"rng.rank{RANK}": torch.full((4,), RANK)}
        state |= {f"k{number}": torch.full((number,), float(RANK)) for number in range(6)}
        assert not where.save(checkpoint_id, lambda: dict(state), process_group=saving)


def load_own_values(place: dict[str, Any], checkpoint_id: str, size: int, partial: bool = False) -> dict[str, Any] | None:
    """C25: and as many ranks as there are now load them; what they got, every way the same."""
    where, loading = Place(**place), group(size)
    if size <= RANK:
        return None
    names = ["w", "n", f"rng.rank{RANK}", *(f"k{number}" for number in range(6))]
    made: State = {"w": torch.zeros(3), "n": 0, f"rng.rank{RANK}": torch.zeros(4, dtype=torch.int64)}
    made |= {f"k{number}": torch.zeros(number) for number in range(6)}
    outcome = where.assert_conforms(
        checkpoint_id,
        lambda: unfilled(made),
        process_group=loading,
        planner=lambda: dcp.DefaultLoadPlanner(allow_partial_load=partial),
    )
    if outcome.error:
        said = where.loads(checkpoint_id, lambda: unfilled(made), process_group=loading)["ours from memory"].said
        return {"error": outcome.error, "said": said}
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in outcome.value.items()}
    return {name: values[name] for name in names}


def missing_on_one_rank(place: dict[str, Any]) -> list[str]:
    """C10: what a load says to whose rank 2 three keys are missing."""
    writer = DaemonStorageWriter("missing/step-1", address=place["own"])
    dcp.save({"a": torch.ones(3), "b": 1}, storage_writer=writer)
    state: State = {"a": torch.zeros(3), **({"x": 1, "y": torch.zeros(2), "z": {"deep": 1}} if RANK == 2 else {"b": 0})}
    try:
        dcp.load(state, storage_reader=DaemonStorageReader("missing/step-1", address=place["own"]))
    except dcp.api.CheckpointException as error:
        return [f"{rank}: {failure[0]}" for rank, failure in error.failures.items()]
    return []


FUNCTIONS = (
    *(
        sharded_tensors,
        meshes_of_some_ranks,
        shards_of_every_layout,
        one_key_of_several_kinds,
        a_pending_sum,
        ranks_in_another_order,
        hollow_targets,
        planners,
        cached_plans,
    ),
    *(a_part_of_the_world, each_on_its_own, disagreeing_ranks, own_values, load_own_values, missing_on_one_rank),
)
