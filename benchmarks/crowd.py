"""Many nodes in one process, and saves made up for them: what `scaling.py` measures with.

Each node is what a daemon consists of, with a shm-dir and a loopback port of its own; its background work does not
run unless it is asked for. Shards have true tables and no content: only what describes them is looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import torch
from torch.distributed.checkpoint import metadata as dcp

from ckptd import archive
from ckptd.codec import block_hash
from ckptd.config import Settings
from ckptd.daemon import OPTIONS, listen, put_together
from ckptd.model import BLOCK_NBYTES, CheckpointId, data_key, mint_token
from ckptd.peerservice import Introductions
from ckptd.service import ErrorInterceptor
from ckptd.table import write_range
from ckptd.v1.daemon_pb2 import CommitRequest
from ckptd.v1.daemon_pb2_grpc import add_DaemonServicer_to_server
from ckptd.v1.manifest_pb2 import Item, Manifest, Receipt, Record, Stored, StoredShard, Table
from ckptd.v1.peer_pb2_grpc import add_PeerServicer_to_server
from ckptd_client import metadata as pickles
from ckptd_client.forms import form_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ckptd.daemon import Rooms
    from ckptd.localstore import LocalStore
    from ckptd.store import Source

OWNER = "benchmark"
#: Shapes of the synthetic tensors: a checkpoint has many items and few forms.
SHAPES = [(1, columns) for columns in range(9, 17)]


class Counted:
    """A store whose requests are counted, by verb."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.url, self.conditional = store.url, store.conditional
        self.requests: Counter[str] = Counter()

    def put(self, key: str, source: Source, **options: Any) -> int:
        self.requests["put"] += 1
        return self.store.put(key, source, **options)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.requests["get"] += 1
        return self.store.get(key, start, end)

    def list(self, prefix: str = "", **options: Any) -> Any:
        self.requests["list"] += 1
        return self.store.list(prefix, **options)

    def children(self, directory: str = "") -> Any:
        self.requests["list"] += 1
        return self.store.children(directory)

    def delete(self, keys: Any) -> None:
        self.requests["delete"] += 1
        self.store.delete(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts the calls that all nodes take, by name."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.taken[handler_call_details.method.rpartition("/")[2]] += 1
        return await continuation(handler_call_details)


CALLS = Calls()


@asynccontextmanager
async def nodes(count: int, store: Any, memory: int, servers: list[grpc.aio.Server] | None = None) -> AsyncIterator[list[Rooms]]:
    """So many nodes, each of which the others can call; no background work of theirs runs. `servers`: to be filled with theirs."""
    with contextlib.ExitStack() as ports:  # all at once, so that they differ
        held = [ports.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    async with contextlib.AsyncExitStack() as stack:
        started = []
        for address in addresses:
            shm_dir = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
            stack.callback(shutil.rmtree, shm_dir, ignore_errors=True)
            settings = Settings(
                store=store.url,
                listen=(address,),
                advertise=address,
                shared_store=True,
                memory=memory,
                shm_dir=shm_dir,
                codec="none",
                grace_seconds=0,
            )
            rooms = put_together(settings, store)
            stack.push_async_callback(end, rooms)
            rooms.node.recover()
            rooms.node.lease(OWNER)
            server = grpc.aio.server(interceptors=(CALLS, ErrorInterceptor(), Introductions(rooms.peers)), options=OPTIONS)
            add_DaemonServicer_to_server(rooms.service, server)
            add_PeerServicer_to_server(rooms.peer_service, server)
            listen(server, address, None)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            started.append(rooms)
            if servers is not None:
                servers.append(server)
        yield started


async def end(rooms: Rooms) -> None:
    await rooms.peers.close()
    rooms.restore.close()
    rooms.node.close()
    for pool in rooms.pools:
        pool.shutdown(wait=False, cancel_futures=True)


def table_of(first: int, count: int) -> Table:
    """The table of a shard of `count` small float32 tensors."""
    table = Table(forms=[form_of(torch.float32, shape, (shape[1], 1)) for shape in SHAPES])
    pkls = [len(form.pkl) for form in table.forms]
    at = 0
    for number in range(first, first + count):
        form = number % len(SHAPES)
        nbytes = 4 * SHAPES[form][1]
        raw_at, end = archive.layout(at, pkls[form], nbytes)
        item = Item(fqn=name_of(number).encode(), offset=[0, 0], has_offset=True, index=0, at=at, raw_at=raw_at, nbytes=nbytes, form=form)
        table.items.append(item)
        at = end
    table.end = at
    return table


def name_of(number: int) -> str:
    return f"model.layers.{number // 16}.self_attn.weights.{number:07d}"


def pickle_of(count: int) -> bytes:
    """The metadata pickle of `count` such tensors, as a trainer makes it."""
    kept = dcp.TensorProperties(dtype=torch.float32)
    sizes = [torch.Size(shape) for shape in SHAPES]
    found: dict[str, dcp.STORAGE_TYPES] = {}
    for number in range(count):
        size = sizes[number % len(sizes)]
        chunk = dcp.ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=size)
        found[name_of(number)] = dcp.TensorStorageMetadata(properties=kept, size=size, chunks=[chunk])
    return pickles.dump(dcp.Metadata(state_dict_metadata=found, planner_data={name: (name,) for name in found}))


async def written(rooms: Rooms, checkpoint: CheckpointId, rank: int, table: Table, encoded: bytes) -> str:
    """A shard in a segment of the node, not sealed yet; its token."""
    segment = await rooms.node.allocate(OWNER, checkpoint, rank, table.end + len(encoded), metadata=False, deadline=None)
    write_range(segment.path, table.end, encoded)
    return segment.token


async def sealed_pickle(rooms: Rooms, checkpoint: CheckpointId, data: bytes) -> Receipt:
    segment = await rooms.node.allocate(OWNER, checkpoint, 0, len(data), metadata=True, deadline=None)
    write_range(segment.path, 0, data)
    return await rooms.node.seal(OWNER, segment.token, len(data), 0)


async def sealed(all_nodes: Sequence[Rooms], checkpoint: CheckpointId, tables: Sequence[Table], pickle: bytes) -> CommitRequest:
    """One shard per table, in turn on all nodes, and what the coordinator would commit."""
    shards = []
    for rank, table in enumerate(tables):
        rooms, encoded = all_nodes[rank * len(all_nodes) // len(tables)], table.SerializeToString()
        token = await written(rooms, checkpoint, rank, table, encoded)
        shards.append(await rooms.node.seal(OWNER, token, table.end, len(encoded)))
    metadata = await sealed_pickle(all_nodes[0], checkpoint, pickle)
    return CommitRequest(id=str(checkpoint), step=checkpoint.step, shards=shards, metadata=metadata, durable=True)


def as_large(receipt: Receipt) -> Receipt:
    """The same with the numbers of a large job: tens of gigabytes, thousands of items."""
    large = Receipt.FromString(receipt.SerializeToString())
    large.nbytes, large.raw_bytes, large.table_nbytes, large.items = 20 * 2**30, 20 * 2**30, 2**18, 2000
    large.sealed_us = time.time_ns() // 1000
    return large


def stored(store: Counted, checkpoint: CheckpointId, record: Record, tables: Sequence[Table]) -> Manifest:
    """What the flush would have made of these tables, with codec none; each item is one block."""
    digest = block_hash(b"")
    shards = []
    for rank, table in enumerate(tables):
        ends = [*(item.at for item in table.items[1:]), table.end]
        blocks = [Stored(offset=item.at, lengths=[end - item.at], hashes=digest) for item, end in zip(table.items, ends, strict=True)]
        shards.append(StoredShard(rank=rank, file=f"__{rank}_{mint_token()}.distcp", nbytes=table.end, table=table, stored=blocks))
        path = Path(store.url) / data_key(checkpoint, shards[-1].file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, table.end)
    return Manifest(summary=record.summary, block_nbytes=BLOCK_NBYTES, shards=shards)
