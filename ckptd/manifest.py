"""The manifest file: which bytes of which files make a checkpoint, framed so that every damage shows.

::

    magic, 8 bytes | u32le n | Summary, n bytes | xxh3_64 | Manifest | xxh3_128

Each hash covers everything before it (8 and 16 bytes, big-endian). The summary
comes first and alone, so that `list` reads a file's head and never its tables.

Promises: `decode` and `read_summary` return what `encode` was given, or raise
Corrupt. What `decode` returns is also consistent in itself, whoever wrote it: forms
that describe dense tensors, items one after another, one Stored per item, one length
and hash per block, every byte of a file in one block, files of different names beside
``.metadata``, a codec that is known, no number that a file or a clock could not have;
readers may index without looking. Never touches a store.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from ckptd import codec
from ckptd.codec import HASH_NBYTES
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.v1.manifest_pb2 import Form, Item, Manifest, StoredShard, Summary, Table

_M = TypeVar("_M", bound=Message)

#: How much of a manifest `list` reads first: enough for nearly every summary.
HEAD_NBYTES: Final = 64 * 1024

_MAGIC: Final = b"ckptd/1\n"
_LENGTH = struct.Struct("<I")
_PREFIX_NBYTES: Final = len(_MAGIC) + _LENGTH.size
_SUMMARY_HASH_NBYTES: Final = 8
# A summary is an id, numbers and tags. More than this is a damaged length, not worth reading.
_SUMMARY_LIMIT: Final = 16 * 1024 * 1024
# We write blocks of 4 MiB. One of these sizes more would be decoded into memory at once.
_BLOCK_LIMIT: Final = 64 * 1024 * 1024
# Positions are counted in 64 bits, with a sign, by files and by torch.
_MOST: Final = (1 << 63) - 1
# More dimensions than torch can do anything with.
_DIMS_LIMIT: Final = 256
# The last microsecond of the year 9999.
_LAST_US: Final = 253_402_300_799_999_999


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
    summary = _parse(Summary(), head[_PREFIX_NBYTES:hash_at])
    _check_summary(summary)
    return summary


def block_spans(at: int, end: int, block_nbytes: int) -> list[tuple[int, int]]:
    """The blocks ``(start, stop)`` of the container ``[at, end)``, relative to `at`: all `block_nbytes` long but the last."""
    nbytes = end - at
    return [(start, min(start + block_nbytes, nbytes)) for start in range(0, nbytes, block_nbytes)]


def item_ends(table: Table) -> list[int]:
    """Where each item's container ends in its shard: at the next one's start, the last at the shard's end."""
    starts = [item.at for item in table.items]
    return [*starts[1:], table.end] if starts else []


def check_table(table: Table) -> None:
    """Raises Corrupt unless the items of `table` lie one after another inside their shard, and have forms as their kind needs them."""
    elements = [_elements(form) for form in table.forms]
    pickled = [bool(form.pkl) for form in table.forms]
    if table.items and table.items[0].at != 0:
        raise Corrupt(f"the first item of a shard starts at byte {table.items[0].at}")
    if not table.items and table.end != 0:
        raise Corrupt(f"a shard without items has {table.end} bytes")
    if table.end > _MOST:
        raise Corrupt(f"a shard ends at byte {table.end}, where no file can end")
    for item, end in zip(table.items, item_ends(table), strict=True):
        kind, nbytes = item.kind, item.nbytes
        if not item.at <= item.raw_at <= item.raw_at + nbytes <= end:
            raise Corrupt(f"the item {item.fqn[:80]!r} does not fit: container {item.at} to {end}, {nbytes} bytes of data at {item.raw_at}")
        if kind != Item.RAW and (item.raw_at != item.at or item.raw_at + nbytes != end):  # it may be empty, and then has no block
            raise Corrupt(f"the item {item.fqn[:80]!r} is opaque, and its data is not all of its container {item.at} to {end}")
        if kind == Item.OPAQUE_OBJECT:
            continue
        if kind not in (Item.RAW, Item.OPAQUE_TENSOR):
            raise Corrupt(f"the item {item.fqn[:80]!r} is of a kind that is not known: {kind}")
        if item.form >= len(elements):
            raise Corrupt(f"the item {item.fqn[:80]!r} names form {item.form} of {len(elements)}")
        if pickled[item.form] != (kind == Item.RAW):
            raise Corrupt(f"the item {item.fqn[:80]!r} has a form of another kind: only raw ones have a pickle")
        if kind == Item.RAW:
            if item.at == end:
                raise Corrupt(f"the item {item.fqn[:80]!r} is a tensor without a container")
            count = elements[item.form]
            if (nbytes % count or not nbytes) if count else nbytes:
                raise Corrupt(f"the item {item.fqn[:80]!r} has {nbytes} bytes for {count} elements")


