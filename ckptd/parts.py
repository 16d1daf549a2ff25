"""Parts: which shards of an attempt that several nodes hold are in the store, for whoever commits it.

::

    <id>/.ckptd/<attempt>-<rank>-<token>.part:  magic, 8 bytes | Part (protobuf) | xxh3_128 of everything before it, 16 bytes, big-endian

Promises: a part is put after the data file that it names; which ranks have one, a listing tells, and only who commits
reads them; a damaged one counts as none. Two nodes may upload the same shard: the files have
different names, and the first part by name counts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from ckptd.codec import HASH_NBYTES
from ckptd.errors import Corrupt, NotFound
from ckptd.model import OWN_DIRECTORY, CheckpointId, mint_token
from ckptd.scan import parallel
from ckptd.store import Store
from ckptd.v1.manifest_pb2 import Part, StoredShard

log = logging.getLogger(__name__)

_MAGIC: Final = b"ckptd/p\n"
_NAME: Final = re.compile(r"([0-9a-f]{24})-(\d{1,9})-[0-9a-f]{16}\.part")


@dataclass(slots=True)
class Parts:
    """What of an attempt is in the store, by rank; and keys of parts that are no good."""

    shards: dict[int, StoredShard] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def put(store: Store, id: CheckpointId, attempt: str, node: str, shard: StoredShard) -> None:
    """Notes that a shard is in the store. Raises what the store raises."""
    whole = encode(Part(id=str(id), attempt=attempt, node=node, shard=shard))
    store.put(f"{id}/{OWN_DIRECTORY}/{attempt}-{shard.rank}-{mint_token()}.part", lambda: [whole], nbytes_hint=len(whole))


def listed(store: Store, id: CheckpointId, attempt: str) -> dict[int, list[str]]:
    """Keys of all parts of an attempt, by rank, in order of their names: one listing. Raises what the store raises."""
    found: dict[int, list[str]] = {}
    for key in sorted(one.key for one in store.list(f"{id}/{OWN_DIRECTORY}/{attempt}-")):
        if name := _NAME.fullmatch(key.rpartition("/")[2]):
            found.setdefault(int(name.group(2)), []).append(key)
    return found


def find(store: Store, id: CheckpointId, attempt: str, ranks: Collection[int] | None = None) -> Parts:
    """What is noted of an attempt (of some ranks). Raises what the store raises."""
    there = listed(store, id, attempt)
    wanted = [rank for rank in there if ranks is None or rank in ranks]
    found = Parts()

    def look(rank: int) -> None:
        for key in there[rank]:
            try:
                part = decode(store.get(key))
            except NotFound:
                continue
            except Corrupt as exc:
                log.warning("%s is damaged (%s): what it notes is uploaded again", key, exc)
                found.damaged.append(key)
                continue
            if (part.id, part.attempt, part.shard.rank) == (str(id), attempt, rank):
                found.shards[rank] = part.shard
                return

    parallel(look, wanted)
    return found


def encode(part: Part) -> bytes:
    """The whole file."""
    whole = _MAGIC + part.SerializeToString(deterministic=True)
    return whole + xxhash.xxh3_128_digest(whole)


def decode(data: bytes) -> Part:
    """Reads a whole file; raises Corrupt for any byte that is not as `encode` wrote it."""
    whole, digest = data[:-HASH_NBYTES], data[-HASH_NBYTES:]
    if not whole.startswith(_MAGIC) or xxhash.xxh3_128_digest(whole) != digest:
        raise Corrupt(f"a part of {len(data)} bytes does not match its checksum")
    try:
        return Part.FromString(whole[len(_MAGIC) :])
    except DecodeError as exc:
        raise Corrupt(f"a part cannot be parsed: {exc}") from exc
