"""What each worker of an elastic job runs: ``resize_program.py HOME``.

On every start it goes on from ``job/latest``, checks every bit of it, and then steps and saves as
HOME/plan tells it, a JSON object which rank 0 reads again before each step:

    {"worlds": [2, 3]}    at other world sizes it waits; in a world of one of these it steps,
    {"until": 6}          and saves every step, up to this one; then it waits
    {"crash": [6, 1]}     after the save of step 6 rank 1 ends as by SIGKILL
    {"end": true}         all ranks end well

It appends to HOME/log, a JSON object a line, each with "rank", "world", "daemon" and "generation",
which is the same on all ranks from one start to the next:

    {"event": "resumed", "step": …, "from_world": …, "nbytes": bytes that it loaded}
    {"event": "saving", "step": …}
    {"event": "saved", "step": …}

The state at a step is known to any rank of any world: "replicated" is the same on all ranks, as under
DDP; "rows" is a DTensor in Shard(0); "turned" one in Shard(0) in even worlds and in Shard(1) in odd
ones. Each element follows from the step and from its place in the whole tensor. "trained" is a
model under FSDP2 with AdamW, whose bits depend on the worlds it was in: so before a save they are
written, whole, into a file of their own in HOME, whose name is saved along as "proof".
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, NotFound

HOME = Path(sys.argv[1])
RUN = "job"
#: Neither is divided by the world sizes; "turned" has several blocks per shard.
SHAPES = {"replicated": (50_021,), "rows": (37, 1031), "turned": (1027, 4099)}

State = dict[str, Any]


def log(event: str, **more: Any) -> None:
    line = {"event": event, "rank": dist.get_rank(), "world": dist.get_world_size(), "generation": generation(), **more}
    line["daemon"] = os.environ["CKPTD_ADDRESS"]
    with (HOME / "log").open("a") as file:
        file.write(json.dumps(line) + "\n")


@functools.cache
def generation() -> str:
    """Asked for the first time on all ranks at once."""
    return str(told(secrets.token_hex(4)))


def whole(name: str, step: int) -> torch.Tensor:
    """The tensor of that name at that step: every element follows from the step and its index."""
    shape = SHAPES[name]
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    salt = list(SHAPES).index(name) * 7_919 + step * 1_000_003
    return ((index * 2_654_435_761 + salt * (index % 251 + 1)) % 2**31).to(torch.int32).reshape(shape)


def known(mesh: DeviceMesh, step: int) -> State:
    """The part of the state that every rank knows."""
    turned = Shard(dist.get_world_size() % 2)
    return {
        "replicated": whole("replicated", step),
        "rows": distribute_tensor(whole("rows", step), mesh, [Shard(0)], src_data_rank=None),
        "turned": distribute_tensor(whole("turned", step), mesh, [turned], src_data_rank=None),
    }


def raw(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class Trained:
    """A model under FSDP2 in training."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(13, 29), torch.nn.Tanh(), torch.nn.Linear(29, 3))
        fully_shard(self.model[0], mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, step: int) -> None:
        batch = torch.randn(8, 13, generator=torch.Generator().manual_seed(step))
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def set(self, state: State) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def bits(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state, whole. All ranks have to ask."""
        flat, _ = flatten_state_dict(self.state())
        found = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def told(value: Any = None) -> Any:
    """What rank 0 says."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def has_checkpoint() -> bool:
    found: Any = None
    if dist.get_rank() == 0:
        try:
            DaemonStorageReader(f"{RUN}/latest").read_metadata()
            found = True
        except NotFound:
            found = False
    return bool(told(found))


def resume(mesh: DeviceMesh, trained: Trained) -> int:
    """Loads the newest checkpoint and compares every bit; returns its step, 0 if there is none."""
    if not has_checkpoint():
        log("resumed", step=0, from_world=0, nbytes=0)
        return 0
    state = {**known(mesh, -1), "trained": trained.state(), "step": -1, "world": -1, "proof": ""}
    dcp.load(state, storage_reader=DaemonStorageReader(f"{RUN}/latest"))
    step = int(state["step"])
    for name, value in known(mesh, step).items():
        assert torch.equal(local(state[name]), local(value)), f"{name} is not what it was at step {step}"
    trained.set(state["trained"])
    proof = torch.load(HOME / state["proof"], weights_only=True)
    bits = trained.bits()
    assert bits.keys() == proof.keys()
    differing = [key for key, value in bits.items() if raw(value) != raw(proof[key])]
    assert not differing, f"{differing} are not what they were at step {step}"
    flat, _ = flatten_state_dict(state)
    nbytes = sum(local(value).nbytes for value in flat.values() if isinstance(value, torch.Tensor))
    log("resumed", step=step, from_world=state["world"], nbytes=nbytes)
    return step


def save(mesh: DeviceMesh, trained: Trained, step: int) -> None:
    proof = told(f"proof-{step}-{secrets.token_hex(4)}")
    bits = trained.bits()
    if dist.get_rank() == 0:
        torch.save(bits, HOME / f"{proof}.part")
        (HOME / f"{proof}.part").rename(HOME / proof)
    state = {**known(mesh, step), "trained": trained.state(), "step": step, "world": dist.get_world_size(), "proof": proof}
    log("saving", step=step)
    # A step that was saved before, and lost for this world, is saved again.
    dcp.save(state, storage_writer=DaemonStorageWriter(f"{RUN}/step-{step}", overwrite=True))
    log("saved", step=step)


def main() -> None:
    dist.init_process_group("gloo")
    generation()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    trained = Trained(mesh)
    step = resume(mesh, trained)
    while not (plan := told(json.loads((HOME / "plan").read_text()))).get("end"):
        if dist.get_world_size() not in plan.get("worlds", ()) or step >= plan.get("until", 0):
            time.sleep(0.05)
            continue
        step += 1
        trained.step(step)
        save(mesh, trained, step)
        if plan.get("crash") == [step, dist.get_rank()]:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except CheckpointException as error:
        for rank, (cause, _) in error.failures.items():
            print(f"rank {rank}: {type(cause).__name__}: {cause}", file=sys.stderr)
        raise SystemExit(1) from error
