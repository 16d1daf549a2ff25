"""Reads the store itself, as `dial` asks a daemon: for login nodes, and for when no daemon runs.

Promises: writes nothing; a store that cannot be listed is an error, never "no
checkpoint"; one damaged checkpoint does not hide the others from a list.
Knows only what is in the store: what a daemon holds in memory is not here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from ckptd import contents, metadata
from ckptd.cli import documents
from ckptd.cli.documents import Shown
from ckptd.errors import Corrupt, NotFound
from ckptd.ledger import Entry, Ledger
from ckptd.model import CheckpointId, parse_target
from ckptd.stores import open_store
from ckptd.v1 import daemon_pb2, manifest_pb2

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 5.0

_State = daemon_pb2.Checkpoint.State


class Direct:
    """A store, looked at without a daemon."""

    def __init__(self, url: str, options: Mapping[str, str], *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Opens the store; raises InvalidRequest for what can be no store."""
        self._store = open_store(url, options)
        self._ledger = Ledger(self._store)
        self._sleep = sleep
        #: The store's URL without credentials.
        self.where = self._store.url

    def checkpoints(self, run: str | None) -> list[daemon_pb2.Checkpoint]:
        """All checkpoints or those of one run, with what is incomplete."""
        entries = self._ledger.entries(run)
        listed = [
            _incomplete(entry.id, str(summary)) if isinstance(summary, Corrupt) else _durable(summary, entry)
            for entry, summary in zip(entries, self._ledger.summaries(entries), strict=True)
        ]
        listed.extend(_incomplete(id_, reason) for id_, reason in self._ledger.incomplete(run))
        listed.sort(key=documents.order)
        contents.mark_abandoned(listed)
        return listed

    def show(self, target: str) -> Shown:
        """One checkpoint by id, ``latest`` or ``<run>/latest``; raises NotFound, Corrupt."""
        entry = self._find(target)
        try:
            pickled = metadata.read(self._store.get(entry.metadata.key))
        except Corrupt as exc:
            raise Corrupt(f"{entry.metadata.key} is damaged: {exc}; load another checkpoint") from exc
        tables = [] if entry.attempt is None else [shard.table for shard in self._ledger.manifest(entry).shards]
        return Shown(
            checkpoint=_durable(self._ledger.summary(entry), entry),
            tensors=contents.lines(pickled, tables),
            files=sorted({stored.file for stored in pickled.storage.values()}),
        )

    def wait(self, target: str, timeout_seconds: float | None) -> str | None:
        """The id once it is in the store, None if it is not after the timeout; without one looks for ever."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return str(self._find(target).id)
            except NotFound:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _find(self, target: str) -> Entry:
        wanted = parse_target(target)
        return self._ledger.find(wanted) if isinstance(wanted, CheckpointId) else self._ledger.latest(wanted)


def _durable(summary: manifest_pb2.Summary, entry: Entry) -> daemon_pb2.Checkpoint:
    return daemon_pb2.Checkpoint(summary=summary, state=_State.DURABLE, stock=entry.attempt is None)


def _incomplete(id_: CheckpointId, reason: str) -> daemon_pb2.Checkpoint:
    return daemon_pb2.Checkpoint(summary=manifest_pb2.Summary(id=str(id_)), state=_State.INCOMPLETE, reason=reason)
