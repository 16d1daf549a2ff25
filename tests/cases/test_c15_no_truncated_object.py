"""C15: an upload that breaks off, after few bytes or after a whole part, publishes nothing and leaves no parts."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.store import Store
from ckptd.stores import open_store
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from faulty_proxy import Fault, FaultyProxy
from gcs import GCSServer
from s3 import S3Server

MIB = 1024 * 1024
PART = 16 * MIB


class WriteError(Exception):
    pass


@pytest.fixture(params=["s3", "gcs"])
def server(request: pytest.FixtureRequest) -> S3Server | GCSServer:
    found: S3Server | GCSServer = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def prefix() -> str:
    return f"c15-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("nbytes", [0, 7, PART, PART + 7, 2 * PART + 7])
def test_a_write_that_raises_after_some_bytes_leaves_nothing(server: S3Server | GCSServer, prefix: str, nbytes: int) -> None:
    store: Store | None = open_store(server.url(prefix), server.options)

    def source() -> Iterator[bytes]:
        yield bytes(nbytes)
        raise WriteError

    assert store is not None
    for key in ("step-1/__0_0123456789abcdef.distcp", "step-1/.metadata"):
        with pytest.raises(WriteError):
            store.put(key, source, nbytes_hint=64 * MIB)
    store = None
    gc.collect()  # fsspec's own files publish what they hold when they are collected
    assert server.keys(prefix) == {}
    assert not isinstance(server, S3Server) or server.unfinished_uploads(prefix) == []


@pytest.mark.parametrize("nbytes", [7, 2 * MIB], ids=["few bytes", "more"])
def test_a_connection_that_breaks_in_every_upload_of_a_save_publishes_nothing(
    server: S3Server | GCSServer, prefix: str, nbytes: int
) -> None:
    with FaultyProxy(server.endpoint) as proxy:
        options = {**server.options, "endpoint_url": proxy.endpoint}
        arguments = [part for name, value in options.items() for part in ("--store-option", f"{name}={value}")]
        with DaemonProcess(server.url(prefix), "--codec", "none", *arguments) as daemon:
            state = {"t": torch.randn(20 * MIB // 4)}  # a part and a bit
            proxy.tell(Fault(on="PUT|POST .*(uploadType=media|upload_id)", reset_request_after=nbytes))
            dcp.save(state, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
            before = proxy.count("PUT")
            while proxy.count("PUT") < before + 2:
                assert server.keys(prefix) == {}
                assert daemon.list()["step-1"]["state"] == "accepted"
            assert server.keys(prefix) == {}
            proxy.tell()
            wait("step-1", address=daemon.address, timeout=100)
            for key, size in server.keys(prefix).items():
                assert len(server.read(key)) == size
            found = {"t": torch.zeros_like(state["t"])}
            for path in daemon.shm_dir.glob("*.sealed"):  # what is loaded comes from the store
                path.unlink()
            dcp.load(found, checkpoint_id="step-1", storage_reader=DaemonStorageReader(address=daemon.address))
            assert torch.equal(found["t"], state["t"])
    assert not isinstance(server, S3Server) or [key for key in server.unfinished_uploads() if key.startswith(prefix)] == []
