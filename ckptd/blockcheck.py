"""Whether the data files of a checkpoint of ours are as they were written: their sizes, and every block of them.

Promises: no byte of a file is passed over: each belongs to one block (a manifest is refused
otherwise), and that is decoded and hashed; what one request garbled is read again before it is called damage. Also says what a
check is, here and in ckptd/stockcheck.py.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptd import codec, manifest
from ckptd.blocks import StoredBlock, named, plain_block, runs
from ckptd.codec import HASH_NBYTES, Codec
from ckptd.errors import Corrupt, NotFound
from ckptd.model import CheckpointId, data_key
from ckptd.store import Store
from ckptd.v1.manifest_pb2 import Manifest, StoredShard

#: Says that so many stored bytes more have been looked at.
Tell: TypeAlias = Callable[[int], None]


@dataclass(slots=True)
class Found:
    """What was found: damage in words, and notes with the number that goes into each."""

    damage: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


#: A part of the work, for any thread: it says how far it is, and may raise what the store raises.
Check: TypeAlias = Callable[[Tell], Found]


def sizes(store: Store, id: CheckpointId) -> dict[str, int]:
    """Bytes of the data files that are in the store, by key. One listing."""
    return {found.key: found.nbytes for found in store.list(f"{id}/__")}


def misplaced(id: CheckpointId, contents: Manifest, sizes: Mapping[str, int]) -> dict[int, str]:
    """Which shards' data files are not in the store as they were written: missing, or of another size. In words, by shard."""
    wrong = {}
    for number, shard in enumerate(contents.shards):
        key = data_key(id, shard.file)
        if not shard.file:
            continue
        if key not in sizes:
            wrong[number] = f"{key} is missing from the store, although the checkpoint's manifest names it"
        elif sizes[key] != shard.nbytes:
            wrong[number] = f"{key} is damaged: it has {sizes[key]} bytes in the store, {shard.nbytes} were written"
    return wrong


def checks(store: Store, id: CheckpointId, contents: Manifest, sizes: Mapping[str, int]) -> Iterator[Check]:
    """All blocks of all files, some at a time: a large checkpoint has many. What is cut off, as `sizes` says, is not read."""
    used = codec.parse(contents.summary.codec)
    for shard in contents.shards:
        key = data_key(id, shard.file)
        blocks = list(_blocks(shard, contents.block_nbytes))
        inside = [block for block in blocks if block.offset + block.length <= sizes.get(key, 0)]
        if key in sizes and len(inside) < len(blocks):
            yield functools.partial(_told, f"{named(blocks[len(inside)], key)} and what follows is cut off")
        for run in runs(inside):
            yield functools.partial(_check_run, store, key, used, run)


def _told(damage: str, _: Tell) -> Found:
    return Found([damage])


def _blocks(shard: StoredShard, block_nbytes: int) -> Iterator[StoredBlock]:
    """All blocks of a shard, in the order of its items."""
    ends = manifest.item_ends(shard.table)
    for number, (item, end, stored) in enumerate(zip(shard.table.items, ends, shard.stored, strict=True)):
        offset = stored.offset
        for block, (start, stop) in enumerate(manifest.block_spans(item.at, end, block_nbytes)):
            digest = stored.hashes[HASH_NBYTES * block : HASH_NBYTES * (block + 1)]
            yield StoredBlock((number, block), item.at + start, stop - start, offset, stored.lengths[block], digest)
            offset += stored.lengths[block]


def _check_run(store: Store, key: str, used: Codec, run: Sequence[StoredBlock], tell: Tell) -> Found:
    """Blocks that lie together. Bad bytes are read twice, as when they are loaded."""
    start, end = run[0].offset, run[-1].offset + run[-1].length
    damage: list[str] = []
    for _ in range(2):
        damage = []
        try:
            data = memoryview(store.get(key, start, end))
        except NotFound:
            damage.append(f"{key} is missing from the store, although the checkpoint's manifest names it")
        except Corrupt as exc:
            damage.append(f"{key}: bytes {start} to {end} cannot be read: {exc}")
        else:
            for block in run:
                try:
                    plain_block(used, data[block.offset - start : block.offset - start + block.length], block, key)
                except Corrupt as exc:
                    damage.append(str(exc))
        if not damage:
            break
    tell(end - start)
    return Found(damage)
