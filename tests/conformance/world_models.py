"""Models in training, sharded by FSDP2, as functions of the conformance world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR

from ckptd_client import DaemonStorageReader, DaemonStorageWriter
from conformance.world_places import RANK, Place, State, group, mesh, placed, unfilled


class Model(torch.nn.Module):
    """Sizes that no world divides, a frozen layer, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(5, 7)
        self.frozen = torch.nn.Linear(7, 3, bias=False).requires_grad_(False)
        self.last = torch.nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.last(self.frozen(torch.relu(self.first(inputs))))
        return hidden * self.get_buffer("scale")


class Trainer:
    """A model, sharded over a mesh (None: not at all), with two parameter groups and a warm-up."""

    def __init__(self, on: DeviceMesh | None, seed: int, optimizer: str = "adamw") -> None:
        self.model = Model(seed)
        if on is not None:
            for layer in (self.model.first, self.model.frozen, self.model.last):
                fully_shard(layer, mesh=on)
            fully_shard(self.model, mesh=on)
        groups: list[dict[str, Any]] = [
            {"params": list(self.model.first.parameters()), "lr": 0.1},
            {"params": list(self.model.last.parameters()), "lr": 0.02},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups) if optimizer == "adamw" else torch.optim.SGD(groups)
        self.schedule = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 8))

    def train(self, steps: range) -> list[float]:
        """The same data on every rank, so that every world comes to the same; the losses."""
        losses = []
        for step in steps:
            loss = self.model(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(float(loss.detach()))
        return losses

    def state(self) -> State:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
        }

    def set(self, state: State) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def values(self) -> dict[str, list[float]]:
        """Every parameter, whole. All ranks of the mesh have to ask."""
        found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in self.model.state_dict().items()}
        return {name: value.flatten().tolist() for name, value in found.items()}


def fsdp(place: dict[str, Any], saved: list[int], loaded: list[int], optimizer: str, steps: int) -> int:
    """A model in training, saved on one mesh, loaded on another by every reader; the number of entries compared."""
    where = Place(**place)
    saved_on, loaded_on = mesh(tuple(saved)), mesh(tuple(loaded))
    saving, loading = group(saved_on.size()), group(loaded_on.size())
    checkpoint_id = f"fsdp-{'x'.join(map(str, saved))}-{'x'.join(map(str, loaded))}-{optimizer}-{steps}/step-{steps}"
    if saved_on.size() > RANK:
        trainer = Trainer(saved_on, 1, optimizer)
        trainer.train(range(steps))
        assert not where.save(checkpoint_id, trainer.state, process_group=saving)
    dist.barrier()
    if loaded_on.size() <= RANK:
        return 0
    outcome = where.assert_conforms(checkpoint_id, lambda: Trainer(loaded_on, 2, optimizer).state(), process_group=loading)
    assert not outcome.error, outcome.said
    return len(flatten_state_dict(outcome.value)[0])


def train_and_save(place: dict[str, Any], checkpoint_id: str, steps: int, optimizer: str = "adamw") -> list[str]:
    """All ranks train a model together and save it; the keys."""
    trainer = Trainer(mesh((dist.get_world_size(),)), 1, optimizer)
    trainer.train(range(steps))
    state = trainer.state()
    dcp.save(state, storage_writer=DaemonStorageWriter(checkpoint_id, address=place["own"]))
    return sorted(flatten_state_dict(state)[0])


def resume(place: dict[str, Any], checkpoint_id: str, size: int, steps: list[int], optimizer: str = "adamw") -> dict[str, Any] | None:
    """The first `size` ranks go on from the checkpoint, and beside it train the same without a break; what both came to.

    A size of 0 is one rank whose model is not sharded at all.
    """
    on, together = (mesh((size,)), group(size)) if size else (None, group(1))
    if max(size, 1) <= RANK:
        return None
    unbroken, resumed = Trainer(on, 1, optimizer), Trainer(on, 2, optimizer)
    unbroken.train(range(steps[0]))
    unbroken.state()  # As the job that saved: to ask for an optimizer's state before its first step makes one.
    state = resumed.state()
    dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=place["other"]), process_group=together)
    resumed.set(state)
    return {
        name: {"losses": trainer.train(range(*steps)), "values": trainer.values(), "rates": trainer.schedule.get_last_lr()}
        for name, trainer in (("unbroken", unbroken), ("resumed", resumed))
    }


def tensor_parallel(place: dict[str, Any]) -> list[str]:
    """FSDP2 over tensor parallelism, whose shards are strided; loaded the same way, and in one dimension."""
    where, two, line = Place(**place), mesh((2, 2)), mesh((4,))

    def state(seed: int) -> State:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
        parallelize_module(model, two["shards"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=two["replicas"])
        return get_model_state_dict(model)

    def in_line() -> State:
        return {key: unfilled(placed(line, torch.zeros(value.shape), Shard(0))) for key, value in state(2).items()}

    assert not where.save("tp/step-1", lambda: state(1))
    dist.barrier()
    expected = {key: value.full_tensor() for key, value in state(1).items()}
    for template in (lambda: state(2), in_line):
        outcome = where.assert_conforms("tp/step-1", template)
        assert not outcome.error, outcome.said
        for key, value in expected.items():
            assert torch.equal(outcome.value[key].full_tensor(), value), key
    return [type(place).__name__ for value in state(1).values() for place in value.placements]


FUNCTIONS = (fsdp, train_and_save, resume, tensor_parallel)
