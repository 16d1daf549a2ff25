"""What ckptd and stock DCP really wrote, to be damaged."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

from ckptd import manifest
from ckptd.v1.manifest_pb2 import Manifest
from ckptd_client import DaemonStorageWriter, wait
from daemons import DaemonProcess


@dataclass(frozen=True)
class Written:
    """One small checkpoint of ckptd's, and two of stock DCP's."""

    metadata: bytes
    manifest: bytes
    data: bytes
    stock: bytes
    stock_zstd: bytes

    @property
    def decoded(self) -> Manifest:
        return manifest.decode(self.manifest)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    store = tmp_path_factory.mktemp("store")
    state = {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "s": torch.tensor(2.5),
        "q": torch.eye(3).to_sparse(),
        "e": torch.empty(0, 4, dtype=torch.bfloat16),
        "o": {"lr": 0.1},
    }
    plain = {key: value for key, value in state.items() if key != "q"}
    dcp.save(plain, checkpoint_id=store / "stock", no_dist=True)
    dcp.save(plain, storage_writer=dcp.FileSystemWriter(store / "zstd", _extensions=[ZStandard()]), no_dist=True)
    with DaemonProcess(str(store)) as daemon:
        dcp.save(state, storage_writer=DaemonStorageWriter("step-1", address=daemon.address, tags={"a": "b"}), no_dist=True)
        wait("step-1", address=daemon.address, timeout=60)
    ours = store / "step-1"
    return Written(
        metadata=(ours / ".metadata").read_bytes(),
        manifest=next((ours / ".ckptd").glob("*.manifest")).read_bytes(),
        data=next(ours.glob("*.distcp")).read_bytes(),
        stock=(store / "stock" / ".metadata").read_bytes(),
        stock_zstd=(store / "zstd" / ".metadata").read_bytes(),
    )
