"""C22: an optimizer's state goes from any world to any other, and training goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from client.states import assert_equal
from daemons import DaemonProcess
from worlds import World


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    store = str(tmp_path_factory.mktemp("store"))
    with DaemonProcess(store) as own, DaemonProcess(store, memory="64MiB") as other:
        yield {"own": own.address, "other": other.address}


@pytest.fixture(scope="module")
def saved(world: World, place: dict[str, Any]) -> list[str]:
    """What four ranks saved after three steps: an MLP with a frozen layer, AdamW with two groups, a warm-up."""
    found = world.call("train_and_save", place=place, checkpoint_id="c22/step-3", steps=3)
    wait("c22/step-3", address=place["own"], timeout=60)
    keys: list[str] = found[0]
    return keys


def test_the_state_is_keyed_by_name_and_has_what_belongs_in_it(saved: list[str]) -> None:
    for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
        assert {f"optimizer.state.{name}.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} <= set(saved)
    assert not [key for key in saved if key.startswith("optimizer.state.frozen")]
    assert {"model.frozen.weight", "model.scale", "optimizer.param_groups.1.lr", "optimizer.param_groups.1.initial_lr"} <= set(saved)


@pytest.mark.parametrize("size", [4, 2, 1, 0], ids=["four", "two", "one", "one_unsharded"])
def test_another_world_goes_on_where_four_ranks_stopped(world: World, place: dict[str, Any], saved: list[str], size: int) -> None:
    assert saved
    for found in world.call("resume", place=place, checkpoint_id="c22/step-3", size=size, steps=[3, 6])[: max(size, 1)]:
        unbroken, resumed = found["unbroken"], found["resumed"]
        assert resumed["rates"] == unbroken["rates"]
        assert resumed["losses"] == pytest.approx(unbroken["losses"], rel=1e-6, abs=1e-6)
        for name, values in unbroken["values"].items():
            assert resumed["values"][name] == pytest.approx(values, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_before_the_first_step_there_is_nothing_to_lose(world: World, place: dict[str, Any], optimizer: str) -> None:
    checkpoint_id = f"c22-{optimizer}/step-0"
    world.call("train_and_save", place=place, checkpoint_id=checkpoint_id, steps=0, optimizer=optimizer)
    wait(checkpoint_id, address=place["own"], timeout=60)
    for found in world.call("resume", place=place, checkpoint_id=checkpoint_id, size=2, steps=[0, 3], optimizer=optimizer)[:2]:
        assert found["resumed"]["losses"] == pytest.approx(found["unbroken"]["losses"], rel=1e-6, abs=1e-6)


def test_an_sgd_without_momentum_resumes(world: World, place: dict[str, Any]) -> None:
    world.call("train_and_save", place=place, checkpoint_id="c22-sgd/step-2", steps=2, optimizer="sgd")
    wait("c22-sgd/step-2", address=place["own"], timeout=60)
    for found in world.call("resume", place=place, checkpoint_id="c22-sgd/step-2", size=2, steps=[2, 5], optimizer="sgd")[:2]:
        assert found["resumed"]["losses"] == pytest.approx(found["unbroken"]["losses"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.RMSprop(parameters, centered=True),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
        torch.optim.NAdam,
    ],
    ids=["adam_amsgrad", "sgd_momentum", "rmsprop", "adagrad", "adafactor", "nadam"],
)
def test_other_optimizers_round_trip_in_one_process(place: dict[str, Any], make: Any, request: pytest.FixtureRequest) -> None:
    def trained(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        optimizer = make(model.parameters())
        for step in range(steps):
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    checkpoint_id = f"c22-other/{request.node.callspec.id}-3"
    model, optimizer = trained(1, 3)
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)}, storage_writer=DaemonStorageWriter(checkpoint_id, address=place["own"])
    )
    wait(checkpoint_id, address=place["own"], timeout=60)
    for address in (place["own"], place["other"]):
        again, fresh = trained(2, 0)
        state = {"optimizer": get_optimizer_state_dict(again, fresh)}
        dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=address))
        set_optimizer_state_dict(again, fresh, state["optimizer"])
        assert_equal(fresh.state_dict()["state"], optimizer.state_dict()["state"])
        assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_plain_optimizer_state_that_has_been_made_loads_in_place(tmp_path: Path) -> None:
    """As many trainers do it: ``optimizer.state_dict()`` has integer keys, and loads only into a state that is there already."""

    def trained(steps: int) -> torch.optim.Optimizer:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(steps):
            model(torch.full((2, 4), float(step))).sum().backward()
            optimizer.step()
        return optimizer

    with DaemonProcess(str(tmp_path)) as daemon:
        dcp.save({"optimizer": trained(3).state_dict()}, storage_writer=DaemonStorageWriter("step-3", address=daemon.address))
        state = {"optimizer": trained(1).state_dict()}
        dcp.load(state, storage_reader=DaemonStorageReader("step-3", address=daemon.address))
        fresh = trained(0)
        fresh.load_state_dict(state["optimizer"])
        assert_equal(fresh.state_dict()["state"], trained(3).state_dict()["state"])