def _elements(form: Form) -> int:
    """How many elements a chunk of this form has. Raises Corrupt unless one can have it, and its strides are dense if it is raw."""
    shape, strides = tuple(form.shape), tuple(form.strides)
    if len(shape) > _DIMS_LIMIT or min(shape, default=0) < 0 or not form.dtype:
        raise Corrupt(f"a form of dtype {form.dtype[:80]!r} has the shape {shape[:8]}")
    if len(strides) != (len(shape) if form.pkl else 0) or min(strides, default=0) < 0:
        raise Corrupt(f"a form of shape {shape[:8]} has the strides {strides[:8]}")
    if 0 in shape:
        return 0
    count = 1
    for stride, size in sorted(zip(strides, shape, strict=True)) if strides else [(0, size) for size in shape]:
        if strides and size != 1 and stride != count:
            raise Corrupt(f"a form of shape {shape[:8]} has the strides {strides[:8]}, which leave holes or overlap")
        count *= size
        if count > _MOST:
            raise Corrupt(f"a form has the shape {shape[:8]}, which no tensor can have")
    return count


def _check(manifest: Manifest) -> None:
    _check_summary(manifest.summary)
    if not manifest.shards:
        return
    if not 0 < manifest.block_nbytes <= _BLOCK_LIMIT:
        raise Corrupt(f"a manifest says that blocks have {manifest.block_nbytes} bytes")
    if manifest.metadata_head > manifest.metadata_nbytes:
        raise Corrupt(f"a manifest says that {manifest.metadata_head} of {manifest.metadata_nbytes} bytes of .metadata are the client's")
    try:
        codec.parse(manifest.summary.codec)
    except InvalidRequest as exc:
        raise Corrupt(f"a manifest names the codec {manifest.summary.codec[:80]!r}, which this version does not know") from exc
    files = set()
    for shard in manifest.shards:
        check_table(shard.table)
        if shard.file in files:
            raise Corrupt(f"a manifest has two shards in one file, {shard.file}")
        files.update([shard.file] if shard.file else [])
        _check_stored(shard, manifest.block_nbytes)


def _check_summary(summary: Summary) -> None:
    if not 0 <= summary.accepted_us <= _LAST_US:
        raise Corrupt(f"a manifest says that it was accepted {summary.accepted_us} microseconds after 1970")


def _check_stored(shard: StoredShard, block_nbytes: int) -> None:
    items = shard.table.items
    if len(shard.stored) != len(items):
        raise Corrupt(f"a manifest places {len(shard.stored)} of the {len(items)} items of rank {shard.rank}")
    if bool(items) != bool(shard.file):
        raise Corrupt(f"a manifest names the file {shard.file[:80]!r} for the {len(items)} items of rank {shard.rank}")
    if not _is_file_name(shard.file):
        raise Corrupt(f"a manifest names the file {shard.file[:80]!r}, which cannot be beside .metadata")
    at = 0
    longest = block_nbytes + block_nbytes // 128 + 1024  # what zstd makes of a block at most
    for item, end, stored in zip(items, item_ends(shard.table), shard.stored, strict=True):
        blocks = -(-(end - item.at) // block_nbytes)
        lengths = stored.lengths
        if len(lengths) != blocks or len(stored.hashes) != blocks * HASH_NBYTES:
            raise Corrupt(f"a manifest lists {len(lengths)} of the {blocks} blocks of the item {item.fqn[:80]!r}")
        if stored.offset != at:
            raise Corrupt(f"a manifest places the item {item.fqn[:80]!r} at byte {stored.offset} of {shard.file}, not at {at}")
        if max(lengths, default=0) > longest:
            raise Corrupt(f"a manifest lists a block of {max(lengths)} bytes, which is more than one of {block_nbytes} can take")
        at += sum(lengths)
    if at != shard.nbytes:
        raise Corrupt(f"a manifest places {at} of the {shard.nbytes} bytes of {shard.file}")


def _is_file_name(name: str) -> bool:
    """Whether a data file may be called so: one part of a key, and none of our own names."""
    return not name.startswith(".") and "/" not in name and "\0" not in name


def _summary_end(head: bytes) -> int:
    (nbytes,) = _LENGTH.unpack_from(head, len(_MAGIC))
    return _PREFIX_NBYTES + int(nbytes) + _SUMMARY_HASH_NBYTES


def _parse(into: _M, data: bytes) -> _M:
    try:
        into.ParseFromString(data)
    except DecodeError as exc:
        raise Corrupt(f"a manifest cannot be parsed: {exc}") from exc
    return into
