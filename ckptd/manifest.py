"""The manifest file: which bytes of which files make a checkpoint, framed so that every damage shows.

::

    magic, 8 bytes | u32le n | Summary, n bytes | xxh3_64 | Manifest | xxh3_128

Each hash covers everything before it (8 and 16 bytes, big-endian). The summary
comes first and alone, so that `list` reads a file's head and never its tables.

Promises: `decode` and `read_summary` return what `encode` was given, or raise
Corrupt. What `decode` returns is also consistent in itself: one Stored per item,
one length and hash per block, everything inside its file; readers may index
without looking. Never touches a store.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from ckptd.codec import HASH_NBYTES
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.v1.manifest_pb2 import Item, Manifest, StoredShard, Summary, Table

_M = TypeVar("_M", bound=Message)

#: How much of a manifest `list` reads first: enough for nearly every summary.
HEAD_NBYTES: Final = 64 * 1024

_MAGIC: Final = b"ckptd/1\n"
_LENGTH = struct.Struct("<I")
_PREFIX_NBYTES: Final = len(_MAGIC) + _LENGTH.size
_SUMMARY_HASH_NBYTES: Final = 8
# A summary is an id, numbers and tags. More than this is a damaged length, not worth reading.
_SUMMARY_LIMIT: Final = 16 * 1024 * 1024


def encode(manifest: Manifest) -> bytes:
    """The whole file. Equal manifests give equal bytes.

    Raises InvalidRequest for what `decode` would refuse, and if the tags exceed 16 MiB.
    """
    try:
        _check(manifest)
    except Corrupt as exc:
        raise InvalidRequest(str(exc)) from exc
    summary = manifest.summary.SerializeToString(deterministic=True)
    if len(summary) > _SUMMARY_LIMIT:
        raise InvalidRequest(f"the tags of a checkpoint may take {_SUMMARY_LIMIT} bytes, these take {len(summary)}")
    head = _MAGIC + _LENGTH.pack(len(summary)) + summary
    head += xxhash.xxh3_64_digest(head)
    whole = head + manifest.SerializeToString(deterministic=True)
    return whole + xxhash.xxh3_128_digest(whole)


def decode(data: bytes) -> Manifest:
    """Reads a whole file; raises Corrupt for any byte that is not as `encode` wrote it."""
    summary = read_summary(data)
    if isinstance(summary, int):
        raise Corrupt(f"a manifest is cut short: {len(data)} bytes, of which its summary alone needs {summary}")
    body_at = _summary_end(data)
    if len(data) < body_at + HASH_NBYTES or xxhash.xxh3_128_digest(memoryview(data)[:-HASH_NBYTES]) != data[-HASH_NBYTES:]:
        raise Corrupt(f"a manifest of {len(data)} bytes does not match its own checksum: it is damaged or cut short")
    manifest = _parse(Manifest(), data[body_at:-HASH_NBYTES])
    if manifest.summary != summary:
        raise Corrupt("a manifest contradicts its own summary")
    _check(manifest)
    return manifest


def read_summary(head: bytes) -> Summary | int:
    """Reads the summary from the first bytes of a file (or all of it).

    Returns how many bytes of the file are needed if `head` is too short; that is
    always more than there were, so a file that has no more is damaged. Raises Corrupt.
    """
    if not head.startswith(_MAGIC[: len(head)]):
        raise Corrupt("this is not a manifest: it does not start as one")
    if len(head) < _PREFIX_NBYTES:
        return _PREFIX_NBYTES
    end = _summary_end(head)
    if end > _PREFIX_NBYTES + _SUMMARY_LIMIT + _SUMMARY_HASH_NBYTES:
        raise Corrupt(f"a manifest claims a summary of {end} bytes: it is damaged")
    if len(head) < end:
        return end
    hash_at = end - _SUMMARY_HASH_NBYTES
    if xxhash.xxh3_64_digest(memoryview(head)[:hash_at]) != head[hash_at:end]:
        raise Corrupt("a manifest's summary does not match its checksum: it is damaged")
    return _parse(Summary(), head[_PREFIX_NBYTES:hash_at])


def block_spans(at: int, end: int, block_nbytes: int) -> list[tuple[int, int]]:
    """The blocks ``(start, stop)`` of the container ``[at, end)``, relative to `at`: all `block_nbytes` long but the last."""
    nbytes = end - at
    return [(start, min(start + block_nbytes, nbytes)) for start in range(0, nbytes, block_nbytes)]


def item_ends(table: Table) -> list[int]:
    """Where each item's container ends in its shard: at the next one's start, the last at the shard's end."""
    starts = [item.at for item in table.items]
    return [*starts[1:], table.end] if starts else []


def check_table(table: Table) -> None:
    """Raises Corrupt unless the items of `table` lie one after another inside their shard and name forms that exist."""
    forms = len(table.forms)
    if table.items and table.items[0].at != 0:
        raise Corrupt(f"the first item of a shard starts at byte {table.items[0].at}")
    if not table.items and table.end != 0:
        raise Corrupt(f"a shard without items has {table.end} bytes")
    for item, end in zip(table.items, item_ends(table), strict=True):
        if not item.at <= item.raw_at <= item.raw_at + item.nbytes <= end:
            raise Corrupt(
                f"the item {item.fqn[:80]!r} does not fit: container {item.at} to {end}, {item.nbytes} bytes of data at {item.raw_at}"
            )
        if item.kind != Item.RAW:  # its bytes are its container: it may be empty, and then has no block
            continue
        if item.form >= forms:
            raise Corrupt(f"the item {item.fqn[:80]!r} names form {item.form} of {forms}")
        if item.at == end:
            raise Corrupt(f"the item {item.fqn[:80]!r} is a tensor without a container")


def _check(manifest: Manifest) -> None:
    if manifest.shards and manifest.block_nbytes == 0:
        raise Corrupt("a manifest with shards gives no size of blocks")
    for shard in manifest.shards:
        check_table(shard.table)
        _check_stored(shard, manifest.block_nbytes)


def _check_stored(shard: StoredShard, block_nbytes: int) -> None:
    if len(shard.stored) != len(shard.table.items):
        raise Corrupt(f"a manifest places {len(shard.stored)} of the {len(shard.table.items)} items of rank {shard.rank}")
    if shard.table.items and not shard.file:
        raise Corrupt(f"a manifest names no file for the items of rank {shard.rank}")
    for item, end, stored in zip(shard.table.items, item_ends(shard.table), shard.stored, strict=True):
        blocks = -(-(end - item.at) // block_nbytes)
        if len(stored.lengths) != blocks or len(stored.hashes) != blocks * HASH_NBYTES:
            raise Corrupt(f"a manifest lists {len(stored.lengths)} of the {blocks} blocks of the item {item.fqn[:80]!r}")
        if stored.offset + sum(stored.lengths) > shard.nbytes:
            raise Corrupt(f"a manifest places the item {item.fqn[:80]!r} past the end of {shard.file}")


def _summary_end(head: bytes) -> int:
    (nbytes,) = _LENGTH.unpack_from(head, len(_MAGIC))
    return _PREFIX_NBYTES + int(nbytes) + _SUMMARY_HASH_NBYTES


def _parse(into: _M, data: bytes) -> _M:
    try:
        into.ParseFromString(data)
    except DecodeError as exc:
        raise Corrupt(f"a manifest cannot be parsed: {exc}") from exc
    return into
