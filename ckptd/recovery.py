"""What an earlier daemon left in the shm-dir, and what of it can be taken over.

Promises: an attempt is taken over if its commit record and all its segments are whole, or if it is
durable anyway; everything else in the directory that is ours is unlinked; nothing in there stops a start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.arena import Arena
from ckptd.attempt import bound, own_tokens, read_record
from ckptd.v1.manifest_pb2 import Record

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Left:
    """One attempt to take over."""

    record: Record
    durable: bool
    confirmed: bool
    """All participants had accepted it, as far as the earlier daemon knew."""
    there: frozenset[str]
    """Tokens of what is here of it."""
    gone: frozenset[str]
    """Tokens of what this node had to hold and that is not there any more; none if it is not durable."""


def left_behind(arena: Arena, node: str) -> Iterator[Left]:
    """Adopts the segments of all attempts that can be taken over, and gives those, oldest first."""
    records: list[tuple[Record, str]] = []
    keep: dict[str, int] = {}
    for attempt, state, data in arena.records():
        record = read_record(attempt, data)
        if record is None:
            log.error("the commit record of attempt %s is damaged; it is dropped", attempt)
            arena.drop_record(attempt)
            continue
        records.append((record, state))
        for receipt in bound(record):
            keep[receipt.token] = receipt.nbytes + receipt.table_nbytes
    there = arena.adopt(keep)
    for record, state in sorted(records, key=lambda found: found[0].summary.attempt):
        here = frozenset(receipt.token for receipt in bound(record) if receipt.token in there)
        gone = own_tokens(record, node) - here
        if not gone or state == "durable":
            yield Left(record, state == "durable", state != "adopted", here, gone)
            continue
        log.error("checkpoint %s was accepted, but part of its memory is gone; it is dropped", record.summary.id)
        arena.drop_record(record.summary.attempt)
        for receipt in bound(record):
            if receipt.token in there:
                arena.drop(receipt.token)
