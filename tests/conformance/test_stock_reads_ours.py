"""Every store and codec, both ways: stock DCP reads what ckptd wrote, ckptd reads what stock wrote, from the store alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from conformance.outcomes import assert_same
from conformance.states import everything, everything_template
from conformance.ways import CODECS, QUICK_AND_SLOW, State, load
from daemons import DaemonProcess
from s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> State:
    """What stock makes of everything."""
    directory = tmp_path_factory.mktemp("expected")
    dcp.save(everything(), checkpoint_id=directory)
    return load(everything_template(), dcp.FileSystemReader(directory))


def save(daemon: DaemonProcess, checkpoint_id: str) -> None:
    dcp.save(everything(), storage_writer=DaemonStorageWriter(checkpoint_id, address=daemon.address))
    wait(checkpoint_id, address=daemon.address, timeout=60)


def load_with_ours(daemon: DaemonProcess, checkpoint_id: str) -> State:
    return load(everything_template(), DaemonStorageReader(checkpoint_id, address=daemon.address))


def without_memory(daemon: DaemonProcess) -> None:
    """A new daemon on the same store, which has nothing but that."""
    daemon.kill()
    shutil.rmtree(daemon.shm_dir)
    daemon.start()


@pytest.mark.parametrize("codec", CODECS)
def test_a_directory(tmp_path: Path, expected: State, codec: str) -> None:
    with DaemonProcess(str(tmp_path), "--codec", codec) as daemon:
        save(daemon, "run/step-17")
        assert_same(load(everything_template(), dcp.FileSystemReader(tmp_path / "run" / "step-17")), expected, "with stock")
        without_memory(daemon)
        assert_same(load_with_ours(daemon, "run/latest"), expected, "from the store")
        # Completeness follows from the content: a copy under another name is the same checkpoint.
        shutil.copytree(tmp_path / "run" / "step-17", tmp_path / "copy")
        shutil.rmtree(tmp_path / "run")
        assert daemon.list()["copy"]["state"] == "durable"
        assert_same(load_with_ours(daemon, "copy"), expected, "copied")


@pytest.mark.parametrize("codec", QUICK_AND_SLOW)
def test_s3(s3: S3Server, expected: State, codec: str) -> None:
    root = s3.url(codec.replace(":", "-"))
    options: dict[str, Any] = {"key": "test-key", "secret": "test-secret", "client_kwargs": {"endpoint_url": s3.endpoint}}
    with DaemonProcess(root, *s3.arguments, "--codec", codec) as daemon:
        save(daemon, "run/step-17")
        extensions = None if codec == "none" else [ZStandard()]
        dcp.save(everything(), storage_writer=FsspecWriter(f"{root}/stock/step-17", _extensions=extensions, **options))
        without_memory(daemon)
        for checkpoint_id in ("run/latest", "stock/latest"):
            assert_same(load_with_ours(daemon, checkpoint_id), expected, checkpoint_id)
    assert s3.unfinished_uploads() == []
    for checkpoint_id in ("run/step-17", "stock/step-17"):
        assert_same(
            load(everything_template(), FsspecReader(f"{root}/{checkpoint_id}", **options)), expected, f"{checkpoint_id} with stock"
        )


WRITERS: dict[str, Callable[[Path], Any]] = {
    "plain": dcp.FileSystemWriter,
    "zstd": lambda directory: dcp.FileSystemWriter(directory, _extensions=[ZStandard()]),
    "a_file_per_item": lambda directory: dcp.FileSystemWriter(directory, single_file_per_rank=False, thread_count=2),
    "files_of_two_threads": lambda directory: dcp.FileSystemWriter(directory, thread_count=2),
    "unsynced": lambda directory: dcp.FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, DaemonProcess]]:
    store = tmp_path_factory.mktemp("store")
    with DaemonProcess(str(store)) as daemon:
        yield store, daemon


@pytest.mark.parametrize("name", WRITERS)
def test_ours_reads_what_stocks_writers_wrote(directory: tuple[Path, DaemonProcess], expected: State, name: str) -> None:
    store, daemon = directory
    dcp.save(everything(), storage_writer=WRITERS[name](store / name / "step-1"))
    assert_same(load_with_ours(daemon, f"{name}/latest"), expected, name)
    assert daemon.list()[f"{name}/step-1"]["state"] == "durable"


def test_the_memory_store_of_fsspec_as_far_as_it_is_honest(expected: State) -> None:
    """It lives in the daemon's process: nobody else can read it, and it ends with the daemon. What memory lacks comes from it."""
    with DaemonProcess("memory://root", memory="96MiB") as daemon:
        save(daemon, "run/step-1")
        for step in (2, 3, 4):
            writer = DaemonStorageWriter(f"fill/step-{step}", address=daemon.address)
            dcp.save({"x": torch.full((40 * MIB,), step, dtype=torch.uint8)}, storage_writer=writer)
            wait(f"fill/step-{step}", address=daemon.address, timeout=60)
        assert_same(load_with_ours(daemon, "run/latest"), expected, "memory://")
        assert json.loads(daemon.cli("status", "--json").stdout)["bytes_from"]["store"] > 0
        found = load({"x": torch.zeros(40 * MIB, dtype=torch.uint8)}, DaemonStorageReader("fill/latest", address=daemon.address))
        assert found["x"].unique().tolist() == [4]


def test_a_missing_bucket_is_refused_at_start(s3: S3Server) -> None:
    refused = pytest.raises(RuntimeError, match=r"exit 3.*\n(.*\n)*ckptd: .*nosuchbucket")
    with refused, DaemonProcess("s3://nosuchbucket/x", *s3.arguments):
        pass
