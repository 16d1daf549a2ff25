"""C05: a save over a slow store holds up no collective: the process group's timeout is shorter than the store takes for one object."""

from __future__ import annotations

import datetime as dt
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import FAULTY, DaemonProcess
from worlds import World, serve

#: Of every collective in this test, DCP's own included.
TIMEOUT = dt.timedelta(seconds=15)
#: What keeps any object from appearing, or the store from answering at all.
TROUBLES: dict[str, dict[str, Any]] = {
    "no object appears": {"hold_after": 0},
    "listings hang": {"list_hangs": True},
    "all fails": {"list_raises": "503", "raise": "EIO"},
}


class Slow:
    """A daemon on a store that takes its time."""

    def __init__(self, home: Path) -> None:
        self.store = home / "store"
        self.control = home / "control"
        self.daemon = DaemonProcess(f"faulty://{self.store}", program=FAULTY, env={"FAULTY_CONTROL": str(self.control)})

    def tell(self, **behaviour: Any) -> None:
        self.control.write_text(json.dumps(behaviour))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    made = Slow(tmp_path_factory.mktemp("slow"))
    with made.daemon:
        yield made


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with World(Path(__file__), 2) as two:
        yield two


@pytest.mark.parametrize("trouble", TROUBLES)
def test_ranks_train_on_at_once_however_long_the_store_takes(slow: Slow, ranks: World, trouble: str) -> None:
    id = f"{trouble.replace(' ', '-')}/step-1"
    slow.tell(**TROUBLES[trouble])
    try:
        assert ranks.call("save_and_train", address=slow.daemon.address, id=id) == [[2.0, 4.0, 8.0]] * 2
        assert not list((slow.store / id).glob("**/.metadata"))
    finally:
        slow.tell()
    ranks.call("wait_and_load", address=slow.daemon.address, id=id)
    assert slow.daemon.list()[id]["state"] == "durable"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_train_on_at_once_while_each_object_takes_twenty_seconds(slow: Slow, ranks: World) -> None:
    slow.tell(delay_seconds=20)
    try:
        assert ranks.call("save_and_train", address=slow.daemon.address, id="twenty/step-1") == [[2.0, 4.0, 8.0]] * 2
        assert slow.daemon.list()["twenty/step-1"]["state"] == "accepted"
        ranks.call("wait_and_load", address=slow.daemon.address, id="twenty/step-1", within=170, seconds=180)
    finally:
        slow.tell()
    assert slow.daemon.list()["twenty/step-1"]["state"] == "durable"


# --- what each rank runs -------------------------------------------------------------------------------------------


def state(*, empty: bool = False) -> dict[str, Any]:
    """One rank has next to nothing, the other 32 MiB: they are not ready at the same time."""
    rank = dist.get_rank()
    numel = 8 * 1024 * 1024 if rank else 16
    return {f"rank{rank}": torch.zeros(numel) if empty else torch.full((numel,), float(rank + 1)), "step": -1 if empty else 1}


def save_and_train(address: str, id: str) -> list[float]:
    """Saves, then three steps of a training in which each rank adds what all have; every collective within TIMEOUT."""
    group = dist.new_group(timeout=TIMEOUT)
    dcp.save(state(), storage_writer=DaemonStorageWriter(id, address=address), process_group=group)
    total = torch.ones(1)
    totals = []
    for _ in range(3):
        dist.all_reduce(total, group=group)
        totals.append(float(total))
    return totals


def wait_and_load(address: str, id: str, within: float = 60) -> None:
    wait(id, address=address, timeout=within)
    found = state(empty=True)
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=address))
    expected = state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])) for key in expected)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    serve({function.__name__: function for function in (save_and_train, wait_and_load)})
