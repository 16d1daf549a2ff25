"""C43: parts that go to GCS keep its rules, and tiny objects need no special way."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.errors import StoreError
from ckptd.stores import open_store
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from faulty_proxy import Fault, FaultyProxy, Headers, refuse_json
from gcs import GCSServer

GRAIN = 256 * 1024


@pytest.fixture
def proxy(gcs_server: GCSServer) -> Iterator[FaultyProxy]:
    """GCS with the rules that the emulator lacks."""

    def rule(_line: str, headers: Headers, body: bytes) -> Fault | None:
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
        if found is None:
            return None
        start, end = int(found[1]), int(found[2]) + 1
        if (
            end - start != len(body)
            or (found[3] == "*" and len(body) % GRAIN)
            or start % GRAIN
            or (found[3] != "*" and int(found[3]) != end)
        ):
            return refuse_json(400, "a part that is not the last must be a multiple of 262144 bytes")
        return None

    with FaultyProxy(gcs_server.endpoint) as made:
        made.judge = rule
        yield made


SIZES = [0, 1, GRAIN - 1, GRAIN, GRAIN + 1, 4 * GRAIN - 1, 4 * GRAIN, 4 * GRAIN + 1, 13 * GRAIN + 1]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_commits(monkeypatch: pytest.MonkeyPatch, gcs_server: GCSServer, proxy: FaultyProxy, nbytes: int) -> None:
    monkeypatch.setattr("ckptd.gcs._PART_NBYTES", 4 * GRAIN)
    root = f"c43-{uuid.uuid4().hex[:8]}"
    store = open_store(gcs_server.url(root), {**gcs_server.options, "endpoint_url": proxy.endpoint})
    data = bytes(range(255)) * (nbytes // 255 + 1)
    data = data[:nbytes]
    pieces = [data[at : at + 100_003] for at in range(0, nbytes, 100_003)]
    assert store.put("step-1/file", lambda: pieces, nbytes_hint=None) == nbytes
    assert gcs_server.read(f"{root}/step-1/file") == data
    assert store.get("step-1/file") == data


def test_the_rule_is_kept_by_this_test_too(monkeypatch: pytest.MonkeyPatch, gcs_server: GCSServer, proxy: FaultyProxy) -> None:
    monkeypatch.setattr("ckptd.gcs._PART_NBYTES", 4 * GRAIN - 1)
    store = open_store(gcs_server.url("c43-wrong"), {**gcs_server.options, "endpoint_url": proxy.endpoint})
    with pytest.raises(StoreError, match="262144"):
        store.put("step-1/file", lambda: [bytes(5 * GRAIN)])
    assert gcs_server.keys("c43-wrong") == {}


def test_a_save_of_tiny_and_large_items_becomes_durable_and_loads_from_the_store(gcs_server: GCSServer, proxy: FaultyProxy) -> None:
    store = gcs_server.url(f"c43-{uuid.uuid4().hex[:8]}")
    state = {"empty": torch.zeros(0), "one": torch.ones(1, dtype=torch.uint8), "large": torch.randn(5_000_000)}  # 20 MB: parts of 16 MiB
    options = ["--store-option", f"endpoint_url={proxy.endpoint}", "--store-option", "token=anon"]
    with DaemonProcess(store, "--codec", "none", *options) as daemon:
        dcp.save(state, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
    with DaemonProcess(store, *options) as other:
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id="latest", storage_reader=DaemonStorageReader(address=other.address))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
