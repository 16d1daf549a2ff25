"""What `show` says of one checkpoint: its line, its tensors and objects, its files.

Promises: no pickle is run, and ckptd's own checkpoints need none: their item tables say all. No
data file is read. Keeps nothing. All calls block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from ckptd import collector, contents, metadata
from ckptd.errors import Corrupt
from ckptd.ledger import Ledger
from ckptd.manifest import check_table
from ckptd.model import manifest_key
from ckptd.scan import Entry
from ckptd.store import Store
from ckptd.table import read_range
from ckptd.v1.daemon_pb2 import Checkpoint, ShowReply
from ckptd.v1.manifest_pb2 import Table


@dataclass(frozen=True, slots=True)
class Inspected:
    """One checkpoint with what is in it."""

    checkpoint: Checkpoint
    #: One per name, in the order of names; an empty dtype stands for an object that is no tensor.
    tensors: Sequence[ShowReply.Tensor]
    #: Names beside ``.metadata``.
    files: Sequence[str]

    def replies(self) -> list[ShowReply]:
        """As a daemon sends it."""
        return list(contents.replies(self.checkpoint, self.tensors, self.files))


def stored(store: Store, ledger: Ledger, entry: Entry) -> Inspected:
    """A checkpoint in the store, whoever wrote it. Raises Corrupt, naming the object that is damaged, and what the store raises."""
    summary = ledger.summaries([entry])[0]
    if isinstance(summary, Corrupt):
        raise summary
    line = Checkpoint(summary=summary, state=Checkpoint.DURABLE, stock=entry.attempt is None, pinned=entry.pinned)
    if entry.save_id is None:
        with _naming(entry.metadata.key), collector.paused():
            found = metadata.read(store.get(entry.metadata.key))
            return Inspected(line, contents.stock_lines(found), contents.stock_files(found))
    shards = ledger.manifest(entry).shards
    with _naming(manifest_key(entry.id, entry.save_id)), collector.paused():
        return Inspected(line, contents.lines(shard.table for shard in shards), [shard.file for shard in shards if shard.file])


def held(line: Checkpoint, tables: Iterable[tuple[Path, int, int]]) -> Inspected:
    """A checkpoint in memory: `tables` says where its item tables lie, as (segment, position, bytes). Raises Corrupt."""
    with _naming(f"what memory holds of {line.summary.id}"), collector.paused():
        return Inspected(line, contents.lines(_table(*place) for place in tables), [])


def _table(segment: Path, at: int, nbytes: int) -> Table:
    try:
        table = Table.FromString(read_range(segment, at, nbytes))
    except DecodeError as exc:
        raise Corrupt(f"an item table cannot be parsed: {exc}") from exc
    check_table(table)
    return table


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Inside it, damage comes out with the name of what is damaged."""
    try:
        yield
    except Corrupt as exc:
        raise Corrupt(f"{what} is damaged: {exc}; load another checkpoint, as fallback=True does") from exc
