"""The way of accepted attempts to the store: which is next, when to try again, when to give up.

Promises: oldest first; what may pass is tried again, with growing pauses that hold up nobody
else, until it works or has become pointless; what can never work is put down in the catalogue with its reason, for
whoever waits. Lives on the loop; the flusher's bulk work runs in threads.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ckptd import errors
from ckptd.arena import Arena
from ckptd.attempt import Attempt, Effect
from ckptd.catalog import Catalog
from ckptd.flusher import Flusher, Stopped
from ckptd.jointflush import Duty, Incomplete, JointFlush
from ckptd.ledger import Ledger, WasDeleted
from ckptd.model import CheckpointId
from ckptd.scan import Entry
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import StoredShard

log = logging.getLogger(__name__)
#: Longest pause between two tries to make an attempt durable.
BACKOFF_SECONDS = 60.0
#: What other nodes have not uploaded by then is worth a word.
LATE_SECONDS = 30.0
#: What another node calls durable and the store does not have for so long was taken away by somebody who told nobody.
DENIED_SECONDS = 60.0
#: Longest pause between two looks at what other nodes have uploaded; they also tell.
LOOK_SECONDS = 5.0


class Tell(Protocol):
    """Tells the committer, or all participants, that something of the attempt is in the store."""

    def __call__(self, attempt: Attempt, *, everybody: bool) -> None: ...


def _nobody(attempt: Attempt, *, everybody: bool) -> None:
    """This node is alone."""


@dataclass(slots=True)
class Retry:
    """What is known of an attempt that has been tried."""

    tries: int = 0
    not_before: float = 0.0
    #: What is in the store already, by the shard's token.
    done: dict[str, StoredShard] = field(default_factory=dict)
    #: Tokens of shards whose part was put.
    noted: set[str] = field(default_factory=set)
    #: When something was missing of other nodes for the first time, monotonic.
    since: float = 0.0
    #: When the store did not have what another node calls durable for the first time, monotonic.
    denied: float = 0.0
    #: How often nothing was left to do but to wait for other nodes.
    looks: int = 0

    def soon(self) -> None:
        """The others are not done: looks again a little later."""
        self.looks += 1
        self.not_before = time.monotonic() + random.uniform(0.5, 1.0) * min(LOOK_SECONDS, 0.25 * 2.0 ** min(self.looks, 20))

    def later(self) -> float:
        """Another try has failed: puts the next one off, and returns for how many seconds."""
        self.tries += 1
        pause = random.uniform(0.5, 1.0) * min(BACKOFF_SECONDS, 0.25 * 2.0 ** min(self.tries, 20))
        self.not_before = time.monotonic() + pause
        return pause


class Backlog:
    """Flushes one attempt after the other. `apply` carries out the catalogue's effects."""

    def __init__(
        self,
        catalog: Catalog,
        arena: Arena,
        ledger: Ledger,
        flusher: Flusher,
        threads: Executor,
        apply: Callable[[Iterable[Effect]], None],
    ) -> None:
        self.catalog = catalog
        self.arena = arena
        self.ledger = ledger
        self.flusher = flusher
        self.joint = JointFlush(ledger, flusher, catalog.node)
        self.threads = threads
        self.apply = apply
        #: What this node has to do for attempts that several nodes hold; nothing but its own shards, if an attempt is not here.
        self.duties: dict[str, Duty] = {}
        #: Ranks whose shards were not in the store when an attempt was looked at last.
        self.missing: dict[str, frozenset[int]] = {}
        #: Told of attempts of which the store shows that all participants have accepted them.
        self.proved: Callable[[str], None] = lambda _: None
        #: Told of what is in the store, and others wait for: the committer for shards, everybody for `.metadata`.
        self.tell: Tell = _nobody
        #: Takes away what a commit of this node has put after its attempt was deleted.
        self.take_away: Callable[[Entry], object] = lambda _: None
        #: Told of every checkpoint that becomes durable.
        self.became_durable: Callable[[CheckpointId], None] = lambda _: None
        #: Attempts of an earlier daemon: the store may have them already.
        self.recovered: set[str] = set()
        #: Ids that are being deleted: their attempts wait.
        self.held: set[CheckpointId] = set()
        #: Nothing new begins while this is set: debris is being collected that could be what a flush has just put.
        self.paused = False
        self._stops: dict[str, threading.Event] = {}
        self._retries: dict[str, Retry] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._ended = False

    @property
    def busy(self) -> bool:
        """Something accepted is still on its way to the store."""
        return bool(self.catalog.on_their_way() or self._stops)

    def next(self) -> Attempt | None:
        """The oldest attempt whose turn has come: one that waits to be tried again holds up no other."""
        now = time.monotonic()
        return next((a for a in self._open() if self._due(a) <= now), None)

    def pause_seconds(self) -> float | None:
        """How long it takes until the next attempt is due; None if none is waiting."""
        due = [self._due(attempt) for attempt in self._open()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def flushing(self, checkpoint: CheckpointId | None = None) -> bool:
        """Whether a flush (of that id) is running."""
        return any(checkpoint is None or self.catalog.attempts[name].id == checkpoint for name in self._stops)

    def nudge(self, name: str) -> None:
        """Something has happened to an attempt that waits for other nodes: it is looked at now."""
        if name in self.missing and (retry := self._retries.get(name)) is not None:
            retry.not_before = 0.0

    def forget(self, name: str) -> None:
        """Nothing is done for the attempt any more."""
        if name not in self._stops:
            self.recovered.discard(name)
            for notes in (self._retries, self.duties, self.missing):
                notes.pop(name, None)

    def stop(self, name: str) -> None:
        """Tells the flush of an attempt to end soon; fine if there is none."""
        self._retries.pop(name, None)
        if name in self._stops:
            self._stops[name].set()

    def stop_of(self, checkpoint: CheckpointId) -> None:
        """Tells the flushes of an id to end soon; they may be begun again."""
        for name, stop in self._stops.items():
            if self.catalog.attempts[name].id == checkpoint:
                stop.set()

    def stop_all(self) -> None:
        """Tells all flushes to end soon; no other begins."""
        self._ended = True
        for stop in self._stops.values():
            stop.set()

    async def look_again(self, attempt: Attempt) -> None:
        """Another node may have uploaded meanwhile what this one has given up: says in `missing` what the store lacks."""
        retry = self._retries.setdefault(attempt.name, Retry())
        if not attempt.record.durable or retry.not_before > time.monotonic():
            return
        retry.later()
        try:
            self.missing[attempt.name] = await asyncio.get_running_loop().run_in_executor(self.threads, self.joint.lacking, attempt)
        except errors.WrongPhase as exc:
            if attempt.name in self.catalog.attempts:
                self.apply(self.catalog.aborted(attempt.name, str(exc)))
        except errors.CkptdError as exc:  # a store that cannot be asked says nothing new
            log.debug("what the store has of %s is not known: %s", attempt.id, exc)

    async def flush(self, attempt: Attempt) -> None:
        """Tries once to make an attempt durable; the catalogue learns if it worked, or never will."""
        name, checkpoint = attempt.name, attempt.id
        stop = self._stops[name] = threading.Event()
        self.catalog.pin(name)
        retry = self._retries.setdefault(name, Retry())
        duty, started = self.duties.get(name, Duty()), time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            paths = {token: self.arena.get(token).path for token in attempt.held}
            if not attempt.confirmed:
                if not await loop.run_in_executor(self.threads, self.joint.is_proved, attempt):
                    retry.soon()
                    return
                self.proved(name)
            tried = functools.partial(self.joint.flush, duty, retry.noted) if attempt.joint else self._try
            stored = await loop.run_in_executor(self.threads, tried, attempt, paths, retry.done, stop)
        except Stopped:
            pass
        except Incomplete as exc:
            self._waits(attempt, retry, exc)
        except (errors.Unavailable, errors.NotFound, errors.Corrupt) as exc:
            retry.denied = 0.0
            if not isinstance(exc, errors.Unavailable):
                retry.done.clear()  # a file that was put is not there any more, or not whole: put all again
            pause = retry.later()
            log.warning("flush of %s failed, try %d, again in %.1f s: %s", checkpoint, retry.tries, pause, exc)
            self.catalog.delayed(name, f"{retry.tries} {'try' if retry.tries == 1 else 'tries'} failed: {exc}")
        except errors.WrongPhase as exc:
            attempt.deleted |= isinstance(exc, WasDeleted) and exc.entry is not None
            log.warning("flush of %s ended: %s", checkpoint, exc)
            self.apply(self.catalog.aborted(name, str(exc)))
        except errors.CkptdError as exc:
            log.error("checkpoint %s cannot be made durable: %s", checkpoint, exc)  # noqa: TRY400 - the message says all
            self.catalog.failed(name, str(exc))
        except Exception as exc:
            log.exception("checkpoint %s cannot be made durable", checkpoint)
            self.catalog.failed(name, f"{type(exc).__name__}: {exc}")
        else:
            self._durable(attempt, stored, time.monotonic() - started)
        finally:
            del self._stops[name]
            if not attempt.pending:
                for notes in (self._retries, self.duties, self.missing):
                    notes.pop(name, None)
            self.apply(self.catalog.unpin(name))
            if attempt.state == Checkpoint.ABORTED and (duty.commits or attempt.deleted):
                task = asyncio.create_task(self._settle(attempt))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    async def _settle(self, attempt: Attempt) -> None:
        """It has ended while this node may have committed it: what was deleted goes again, as soon as the store answers."""
        retry = Retry()
        while not self._ended:
            try:
                await asyncio.get_running_loop().run_in_executor(self.threads, self._undo, attempt)
            except errors.CkptdError as exc:
                pause = retry.later()
                log.warning("%s ended while it was committed; the store is looked at again in %.1f s: %s", attempt.id, pause, exc)
                await asyncio.sleep(pause)
            else:
                return

    def _undo(self, attempt: Attempt) -> None:
        """In a thread: takes away what a commit has put after the deletion. Raises what the store raises."""
        try:
            there = self.ledger.stands(attempt.id, attempt.name, whole=False)
            entry = self.ledger.find(attempt.id) if there is not None and attempt.deleted else None
        except WasDeleted as exc:
            entry = exc.entry
        except (errors.NotFound, errors.WrongPhase, errors.Corrupt):  # a newer one is there, or one that a person has to look at
            return
        if entry is not None and entry.attempt == attempt.name:
            with suppress(errors.WrongPhase):  # by another one, meanwhile
                self.take_away(entry)

    def _waits(self, attempt: Attempt, retry: Retry, found: Incomplete) -> None:
        """The attempt waits for other nodes."""
        name, now = attempt.name, time.monotonic()
        self.missing[name] = found.ranks
        if found.news:
            self.tell(attempt, everybody=False)
        retry.soon()
        retry.since = retry.since or now
        if self.catalog.troubles.pop(name, None) and not attempt.doubtful:  # what had failed before works by now
            attempt.reason = ""
        if self.duties.get(name, Duty()).durable:
            retry.denied = retry.denied or now
        if retry.denied and now - retry.denied > DENIED_SECONDS:
            self.catalog.failed(
                name, f"another node says that it was durable, and {self.ledger.url} does not have it: was it removed there?"
            )
        elif found.ranks and now - retry.since > LATE_SECONDS and not attempt.doubtful:  # else the reason is known, and said
            nodes = dict.fromkeys(f"node {r.node} at {r.address}" for r in attempt.record.shards if r.rank in found.ranks)
            named = ", ".join([*nodes][:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
            self.catalog.delayed(name, f"{found}: is {self.ledger.url} the same on all nodes, and can {named} write to it?")

    def _open(self) -> list[Attempt]:
        """What may be flushed now."""
        return [] if self._ended or self.paused else [a for a in self.catalog.to_flush() if a.id not in self.held]

    def _due(self, attempt: Attempt) -> float:
        retry = self._retries.get(attempt.name)
        return 0.0 if retry is None else retry.not_before

    def _try(self, attempt: Attempt, paths: dict[str, Path], done: dict[str, StoredShard], stop: threading.Event) -> int:
        """In a thread: one try. Returns the stored bytes."""
        # The daemon may have died between .metadata and its note of it.
        if attempt.name in self.recovered and (summary := self.ledger.stands(attempt.id, attempt.name)) is not None:
            return summary.stored_bytes
        return self.flusher.flush(attempt.record, paths, done, stop).summary.stored_bytes

    def _durable(self, attempt: Attempt, stored_bytes: int, seconds: float) -> None:
        effects = self.catalog.flushed(attempt.name, stored_bytes)
        if attempt.state == Checkpoint.DURABLE:
            # Written again if it is gone: the directory may have been cleaned, and the checkpoint is safe all the same.
            try:
                self.arena.move_record(attempt.name, "accepted", "durable", attempt.record.SerializeToString())
            except errors.CkptdError as exc:  # then the next daemon finds out from the store
                log.warning("the record of %s stays as it is: %s", attempt.id, exc)
        log.info("durable %s: %d bytes stored of %d, %.2f s", attempt.id, stored_bytes, attempt.record.summary.raw_bytes, seconds)
        self.apply(effects)
        commits = self.duties.get(attempt.name, Duty()).commits
        if attempt.joint and commits:
            self.tell(attempt, everybody=True)
        if attempt.state == Checkpoint.DURABLE and (commits or not attempt.joint):
            self.became_durable(attempt.id)
