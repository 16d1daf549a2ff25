"""Leases and unsealed segments, with a client that misbehaves."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest

from ckptd.v1 import daemon_pb2 as pb
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd_client.mapping import open_mapping
from daemons import DaemonProcess

#: `program` of a daemon whose answers come long before their callers' deadlines, however slow this machine is.
EARLY = (
    "-c",
    "import sys, ckptd.service as s; s.ANSWER_BEFORE_SECONDS = 30.0; import ckptd.cli.main as c; sys.exit(c.main())",
)


@pytest.mark.slow
def test_an_unsealed_segment_that_nobody_maps_goes_although_its_lease_lives(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon, grpc.insecure_channel(daemon.address) as channel:
        stub = DaemonStub(channel)
        lease = stub.Lease(pb.LeaseRequest(owner="a", pid=1))
        next(iter(lease))
        mapped, forgotten = (stub.Allocate(pb.AllocateRequest(owner="a", id=f"step-{step}", nbytes=100), timeout=30) for step in (1, 2))
        mapping = open_mapping(mapped.path, mapped.inode, mapped.nbytes, writable=True)
        deadline = time.monotonic() + 60
        while stub.Status(pb.StatusRequest(), timeout=10).open_shards > 1:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        time.sleep(2.0)
        left = stub.Status(pb.StatusRequest(), timeout=10)
        assert (left.open_shards, left.leases) == (1, 1)
        assert Path(mapped.path).exists()
        assert not Path(forgotten.path).exists()
        with pytest.raises(grpc.RpcError, match="save again"):
            stub.Seal(pb.SealRequest(owner="a", token=forgotten.token, nbytes=0), timeout=10)
        mapping.close()
        lease.cancel()


def test_a_lease_belongs_to_its_owner(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon, grpc.insecure_channel(daemon.address) as channel:
        stub = DaemonStub(channel)
        with pytest.raises(grpc.RpcError, match="no lease"):
            stub.Allocate(pb.AllocateRequest(owner="nobody", id="step-1", nbytes=100), timeout=30)
        lease = stub.Lease(pb.LeaseRequest(owner="a", pid=1))
        next(iter(lease))
        segment = stub.Allocate(pb.AllocateRequest(owner="a", id="step-1", nbytes=100), timeout=30)
        for owner in ("b", ""):
            with pytest.raises(grpc.RpcError, match="no longer holds"):
                stub.Seal(pb.SealRequest(owner=owner, token=segment.token, nbytes=0), timeout=10)
        lease.cancel()


def test_a_seal_of_memory_that_is_gone_says_to_save_again(tmp_path: Path) -> None:
    """As it is when the lease ends, or somebody removes the file, while the daemon reads the shard's table."""
    with DaemonProcess(str(tmp_path / "store")) as daemon, grpc.insecure_channel(daemon.address) as channel:
        stub = DaemonStub(channel)
        lease = stub.Lease(pb.LeaseRequest(owner="a", pid=1))
        next(iter(lease))
        segment = stub.Allocate(pb.AllocateRequest(owner="a", id="step-1", nbytes=100), timeout=30)
        Path(segment.path).unlink()
        with pytest.raises(grpc.RpcError, match="save again") as refused:
            stub.Seal(pb.SealRequest(owner="a", token=segment.token, nbytes=0, table_nbytes=10), timeout=10)
        assert refused.value.code() == grpc.StatusCode.ABORTED
        lease.cancel()


def test_shards_of_one_save_that_do_not_fit_together_are_no_fault_of_others(tmp_path: Path) -> None:
    running = DaemonProcess(str(tmp_path / "store"), memory="128MiB", program=EARLY)
    with running as daemon, grpc.insecure_channel(daemon.address) as channel:
        stub = DaemonStub(channel)
        leases = [stub.Lease(pb.LeaseRequest(owner=owner, pid=1)) for owner in "ab"]
        for lease in leases:
            next(iter(lease))
        stub.Allocate(pb.AllocateRequest(owner="a", id="step-1", rank=0, nbytes=78 * 2**20), timeout=60)
        for id, why in (("step-1", "the shards of this save on this node need 156.0 MiB or more together"), ("step-2", "being written")):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Allocate(pb.AllocateRequest(owner="b", id=id, rank=1, nbytes=78 * 2**20), timeout=31)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert why in refused.value.details()
        for lease in leases:
            lease.cancel()
