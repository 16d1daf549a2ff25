"""C14: what another process wrote or deleted is seen at once, on every store; no listing is remembered."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptd.errors import NotFound
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from gcs import GCSServer
from s3 import S3Server


@dataclass
class Two:
    """Two daemons on one store."""

    a: DaemonProcess
    b: DaemonProcess


@pytest.fixture(params=["local", "s3", "gcs"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    if request.param == "local":
        store, options = os.fspath(tmp_path / "store"), {}
    else:
        server: S3Server | GCSServer = request.getfixturevalue(f"{request.param}_server")
        store, options = server.url(f"c14-{uuid.uuid4().hex[:8]}"), server.options
    arguments = [part for name, value in options.items() for part in ("--store-option", f"{name}={value}")]
    with DaemonProcess(store, *arguments) as a, DaemonProcess(store, *arguments) as b:
        yield Two(a, b)


def save(daemon: DaemonProcess, step: int, values: torch.Tensor) -> None:
    dcp.save({"t": values}, checkpoint_id=f"step-{step}", storage_writer=DaemonStorageWriter(address=daemon.address, overwrite=True))
    wait(f"step-{step}", address=daemon.address, timeout=60)


def load(daemon: DaemonProcess, checkpoint: str, count: int) -> torch.Tensor:
    found = {"t": torch.zeros(count)}
    dcp.load(found, checkpoint_id=checkpoint, storage_reader=DaemonStorageReader(address=daemon.address))
    return found["t"]


def test_a_second_daemon_sees_what_the_first_writes_and_deletes(two: Two) -> None:
    assert two.b.list() == {}
    save(two.a, 10, torch.full((1000,), 10.0))
    assert {*two.b.list()} == {"step-10"}
    save(two.a, 20, torch.full((1000,), 20.0))
    assert {*two.b.list()} == {"step-10", "step-20"}
    assert load(two.b, "latest", 1000).tolist() == [20.0] * 1000
    assert load(two.b, "step-10", 1000).tolist() == [10.0] * 1000
    assert two.a.cli("delete", "step-10").returncode == 0
    assert {*two.b.list()} == {"step-20"}
    with pytest.raises(CheckpointException) as caught:
        load(two.b, "step-10", 1000)
    assert {type(why[0]) for why in caught.value.failures.values()} == {NotFound}
    # The same name, another size: what B has read of the old one is not taken for the new one.
    save(two.a, 20, torch.full((3000,), 21.0))
    assert load(two.b, "step-20", 3000).tolist() == [21.0] * 3000
    assert load(two.b, "latest", 3000).tolist() == [21.0] * 3000
