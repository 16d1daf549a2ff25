"""What every rank of the conformance suite's world runs; see `worlds.World`. Smaller worlds are subgroups of this one."""

from __future__ import annotations

import itertools
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from conformance import world_models, world_oddities
from conformance.world_places import RANK, UNFILLED, Place, State, full, group, mesh, placed
from worlds import serve

#: Sizes that no world divides, sizes smaller than any world, none at all.
SHAPES = [(), (6,), (2, 3, 4), (1, 5), (5, 1), (3, 2), (7, 3), (1,), (0, 4), (33, 65)]


def placements_on(on: DeviceMesh) -> list[tuple[Placement, ...]]:
    """All that a mesh can do to a matrix."""
    return list(itertools.product((Shard(0), Shard(1), Replicate()), repeat=on.ndim))


def reshard(place: dict[str, Any], saved: list[int], loaded: list[int], backwards: bool = False, rows: int = len(SHAPES)) -> int:
    """Every placement on one mesh into every placement on another; the number of tensors that this rank has compared."""
    where = Place(**place)
    saved_on, loaded_on = mesh(tuple(saved)), mesh(tuple(loaded), backwards=backwards)
    saving, loading = group(saved_on.size()), group(loaded_on.size())
    placements = list(itertools.product(placements_on(saved_on), placements_on(loaded_on)))
    shapes = list(enumerate(SHAPES[-rows:]))

    def state() -> State:
        made: State = {
            f"{one} {two} {shape}": placed(saved_on, full(shape, salt), *one) for one, two in placements for salt, shape in shapes
        }
        return made | {"plain": torch.arange(5.0), "object": f"of {saved}", "list": [torch.ones(2), {"n": 1}]}

    def template() -> State:
        made: State = {
            f"{one} {two} {shape}": placed(loaded_on, torch.full(shape, UNFILLED, dtype=torch.int32), *two)
            for one, two in placements
            for _, shape in shapes
        }
        return made | {"plain": torch.zeros(5), "object": None, "list": [torch.zeros(2), {"n": 0}]}

    checkpoint_id = f"reshard-{'x'.join(map(str, saved))}-{'x'.join(map(str, loaded))}-{backwards}/step-1"
    if saved_on.size() > RANK:
        assert not where.save(checkpoint_id, state, process_group=saving)
    dist.barrier()
    if loaded_on.size() <= RANK:
        return 0
    outcome = where.assert_conforms(checkpoint_id, template, process_group=loading)
    assert not outcome.error, outcome.said
    for one, two in placements:
        for salt, shape in shapes:
            found = outcome.value[f"{one} {two} {shape}"].to_local()
            assert torch.equal(found, placed(loaded_on, full(shape, salt), *two).to_local()), (RANK, one, two, shape)
    return len(placements) * len(shapes)


if __name__ == "__main__":
    # DCP's and DTensor's own notices, of which there are many; what fails says so in its answer.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    serve({function.__name__: function for function in (reshard, *world_models.FUNCTIONS, *world_oddities.FUNCTIONS)})
