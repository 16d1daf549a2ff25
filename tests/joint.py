"""Saves and loads of one checkpoint through several daemons, one rank each, in one process: DCP's own steps, in DCP's order.

And the steps of a commit, as a coordinator's daemon has the others take them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from ckptd.model import mint_attempt
from ckptd.v1.daemon_pb2 import ResolveRequest
from ckptd.v1.manifest_pb2 import Receipt, Record, Summary
from ckptd.v1.peer_pb2 import AdoptRequest, PrepareRequest
from ckptd.v1.peer_pb2_grpc import PeerStub
from ckptd_client import CkptdError, DaemonStorageReader, DaemonStorageWriter
from ckptd_client import metadata as pickles
from ckptd_client.channel import Daemon, connect, rebuild
from ckptd_client.shard import write_metadata
from client.states import assert_equal, blank
from hosts import Host, Hosts


def part(value: int, rank: int, numel: int = 10_000) -> dict[str, Any]:
    """What one rank saves: every bit depends on the value and the rank."""
    whole = torch.arange(numel, dtype=torch.int32) + 1000 * value + rank
    return {f"r{rank}": {"w": whole, "h": whole[:99].to(torch.bfloat16), "empty": torch.zeros(0, rank), "value": value}}


def state(value: int, world: int, numel: int = 10_000) -> dict[str, Any]:
    """What all ranks together save."""
    return {key: there for rank in range(world) for key, there in part(value, rank, numel).items()}


def addresses(hosts: Hosts) -> list[str]:
    """Where the ranks of a save that all hosts take part in save to."""
    return [host.address for host in hosts]


def listed(host: Host, id: str) -> str:
    """In which state the host's daemon lists the checkpoint; "" if it does not."""
    found = host.daemon.list().get(id)
    return "" if found is None else str(found["state"])


def assert_stock_reads(store: Path, id: str, value: int, world: int) -> None:
    """Stock DCP finds the checkpoint in the store's directory, every bit of it."""
    found = blank(state(0, world))
    dcp.load(found, storage_reader=dcp.FileSystemReader(store / id), no_dist=True)
    assert_equal(found, state(value, world))


class Save:
    """One save by as many ranks as there are addresses; rank 0 coordinates."""

    def __init__(self, addresses: Sequence[str], id: str, value: int, numel: int = 10_000, **options: Any) -> None:
        self.id = id
        self.writers = [DaemonStorageWriter(id, address=address, **options) for address in addresses]
        self.value, self.numel = value, numel

    def write(self) -> None:
        """Everything up to and without the commit: all shards are sealed then."""
        self.planners = [DefaultSavePlanner() for _ in self.writers]
        plans = []
        for rank, (writer, planner) in enumerate(zip(self.writers, self.planners, strict=True)):
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            planner.set_up_planner(part(self.value, rank, self.numel), writer.storage_meta(), rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        plans, self.metadata = self.planners[0].create_global_plan(plans)
        plans = self.writers[0].prepare_global_plan(plans)
        self.results = [
            writer.write_data(planner.finish_plan(plan), planner).value()
            for writer, planner, plan in zip(self.writers, self.planners, plans, strict=True)
        ]

    def finish(self) -> None:
        """The commit: when it returns, the checkpoint is accepted."""
        self.writers[0].finish(self.metadata, self.results)


def save(
    addresses: Sequence[str], id: str, value: int, numel: int = 10_000, *, between: Callable[[], None] = lambda: None, **options: Any
) -> None:
    """A whole save; `between` runs when all is sealed and nothing committed."""
    one = Save(addresses, id, value, numel, **options)
    one.write()
    between()
    one.finish()


def save_replicated(hosts: Hosts, id: str, value: int) -> None:
    """A save that all hosts take part in, until each knows of the copies."""
    save(addresses(hosts), id, value)
    for host in hosts:
        host.daemon.until(id, "replicated")


def load(address: str, id: str, world: int, numel: int = 10_000, *, fallback: bool = False) -> int:
    """The value that the checkpoint holds, after comparing all of it. Raises what DCP raises."""
    found = blank(state(0, world, numel))
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=address, fallback=fallback), no_dist=True)
    assert_equal(found, state(found["r0"]["value"], world, numel))
    return int(found["r0"]["value"])


