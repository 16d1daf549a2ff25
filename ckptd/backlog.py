"""The way of accepted attempts to the store: which is next, when to try again, when to give up.

Promises: oldest first; what may pass is tried again, with growing pauses that hold up nobody
else, until it works or has become pointless; what can never work is put down in the catalogue with its reason, for
whoever waits. Lives on the loop; the flusher's bulk work runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from ckptd import errors
from ckptd.arena import Arena
from ckptd.attempt import Attempt, Effect
from ckptd.catalog import Catalog
from ckptd.flusher import Flusher, Stopped
from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import StoredShard

log = logging.getLogger(__name__)
#: Longest pause between two tries to make an attempt durable.
BACKOFF_SECONDS = 60.0


@dataclass(slots=True)
class Retry:
    """What is known of an attempt that has been tried."""

    tries: int = 0
    not_before: float = 0.0
    #: What is in the store already, by the shard's token.
    done: dict[str, StoredShard] = field(default_factory=dict)

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
        self.threads = threads
        self.apply = apply
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
        self._ended = False

    @property
    def busy(self) -> bool:
        """Something accepted is still on its way to the store."""
        return bool(self.catalog.to_flush() or self._stops)

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

    async def flush(self, attempt: Attempt) -> None:
        """Tries once to make an attempt durable; the catalogue learns if it worked, or never will."""
        name, checkpoint = attempt.name, attempt.id
        stop = self._stops[name] = threading.Event()
        self.catalog.pin(name)
        retry = self._retries.setdefault(name, Retry())
        paths = {token: self.arena.get(token).path for token in attempt.tokens}
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            stored = await loop.run_in_executor(self.threads, self._try, attempt, paths, retry.done, stop)
        except Stopped:
            pass
        except (errors.Unavailable, errors.NotFound, errors.Corrupt) as exc:
            if not isinstance(exc, errors.Unavailable):
                retry.done.clear()  # a file that was put is not there any more, or not whole: put all again
            pause = retry.later()
            log.warning("flush of %s failed, try %d, again in %.1f s: %s", checkpoint, retry.tries, pause, exc)
            self.catalog.delayed(name, f"{retry.tries} {'try' if retry.tries == 1 else 'tries'} failed: {exc}")
        except errors.WrongPhase as exc:
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
            if attempt.state != Checkpoint.ACCEPTED:
                self._retries.pop(name, None)
            self.apply(self.catalog.unpin(name))

    def _open(self) -> list[Attempt]:
        """What may be flushed now."""
        return [] if self._ended or self.paused else [a for a in self.catalog.to_flush() if a.id not in self.held]

    def _due(self, attempt: Attempt) -> float:
        retry = self._retries.get(attempt.name)
        return 0.0 if retry is None else retry.not_before

    def _try(self, attempt: Attempt, paths: dict[str, Path], done: dict[str, StoredShard], stop: threading.Event) -> int:
        """In a thread: one try. Returns the stored bytes."""
        if attempt.name in self.recovered:  # the daemon may have died between .metadata and its note of it
            try:
                entry = self.ledger.find(attempt.id)
                if entry.attempt == attempt.name and not entry.damaged:
                    return self.ledger.summary(entry).stored_bytes
            except errors.NotFound:
                pass
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
        if attempt.state == Checkpoint.DURABLE:
            self.became_durable(attempt.id)
