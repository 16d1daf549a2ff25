"""Blocks from other nodes' memory: from one that holds the shard, or from the one that reads its data file for all.

Each data file of the store has one owner among the nodes of a load; all of them agree on it without
asking each other. Promises: a block counts as placed only if it is what was saved (by its hash, where the
checkpoint is durable; on the way, by each piece's); whoever fails or stalls is passed over, and not asked
again for a while; what nobody gave is left to the caller, with the reasons. Lives on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import xxhash

from ckptd import archive
from ckptd.blocks import StoredBlock, cut, spans
from ckptd.codec import block_hash
from ckptd.errors import CkptdError, Corrupt
from ckptd.fetcher import Left
from ckptd.model import CheckpointId
from ckptd.peers import Peers
from ckptd.pull import pull, receive
from ckptd.table import read_exactly
from ckptd.v1.manifest_pb2 import Item, Table
from ckptd.v1.peer_pb2 import FetchRequest
from ckptd.whereabouts import Whereabouts

log = logging.getLogger(__name__)
T = TypeVar("T")

#: An owner that sends nothing for so long is given up: it may be waiting for a slow store.
STALL_SECONDS: Final = 8.0
#: For so long an owner that failed is not asked again.
SHUN_SECONDS: Final = 30.0
#: Bytes of blocks that an owner makes present at once; both sides cut alike.
GROUP_NBYTES: Final = 8 * 1024 * 1024
#: Streams from an owner at the same time, and the bytes from which another one is worth it.
STREAMS: Final = 4
STREAM_NBYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """One shard, as other nodes know it."""

    id: CheckpointId
    attempt: str
    table: Table
    token: str = ""
    """Under which its holders have it; "" if that is not known."""
    key: str = ""
    """Of its data file; "" if the store does not have it."""
    number: int = 0
    """In the manifest."""
    loading: tuple[str, ...] = ()
    """Addresses of the nodes that load the checkpoint together."""


class Nearby:
    """Asks other nodes for blocks. `served` counts the bytes that came, as "peer"."""

    def __init__(self, peers: Peers, whereabouts: Whereabouts, threads: Executor, served: Counter[str]) -> None:
        self.peers = peers
        self.whereabouts = whereabouts
        self.threads = threads
        self.served = served
        self._shunned: dict[str, float] = {}

    async def place(self, of: Origin, path: Path, blocks: Sequence[StoredBlock]) -> Left:
        """Puts what other nodes give of the blocks (in file order) where they belong in the file."""
        left, why = list(blocks), list[str]()
        for address in self.whereabouts.holders(of.attempt, of.token):
            if not left:
                break
            try:
                self.served["peer"] += await pull(self.peers, address, of.token, spans(left), path, self.threads)
            except CkptdError as exc:
                log.warning("%s: %s", of.id, exc)
                why.append(str(exc))
                self.whereabouts.failed(of.attempt, address)
                continue
            left = await self._run(_unequal, path, left, of.table)
        owner = owner_of(of.key, of.loading)
        if left and owner not in ("", self.peers.own) and not self._is_shunned(owner):
            shares = cut(left, max(STREAM_NBYTES, -(-sum(block.nbytes for block in left) // STREAMS)))
            found = await asyncio.gather(*(self._fetched(of, owner, path, share) for share in shares))
            left = [block for share in found for block in share]
        return Left(left, why)

    async def _fetched(self, of: Origin, owner: str, path: Path, blocks: list[StoredBlock]) -> list[StoredBlock]:
        """The blocks that the owner did not give."""
        ranges = [span for group in cut(blocks, GROUP_NBYTES) for span in spans(group)]
        request = FetchRequest(
            id=str(of.id),
            attempt=of.attempt,
            shard=of.number,
            items=[block.key[0] for block in blocks],
            blocks=[block.key[1] for block in blocks],
        )
        replies = self.peers.stream(owner, f"read {of.key}", lambda stub: stub.Fetch(request), STALL_SECONDS)
        try:
            self.served["peer"] += await receive(replies, ranges, path, self.threads, owner)
        except CkptdError as exc:
            log.warning("%s is read from the store instead: %s", of.key, exc)
            if not isinstance(exc, Corrupt):  # then the file is damaged, and that is not the node's fault
                self._shunned[owner] = time.monotonic() + SHUN_SECONDS
            return blocks
        return await self._run(_unequal, path, blocks, None)

    def _is_shunned(self, address: str) -> bool:
        return time.monotonic() < self._shunned.get(address, 0.0)

    async def _run(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *arguments)


def owner_of(key: str, addresses: Sequence[str]) -> str:
    """Which of the nodes reads this data file for all: the same for all who ask, and few change hands when a node comes or goes.

    "" if there are none.
    """
    if not key:
        return ""
    return max(addresses, key=lambda address: (xxhash.xxh3_64_intdigest(f"{key}\n{address}".encode()), address), default="")


def _unequal(path: Path, blocks: Sequence[StoredBlock], table: Table | None) -> list[StoredBlock]:
    """Those that are not what their hash says. `table`: they came out of a shard's segment, whose containers need not be complete."""
    unequal = []
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for block in blocks:
            if table is not None:
                _complete(fd, table, block)
            if block.digest and block_hash(read_exactly(fd, block.at, block.nbytes)) != block.digest:
                unequal.append(block)
    finally:
        os.close(fd)
    return unequal


def _complete(fd: int, table: Table, block: StoredBlock) -> None:
    """Fills what of the gaps around its item's raw bytes lies in the block, and nothing outside of it: there is no memory for that."""
    item = table.items[block.key[0]]
    raw_end = item.raw_at + item.nbytes
    start, end = block.span
    if item.kind != Item.RAW or (item.raw_at <= start and end <= raw_end):
        return
    head, tail = archive.gaps(item.at, table.forms[item.form].pkl, item.nbytes)
    for at, data in ((item.at, head), (raw_end, tail)):
        first, last = max(at, start), min(at + len(data), end)
        if first < last:
            os.pwrite(fd, data[first - at : last - at], first)
