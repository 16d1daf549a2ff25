"""What other daemons are given by this one's loads: blocks of data files that it reads for all of them.

Promises: a block that is sent was verified, and stays as it is until it is sent; it is read from the store
once, however many ask for it here, and no other node is asked for it; memory that is full is an error
soon, because who asks can read the store itself. Lives on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from ckptd import errors
from ckptd.blocks import StoredBlock, cut, raw_ranges, spans
from ckptd.fetcher import Blocks
from ckptd.model import CheckpointId
from ckptd.nearby import GROUP_NBYTES
from ckptd.pull import send
from ckptd.restore import Restore
from ckptd.v1.manifest_pb2 import Manifest
from ckptd.v1.peer_pb2 import Bytes, FetchRequest, Holding, HoldingsRequest

#: How long a group of blocks stands in the line for memory: less than whoever asks waits for it.
MEMORY_SECONDS: Final = 4.0


async def holdings(restore: Restore, request: HoldingsRequest) -> AsyncIterator[Holding]:
    """What this node holds of what is asked for."""
    for holding in list(restore.whereabouts.answer(request)):
        yield holding


async def fetch(restore: Restore, request: FetchRequest) -> AsyncIterator[Bytes]:
    """The blocks that are asked for, in file order and in pieces. Raises LeaseLost if the store does not have the attempt
    (any more), InvalidRequest for blocks that it does not have, ArenaFull, and what reading the store raises.
    """
    id = CheckpointId.parse(request.id)
    contents = await restore.indexes.contents(id, request.attempt)
    if not isinstance(contents, Manifest):
        raise errors.InvalidRequest(f"{id} was written by stock DCP: each node reads it for itself")
    if request.shard >= len(contents.shards) or len(request.items) != len(request.blocks):
        raise errors.InvalidRequest(f"{id} has {len(contents.shards)} shards, and blocks have an item and a number each")
    keys = list(zip(request.items, request.blocks, strict=True))
    ranges = raw_ranges(contents.shards[request.shard].table, keys, contents.block_nbytes)
    groups = cut(restore.fetcher.find(contents, request.shard, *ranges).blocks, GROUP_NBYTES)
    threads = restore.node.memory_threads

    def begin(group: list[StoredBlock]) -> asyncio.Task[Blocks]:
        deadline = asyncio.get_running_loop().time() + MEMORY_SECONDS
        return asyncio.create_task(restore.fetcher.present(contents, request.shard, group, deadline))

    restore.readers[id] += 1  # what is read is not pruned
    ahead: asyncio.Task[Blocks] | None = None
    try:
        for number, group in enumerate(groups):
            blocks = await (ahead or begin(group))
            # One at a time: what is pinned never waits for memory that somebody else's pins take.
            ahead = begin(groups[number + 1]) if number + 1 < len(groups) else None
            try:
                async for piece in send(blocks.cached.segment.path, spans(group), lambda: True, threads):
                    yield piece
            finally:
                restore.fetcher.release(blocks)
    finally:
        if ahead is not None:
            ahead.cancel()
            (ended,) = await asyncio.gather(ahead, return_exceptions=True)
            if isinstance(ended, Blocks):
                restore.fetcher.release(ended)
        restore.ways.left(id)
