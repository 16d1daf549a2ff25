"""C23: a learning rate schedule goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess


class WarmUp:
    """A callable object: its attributes are part of the schedule's state."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8)),
    "callable": lambda optimizer: LambdaLR(optimizer, WarmUp(8)),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=4), CosineAnnealingWarmRestarts(optimizer, 3)], milestones=[4]
    ),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    store = str(tmp_path_factory.mktemp("store"))
    with DaemonProcess(store) as own, DaemonProcess(store, memory="64MiB") as other:
        yield own.address, other.address


class Trainer:
    def __init__(self, schedule: str) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = SCHEDULES[schedule](self.optimizer)

    def train(self, steps: range) -> list[float]:
        """The learning rate of each step."""
        rates = []
        for step in steps:
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.model(torch.full((1, 2), float(step))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if isinstance(self.schedule, LRScheduler) and not isinstance(self.schedule, ReduceLROnPlateau):
                self.schedule.step()
            else:
                self.schedule.step(metrics=1.0)
        return rates

    def state(self) -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(self.model, self.optimizer), "schedule": self.schedule.state_dict()}

    def set(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step", "ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_of_steps_6_to_10_are_those_of_an_unbroken_run(addresses: tuple[str, str], name: str) -> None:
    unbroken = Trainer(name).train(range(10))
    trainer = Trainer(name)
    assert trainer.train(range(5)) == unbroken[:5]
    saved = trainer.state()
    dcp.save(saved, storage_writer=DaemonStorageWriter(f"c23-{name}/step-5", address=addresses[0]))
    wait(f"c23-{name}/step-5", address=addresses[0], timeout=60)
    for address in addresses:
        resumed = Trainer(name)
        state = resumed.state()
        group = state["optimizer"]["param_groups"][0]
        assert ("initial_lr" in group) == (name != "plateau")  # the one schedule that does not start from it
        group.update(dict.fromkeys({"initial_lr"} & group.keys(), -1.0))
        dcp.load(state, storage_reader=DaemonStorageReader(f"c23-{name}/latest", address=address))
        assert state["schedule"]["last_epoch"] == 5
        if name != "plateau":
            assert state["optimizer"]["param_groups"][0]["initial_lr"] == saved["optimizer"]["param_groups"][0]["initial_lr"]
        resumed.set(state)
        assert resumed.train(range(5, 10)) == unbroken[5:]
    assert len(set(unbroken)) > 1
