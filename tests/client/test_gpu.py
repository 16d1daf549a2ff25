"""Tensors on a CUDA device: saved from it and loaded into it, bit by bit. Run with ``pytest -m gpu`` where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from client.states import assert_equal, blank
from daemons import DaemonProcess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    return {
        "weight": torch.randn(1000, 1001, device="cuda"),
        "half": torch.randn(64, 64, device="cuda").to(torch.bfloat16),
        "transposed": torch.randn(64, 65, device="cuda").t(),
        "slice": torch.randn(100, 100, device="cuda")[10:20, ::3],
        "conjugated": torch.randn(8, 8, dtype=torch.complex64, device="cuda").conj(),
        "empty": torch.empty(0, 3, device="cuda"),
        "scalar": torch.tensor(2.5, device="cuda"),
        "on_cpu": torch.arange(10),
    }


def on_cuda(value: dict[str, Any]) -> dict[str, Any]:
    return {key: tensor.to("cuda") if key != "on_cpu" else tensor for key, tensor in blank(value).items()}


def test_tensors_of_a_device_round_trip_through_memory_and_store(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon, DaemonProcess(str(tmp_path / "store")) as other:
        expected = state()
        dcp.save(expected, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
        for source in (daemon, other):
            found = on_cuda(expected)
            dcp.load(found, checkpoint_id="step-1", storage_reader=DaemonStorageReader(address=source.address))
            assert_equal(found, expected)


def test_what_is_saved_are_the_values_before_the_next_kernel(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        weight = torch.zeros(64 * 1024 * 1024, device="cuda")
        for _ in range(100):
            weight += 1  # still queued on the device when the save begins
        dcp.save({"weight": weight}, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        weight.zero_()
        found = {"weight": torch.empty_like(weight)}
        dcp.load(found, checkpoint_id="step-1", storage_reader=DaemonStorageReader(address=daemon.address))
        assert bool((found["weight"] == 100).all())