def load_together(addresses: Sequence[str], id: str, world: int, numel: int = 10_000) -> list[int | CkptdError]:
    """One rank per address, each loads all of it at the same time: the value that each found, or why it failed.

    Raises what fails before the first byte is read.
    """
    readers = [DaemonStorageReader(id, address=address) for address in addresses]
    planners = [DefaultLoadPlanner() for _ in addresses]
    states = [blank(state(0, world, numel)) for _ in addresses]
    plans = []
    for rank, (reader, planner, into) in enumerate(zip(readers, planners, states, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(into, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))

    def read(rank: int) -> int | CkptdError:
        try:
            readers[rank].read_data(planners[rank].finish_plan(plans[rank]), planners[rank]).wait()
        except CkptdError as error:
            return error
        assert_equal(states[rank], state(states[rank]["r0"]["value"], world, numel))
        return int(states[rank]["r0"]["value"])

    with ThreadPoolExecutor(len(addresses)) as threads:
        return list(threads.map(read, range(len(addresses))))


@contextmanager
def at_the_same_moment(ranks: int) -> Iterator[threading.Event]:
    """So many loads in threads ask their daemons which checkpoint is meant; it is set when all have asked, and all have been heard."""
    asked = threading.Event()
    daemons: set[Daemon] = set()

    def have_heard() -> None:
        for daemon in [*daemons] * 2:
            daemon.hello(seconds=60)  # on the same connection: what was asked before has come before, and has begun by the second time
        asked.set()

    together = threading.Barrier(ranks, action=have_heard)

    def resolve_together(daemon: Daemon, request: ResolveRequest, *, seconds: float = 60.0) -> Any:
        daemons.add(daemon)
        call = daemon._stub.Resolve.future(request, timeout=seconds)
        together.wait(60)
        try:
            return call.result()
        except grpc.RpcError as error:
            raise rebuild(error, daemon.address, f"find {request.id!r}") from error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Daemon, "resolve", resolve_together)
        yield asked


def record_of(written: Save, coordinator: Host) -> Record:
    """The record that the coordinator's daemon would now make of the save, and have all participants adopt."""
    id = written.id
    receipts = [Receipt.FromString(result.storage_data) for (result,) in written.results]
    pickle = write_metadata(connect(coordinator.address), checkpoint_id=id, rank=0, data=pickles.dump(written.metadata))
    now_us = time.time_ns() // 1000
    summary = Summary(id=id, attempt=mint_attempt(now_us, None), accepted_us=now_us, world_size=len(receipts), codec="none")
    return Record(summary=summary, shards=receipts, metadata=pickle, durable=True)


@contextmanager
def peer(host: Host) -> Iterator[Any]:
    """The host's daemon, as others of its kind call it."""
    with grpc.insecure_channel(host.peer) as channel:
        stub: Any = PeerStub(channel)
        yield stub


def prepare_and_adopt(daemon: Any, record: Record) -> None:
    """What the coordinator's daemon asks of a participant that is rank 1 before it accepts the attempt itself."""
    id = record.summary.id
    daemon.Prepare(PrepareRequest(id=id, shards=record.shards[1:], metadata=record.metadata, durable=True), timeout=60)
    daemon.Adopt(AdoptRequest(record=record), timeout=60)


def adopted(hosts: Hosts, id: str, value: int) -> Record:
    """The record of a save over `id` that the second host, the only participant, has adopted, and the first has not accepted."""
    written = Save(addresses(hosts), id, value, overwrite=True)
    written.write()
    record = record_of(written, hosts[0])
    with peer(hosts[1]) as daemon:
        prepare_and_adopt(daemon, record)
    return record
