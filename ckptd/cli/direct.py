"""Opens the store itself, as `dial` asks a daemon: for login nodes, and for when no daemon runs.

Promises: a store that cannot be listed is an error, never "no checkpoint"; one damaged
checkpoint does not hide the others from a list; nothing is changed but by `prune`, `delete`
and `pin`. Knows only what is in the store: what a daemon holds in memory is not here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ckptd import config, contents, inspection
from ckptd.cli import documents
from ckptd.cli.documents import Shown
from ckptd.errors import CkptdError, Corrupt, NotFound, WrongPhase
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId, parse_target
from ckptd.retention import Policy, Verdict, decide
from ckptd.scan import Entry
from ckptd.stores import open_store
from ckptd.survey import survey
from ckptd.sweeper import Sweeper
from ckptd.v1 import daemon_pb2, manifest_pb2
from ckptd.verify import reply_of, verify

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 5.0

_State = daemon_pb2.Checkpoint.State


class Direct:
    """A store, looked at without a daemon."""

    def __init__(self, url: str, options: Mapping[str, str], *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Opens the store; raises InvalidRequest for what can be no store."""
        self._store = open_store(url, options)
        self._ledger = Ledger(self._store)
        self._sweeper = Sweeper(self._store, self._ledger)
        self._sleep = sleep
        #: The store's URL without credentials.
        self.where = self._store.url

    def checkpoints(self, run: str | None) -> list[daemon_pb2.Checkpoint]:
        """All checkpoints or those of one run, with what is incomplete."""
        found = self._ledger.scan(run)
        entries = found.entries
        listed = [_line(entry, summary) for entry, summary in zip(entries, self._ledger.summaries(entries), strict=True)]
        listed.extend(_incomplete(id_, reason) for id_, reason in found.incomplete)
        listed.sort(key=documents.order)
        contents.mark_abandoned(listed)
        return listed

    def listing(self, run: str | None) -> tuple[list[daemon_pb2.Checkpoint], CkptdError | None]:
        """The same, and that nothing is missing: all that there is to look into is the store."""
        return self.checkpoints(run), None

    def show(self, target: str) -> Shown:
        """One checkpoint by id, ``latest`` or ``<run>/latest``; raises NotFound, Corrupt."""
        wanted = parse_target(target)
        try:
            entry = self._find(target)
        except NotFound as exc:
            reasons = dict(self._ledger.incomplete(wanted.run)) if isinstance(wanted, CheckpointId) else {}
            if isinstance(wanted, CheckpointId) and wanted in reasons:
                raise NotFound(f"{wanted} is incomplete: {reasons[wanted]}") from exc
            raise
        found = inspection.stored(self._store, self._ledger, entry)
        return Shown(found.checkpoint, found.tensors, found.files)

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

    def delayed(self, target: str) -> str:
        """Why a checkpoint is not durable yet: more than that it is not there, the store does not know."""
        return f"there is no {target} in {self.where}, and whether it is on its way only a daemon knows"

    def prune(
        self,
        run: str | None,
        policy: Policy | None,
        *,
        dry_run: bool,
        delete_grace_seconds: float | None,
        orphan_age_seconds: float | None,
    ) -> daemon_pb2.PruneReply:
        """All verdicts, and what was swept; without a policy nothing is deleted, and None means the usual times."""
        surveyed = survey(self._store, self._ledger, run)
        verdicts = decide([candidate for _, candidate in surveyed], policy or Policy(), time.time_ns() // 1000)
        if not dry_run:
            entries = {entry.id: entry for entry, _ in surveyed}
            verdicts = [verdict if verdict.keep else self._carry_out(verdict, entries[verdict.id]) for verdict in verdicts]
        swept = self._sweeper.sweep(
            run,
            delete_grace_seconds=config.DELETE_GRACE_SECONDS if delete_grace_seconds is None else delete_grace_seconds,
            orphan_age_seconds=config.ORPHAN_AGE_SECONDS if orphan_age_seconds is None else orphan_age_seconds,
            dry_run=dry_run,
        )
        reply = daemon_pb2.PruneReply(
            swept=daemon_pb2.PruneReply.Swept(
                files=swept.files, nbytes=swept.nbytes, later_files=swept.later_files, later_nbytes=swept.later_nbytes
            )
        )
        for one in verdicts:
            reply.verdicts.add(id=str(one.id), kept=one.keep, reason=one.reason, stored_bytes=one.stored_bytes)
        return reply

    def delete(self, id: CheckpointId) -> daemon_pb2.Deleted:
        """Deletes one checkpoint; raises NotFound, WrongPhase if it is pinned."""
        entry = self._ledger.find(id)
        if entry.pinned:
            raise WrongPhase(f"{id} is pinned: `ckptd unpin {id}` first")
        deleted = self._sweeper.delete(entry)
        return daemon_pb2.Deleted(id=str(id), files=deleted.files, nbytes=deleted.nbytes, grace_seconds=config.DELETE_GRACE_SECONDS)

    def pin(self, target: str, *, pinned: bool) -> daemon_pb2.Checkpoint:
        """Pins or unpins one checkpoint by id, ``latest`` or ``<run>/latest``; raises NotFound."""
        id_ = self._find(target).id
        if pinned:
            self._ledger.pin(id_)
        else:
            self._ledger.unpin(id_)
        entry = self._ledger.find(id_)
        return _line(entry, self._ledger.summaries([entry])[0])

    def verify(self, target: str, run: str | None) -> Iterator[daemon_pb2.VerifyReply]:
        """Reads back one checkpoint, or with "" all of them (of one run); raises NotFound."""
        for entry in [self._find(target)] if target else self._ledger.entries(run):
            for progress in verify(self._store, self._ledger, entry):
                yield reply_of(progress)

    def _carry_out(self, verdict: Verdict, entry: Entry) -> Verdict:
        """Deletes one checkpoint, unless it is not any more what was decided about, or nobody can tell what it consists of."""
        try:
            self._sweeper.delete(entry)
        except (Corrupt, NotFound, WrongPhase) as exc:
            return replace(verdict, keep=True, reason=f"kept: {exc}")
        return verdict

    def _find(self, target: str) -> Entry:
        wanted = parse_target(target)
        return self._ledger.find(wanted) if isinstance(wanted, CheckpointId) else self._ledger.latest(wanted)


def _line(entry: Entry, summary: manifest_pb2.Summary | Corrupt) -> daemon_pb2.Checkpoint:
    return _incomplete(entry.id, str(summary)) if isinstance(summary, Corrupt) else _durable(summary, entry)


def _durable(summary: manifest_pb2.Summary, entry: Entry) -> daemon_pb2.Checkpoint:
    return daemon_pb2.Checkpoint(summary=summary, state=_State.DURABLE, stock=entry.attempt is None, pinned=entry.pinned)


def _incomplete(id_: CheckpointId, reason: str) -> daemon_pb2.Checkpoint:
    return daemon_pb2.Checkpoint(summary=manifest_pb2.Summary(id=str(id_)), state=_State.INCOMPLETE, reason=reason)
