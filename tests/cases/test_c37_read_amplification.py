"""C37, C38: a load reads what its ranks need, once per cluster, and does not take more memory than that."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from faulty_proxy import FaultyProxy
from hosts import Hosts
from s3 import S3Server

MIB = 2**20
TENSORS, NUMEL = 100, MIB // 4


def whole() -> dict[str, Any]:
    """100 tensors of 1 MiB, which no codec makes smaller."""
    generator = torch.Generator().manual_seed(7)
    return {
        f"t{number:03d}": torch.randint(-(2**31), 2**31 - 1, (NUMEL,), dtype=torch.int32, generator=generator) for number in range(TENSORS)
    }


def save_and_forget(store: str, options: list[str], id: str) -> None:
    """Saved and durable, and in nobody's memory."""
    with DaemonProcess(store, *options) as daemon:
        dcp.save(whole(), storage_writer=DaemonStorageWriter(id, address=daemon.address), no_dist=True)
        wait(id, address=daemon.address, timeout=60)


def load_together(addresses: list[str], id: str) -> None:
    """One rank per address loads all of it, DDP's way, at the same time: DCP's steps, in DCP's order."""
    readers = [DaemonStorageReader(id, address=address) for address in addresses]
    planners, plans = [], []
    for rank, reader in enumerate(readers):
        target = {key: torch.zeros_like(tensor) for key, tensor in whole().items()}
        metadata = reader.read_metadata()
        planner = DefaultLoadPlanner()
        planner.set_up_planner(target, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        planners.append((planner, target))
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(plans)

    def read(rank: int) -> None:
        planner, target = planners[rank]
        readers[rank].read_data(planner.finish_plan(plans[rank]), planner).wait()
        for key, tensor in whole().items():
            assert torch.equal(target[key], tensor), (rank, key)

    with ThreadPoolExecutor(len(readers)) as threads:  # at the same time, as ranks do
        list(threads.map(read, range(len(readers))))


@pytest.mark.parametrize(("nodes", "ranks"), [pytest.param(1, 4, marks=pytest.mark.slow), (4, 2)])
def test_whatever_the_number_of_ranks_the_server_sends_each_byte_once(nodes: int, ranks: int, s3_server: S3Server) -> None:
    prefix = f"c37-{nodes}"
    save_and_forget(s3_server.url(prefix), s3_server.arguments, "run/step-1")
    stored = sum(s3_server.keys(prefix).values())
    with FaultyProxy(s3_server.endpoint) as proxy:
        options = [part.replace(s3_server.endpoint, proxy.endpoint) for part in s3_server.arguments]
        with Hosts(nodes, s3_server.url(prefix), *options, shared=False) as hosts:
            before, sent_before = len(proxy.lines), proxy.nbytes_sent
            load_together([host.address for host in hosts for _ in range(ranks)], "run/step-1")
            sent = proxy.nbytes_sent - sent_before
            assert TENSORS * MIB <= sent <= 1.05 * stored, (sent, stored)
            gets = [line for line in proxy.lines[before:] if line.startswith("GET") and ".distcp" in line]
            assert len(gets) <= 40, gets  # not one per tensor and rank
            found = hosts.bytes_from()
    assert found["store"] <= 1.05 * stored
    assert found["peer"] <= (nodes - 1) * 1.05 * stored


def test_a_few_rows_of_a_large_tensor_cost_the_blocks_that_they_lie_in(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    large = torch.randint(-(2**31), 2**31 - 1, (1024, 16 * 1024), dtype=torch.int32)  # 64 MiB
    with DaemonProcess(store) as daemon:
        dcp.save({"w": large}, storage_writer=DaemonStorageWriter("step-1", address=daemon.address), no_dist=True)
        wait("step-1", address=daemon.address, timeout=60)
    program = """
        import sys, torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        from ckptd_client import DaemonStorageReader
        # As rank 0 of 256 would: its shard is 4 rows.
        dist.init_process_group("fake", rank=0, world_size=256, store=dist.HashStore())
        mesh = init_device_mesh("cpu", (256,))
        target = DTensor.from_local(torch.zeros(4, 16 * 1024, dtype=torch.int32), mesh, [Shard(0)])
        dcp.load({"w": target}, storage_reader=DaemonStorageReader("step-1", address=sys.argv[1]), no_dist=True)
        torch.save(target.to_local(), sys.argv[2])
    """
    with DaemonProcess(store) as daemon:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), daemon.address, str(tmp_path / "rows")]
        subprocess.run(command, check=True, timeout=100)
        assert torch.equal(torch.load(tmp_path / "rows"), large[:4])
        store_bytes = int(daemon_bytes(daemon)["store"])
    assert 0 < store_bytes <= 2 * 4 * MIB  # 4 rows are 256 KiB: one block, or two if they lie across


def daemon_bytes(daemon: DaemonProcess) -> dict[str, int]:
    done = daemon.cli("status", "--json")
    found: dict[str, int] = json.loads(done.stdout)["bytes_from"]
    return found


@pytest.mark.slow
def test_a_rank_takes_little_more_memory_than_what_it_loads(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    save_and_forget(store, [], "step-1")
    program = """
        import resource, sys, torch
        import torch.distributed.checkpoint as dcp
        from ckptd_client import DaemonStorageReader
        target = {f"t{number:03d}": torch.ones(2**18, dtype=torch.int32) for number in range(100)}
        one = {"t000": torch.ones(2**18, dtype=torch.int32)}
        dcp.load(one, storage_reader=DaemonStorageReader("step-1", address=sys.argv[1]), no_dist=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        dcp.load(target, storage_reader=DaemonStorageReader("step-1", address=sys.argv[1]), no_dist=True)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    with DaemonProcess(store, memory="64MiB") as daemon:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), daemon.address]
        done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True)
    # The target is there already. Shared pages count for whoever maps them, and never more than the daemon's budget.
    assert int(done.stdout) <= 100 + 64, done.stdout
