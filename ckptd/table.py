"""The item table of a shard, and reading pieces of segments.

A segment is laid out like the shard's uncompressed data file, with the encoded Table
behind it. A table is believed only after `parse_table` has laid the items out again.
"""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError

from ckptd import archive, errors, manifest
from ckptd.v1.manifest_pb2 import Item, Receipt, Table


def read_exactly(fd: int, at: int, nbytes: int) -> bytes:
    """`nbytes` bytes at `at`; a segment that ends early is Corrupt."""
    block = os.pread(fd, nbytes, at)
    while len(block) < nbytes:
        more = os.pread(fd, nbytes - len(block), at + len(block))
        if not more:
            raise errors.Corrupt(f"a segment ends at {at + len(block)}, expected {nbytes} bytes at {at}")
        block += more
    return block


def read_range(path: Path, at: int, nbytes: int) -> bytes:
    """Bytes of a segment, from a file of its own."""
    with open(path, "rb", buffering=0) as segment:
        return read_exactly(segment.fileno(), at, nbytes)


def write_range(path: Path, at: int, data: bytes) -> None:
    """Writes into a segment whose pages are there."""
    with open(path, "r+b", buffering=0) as segment:
        view, written = memoryview(data), 0
        while written < len(view):
            written += os.pwrite(segment.fileno(), view[written:], at + written)


def read_table(path: Path, receipt: Receipt) -> Table:
    """The item table at the tail of a sealed segment, checked against the layout that it must have."""
    return parse_table(read_range(path, receipt.nbytes, receipt.table_nbytes), receipt.nbytes)


def parse_table(encoded: bytes, nbytes: int) -> Table:
    """Reads a table; InvalidRequest unless its items lie where the layout puts them, and a manifest can have it."""
    try:
        table = Table.FromString(encoded)
    except DecodeError as exc:
        raise errors.InvalidRequest(f"the item table of a shard cannot be read: {exc}") from exc
    at = 0
    for item in table.items:
        if item.kind == Item.RAW:
            if item.form >= len(table.forms):
                raise errors.InvalidRequest(f"item {item.fqn!r} names a form that its table lacks")
            raw_at, end = archive.layout(at, len(table.forms[item.form].pkl), item.nbytes)
        else:
            raw_at, end = at, at + item.nbytes
        if (item.at, item.raw_at) != (at, raw_at):
            raise errors.InvalidRequest(f"item {item.fqn!r} lies at {item.at}, expected {at}: client and daemon disagree on the layout")
        at = end
    if at != table.end or table.end != nbytes:
        raise errors.InvalidRequest(f"the items of a shard end at {at}, its table says {table.end}, the shard has {nbytes} bytes")
    try:
        manifest.check_table(table)
    except errors.Corrupt as exc:
        raise errors.InvalidRequest(f"the item table of a shard is no good: {exc}") from exc
    return table
