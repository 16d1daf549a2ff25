"""One reader's hold on one attempt: what it wants is made present, and stays as it is until it says `copied`.

Promises: everything that a reader is given is of the attempt that it opened; what one place cannot give any
more comes from the next: this node's segments, other nodes' memory, the store. Lives on the loop.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptd import errors
from ckptd.attempt import Attempt
from ckptd.fetcher import Blocks, Elsewhere, Fetcher, Held
from ckptd.index import Index, Indexes
from ckptd.model import CheckpointId, data_key
from ckptd.nearby import Nearby, Origin
from ckptd.node import Node
from ckptd.segment import Segment
from ckptd.stock import Stock
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Manifest, Record
from ckptd.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True)
class Ways:
    """What leads a reader to its bytes, and where they are counted."""

    node: Node
    fetcher: Fetcher
    indexes: Indexes
    whereabouts: Whereabouts
    nearby: Nearby
    bytes_from: Counter[str]
    readers: Counter[CheckpointId]

    def left(self, checkpoint: CheckpointId) -> None:
        """One of those who read it has ended."""
        self.readers[checkpoint] -= 1
        if self.readers[checkpoint] <= 0:
            del self.readers[checkpoint]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a want leads to: the shard's segment and, of a stock checkpoint, how many bytes each wanted item really has."""

    segment: Segment
    nbytes: list[int]


@dataclass(slots=True)
class Source:
    """`close` it. `record`: of an attempt that a node's memory knows; `loading`: addresses of the nodes that load it together."""

    ways: Ways
    checkpoint: Checkpoint
    attempt: Attempt | None
    index: Index
    contents: Manifest | Stock | Held | None = None
    record: Record | None = None
    loading: tuple[str, ...] = ()
    held: list[Blocks] = field(default_factory=list)

    @property
    def id(self) -> CheckpointId:
        return CheckpointId.parse(self.checkpoint.summary.id)

    @property
    def name(self) -> str:
        """The attempt, or the state of a stock checkpoint's directory."""
        return self.checkpoint.summary.attempt

    async def want(self, shard: int, items: Sequence[int], starts: Sequence[int], ends: Sequence[int], deadline: float | None) -> Wanted:
        """The shard's segment, with the ranges present and kept until `copied`.

        Raises Unavailable that names who did not give them, if only others' memory has them.
        """
        node = self.ways.node
        if shard >= len(self.index.tables):
            raise errors.InvalidRequest(f"{self.checkpoint.summary.id} has {len(self.index.tables)} shards, no shard {shard}")
        if not len(items) == len(starts) == len(ends) or any(start > end for start, end in zip(starts, ends, strict=True)):
            raise errors.InvalidRequest("a want has one start and one end per item, and no range ends before it starts")
        if self.attempt is not None:
            token = self.attempt.record.shards[shard].token
            if token in self.attempt.held and not node.arena.get(token).path.exists():
                node.vanished(token)
            if token in self.attempt.held:
                self.ways.bytes_from["memory"] += sum(ends) - sum(starts)
                return Wanted(node.arena.get(token), [])
        if self.contents is None:
            self.contents = await self.ways.indexes.contents(self.id, self.name)
        try:
            return await self._present(self.contents, shard, items, starts, ends, deadline)
        except errors.Unavailable as exc:
            if not isinstance(self.contents, Held):
                raise
            failure = exc
        # Others may hold it by now, or it is in the store.
        await self.ways.whereabouts.look(self.id, self.name, again=True)
        if self.ways.whereabouts.holders(self.name, self.contents.record.shards[shard].token):
            try:
                return await self._present(self.contents, shard, items, starts, ends, deadline)
            except errors.Unavailable as exc:
                failure = exc
        try:
            self.contents = await self.ways.indexes.contents(self.id, self.name)
        except errors.CkptdError as exc:
            raise errors.Unavailable(
                f"{self.id} cannot be read to its end: {failure}; the store does not have it ({exc}): load again"
            ) from failure
        return await self._present(self.contents, shard, items, starts, ends, deadline)

    async def _present(
        self,
        contents: Manifest | Stock | Held,
        shard: int,
        items: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        deadline: float | None,
    ) -> Wanted:
        fetcher = self.ways.fetcher
        try:
            found = fetcher.find(contents, shard, items, starts, ends)
            self.ways.bytes_from["memory"] += sum(block.nbytes for block in found.blocks if block.key in found.cached.blocks)
            blocks = await fetcher.present(contents, shard, found.blocks, deadline, self._elsewhere(contents, shard))
        except errors.Corrupt:
            # It may be no damage: the checkpoint was deleted or saved again, and the files that are being read with it.
            if not isinstance(contents, Held):
                await self.ways.indexes.same(self.id, self.name)
            raise
        self.held.append(blocks)
        nbytes = [blocks.cached.lengths.get(item, 0) for item in items] if self.checkpoint.stock else []
        return Wanted(blocks.cached.segment, nbytes)

    def _elsewhere(self, contents: Manifest | Stock | Held, shard: int) -> Elsewhere | None:
        """The way to other nodes' memory. Checkpoints of stock DCP are read by each node for itself: they have no blocks."""
        if isinstance(contents, Stock):
            return None
        tokens = {receipt.rank: receipt.token for receipt in self.record.shards} if self.record is not None else {}
        if isinstance(contents, Held):
            token = contents.record.shards[shard].token
            origin = Origin(self.id, self.name, contents.shards[shard].table, token)
        else:
            stored = contents.shards[shard]
            key = data_key(self.id, stored.file)
            origin = Origin(self.id, self.name, stored.table, tokens.get(stored.rank, ""), key, shard, self.loading)
        return functools.partial(self.ways.nearby.place, origin)

    def copied(self) -> None:
        """The reader has copied what it was given."""
        while self.held:
            self.ways.fetcher.release(self.held.pop())

    def close(self) -> None:
        """Lets go of everything."""
        self.copied()
        self.index.readers -= 1
        self.ways.left(self.id)
        if self.attempt is not None:
            self.ways.node.unpin(self.attempt.name)
        self.ways.node.arena.poke()
