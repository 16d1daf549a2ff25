"""Stock DCP reads what ckptd wrote, on a directory and on S3, compressed and not; and so does ckptd from the store alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from s3 import S3Server

CODECS = ["none", "zstd:1"]


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    # `large` has three blocks; its last one is short. `exact` ends at a block's end but for the zip around it.
    return {
        "model": {
            "large": torch.randn(2_500_000, generator=generator),
            "exact": torch.arange(4 * 1024 * 1024, dtype=torch.uint8),
            "half": torch.randn(64, 65, generator=generator).to(torch.bfloat16).t(),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "empty": torch.empty(0, 4),
        },
        "step": 17,
        "config": {"lr": 1e-3, "names": ["a", "b"]},
    }


def blank() -> dict[str, Any]:
    zeros = {key: torch.zeros_like(tensor) for key, tensor in state()["model"].items()}
    return {"model": zeros, "step": 0, "config": {"lr": 0.0, "names": ["", ""]}}


def assert_equal(found: dict[str, Any]) -> None:
    expected = state()
    for key, tensor in expected["model"].items():
        assert torch.equal(found["model"][key], tensor), key
    assert found["step"] == expected["step"]
    assert found["config"] == expected["config"]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.mark.parametrize("codec", CODECS)
def test_a_directory(tmp_path: Path, codec: str) -> None:
    with DaemonProcess(str(tmp_path / "store"), "--codec", codec) as daemon:
        dcp.save(state(), checkpoint_id="run/step-17", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("run/step-17", address=daemon.address, timeout=60)
    directory = tmp_path / "store" / "run" / "step-17"
    found = blank()
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory))
    assert_equal(found)
    dcp_to_torch_save(directory, tmp_path / "whole.pt")
    assert_equal(torch.load(tmp_path / "whole.pt", weights_only=False))
    # Completeness follows from the content: a copy under another name is the same checkpoint.
    shutil.copytree(directory, tmp_path / "store" / "copy")
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        assert daemon.list()["copy"]["state"] == "durable"
        found = blank()
        dcp.load(found, checkpoint_id="copy", storage_reader=DaemonStorageReader(address=daemon.address))
        assert_equal(found)


@pytest.mark.parametrize("codec", CODECS)
def test_s3(s3: S3Server, codec: str) -> None:
    prefix = codec.replace(":", "-")
    with DaemonProcess(s3.url(prefix), *s3.arguments, "--codec", codec) as daemon:
        dcp.save(state(), checkpoint_id="run/step-17", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("run/step-17", address=daemon.address, timeout=60)
        daemon.kill()
        shutil.rmtree(daemon.shm_dir)
        daemon.start()
        found = blank()
        dcp.load(found, checkpoint_id="run/latest", storage_reader=DaemonStorageReader(address=daemon.address))
        assert_equal(found)
    assert s3.unfinished_uploads() == []
    client = {"endpoint_url": s3.endpoint}
    reader = FsspecReader(f"{s3.url(prefix)}/run/step-17", key="test-key", secret="test-secret", client_kwargs=client)
    found = blank()
    dcp.load(found, storage_reader=reader)
    assert_equal(found)


def test_a_missing_bucket_is_refused_at_start(s3: S3Server) -> None:
    refused = pytest.raises(RuntimeError, match=r"exit 3.*\n(.*\n)*ckptd: .*nosuchbucket")
    with refused, DaemonProcess("s3://nosuchbucket/x", *s3.arguments):
        pass
