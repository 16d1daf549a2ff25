"""Blocks out of other nodes' segments: made whole, and only they, before they are compared with what was saved."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd import archive
from ckptd.blocks import HeldShard, StoredBlock
from ckptd.codec import block_hash
from ckptd.model import BLOCK_NBYTES
from ckptd.nearby import _unequal
from ckptd.v1.manifest_pb2 import Form, Item, Table

SIZES = [10, 2 * BLOCK_NBYTES + 5, BLOCK_NBYTES - 700, 0, 1000]
PKL = b"what names the storage"


def shard() -> tuple[Table, bytes, bytes]:
    """A table of raw items, its data file, and the same without what is around the raw bytes: what a segment has before its flush."""
    table, whole, raw = Table(forms=[Form(pkl=PKL)]), bytearray(), bytearray()
    for number, nbytes in enumerate(SIZES):
        at = len(whole)
        raw_at, end = archive.layout(at, len(PKL), nbytes)
        table.items.append(Item(fqn=b"t%d" % number, kind=Item.RAW, at=at, raw_at=raw_at, nbytes=nbytes))
        head, tail = archive.gaps(at, PKL, nbytes)
        data = bytes(itertools.islice(itertools.cycle(b"%d bytes of data " % number), nbytes))
        whole += head + data + tail
        raw += bytes(len(head)) + data + bytes(len(tail))
        assert len(whole) == end
    table.end = len(whole)
    return table, bytes(whole), bytes(raw)


def blocks(table: Table, whole: bytes) -> list[StoredBlock]:
    """With the hashes that a manifest has."""
    items = range(len(table.items))
    found = HeldShard(table).find(items, [0 for _ in items], [item.nbytes for item in table.items])
    return [replace(block, digest=block_hash(whole[slice(*block.span)])) for block in found]


@pytest.mark.parametrize("number", range(6))
def test_a_block_is_made_whole_and_nothing_beside_it_is_touched(tmp_path: Path, number: int) -> None:
    table, whole, raw = shard()
    found = blocks(table, whole)
    assert len(found) == 6
    path = tmp_path / "segment"
    path.write_bytes(raw)
    assert _unequal(path, [found[number]], table) == []
    start, end = found[number].span
    data = path.read_bytes()
    assert data[start:end] == whole[start:end]
    assert data[:start] + data[end:] == raw[:start] + raw[end:]


def test_what_is_not_what_was_saved_is_found(tmp_path: Path) -> None:
    table, whole, raw = shard()
    found = blocks(table, whole)
    spoilt = bytearray(raw)
    spoilt[table.items[1].raw_at + BLOCK_NBYTES] ^= 1
    path = tmp_path / "segment"
    path.write_bytes(spoilt)
    assert _unequal(path, found, table) == [block for block in found if block.key == (1, 1)]
    # A block without a hash is believed: it was checked on its way.
    assert _unequal(path, [replace(block, digest=b"") for block in found], table) == []


def test_what_came_out_of_a_data_file_is_not_made_up(tmp_path: Path) -> None:
    table, whole, raw = shard()
    path = tmp_path / "segment"
    path.write_bytes(raw)
    found = blocks(table, whole)
    assert _unequal(path, found[:1], None) == found[:1]
    assert path.read_bytes() == raw
