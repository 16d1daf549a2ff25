"""The way of accepted attempts to the store: which is next, when to try again, when to give up.

Promises: oldest first; what may pass is tried again, with growing pauses, until it works or
has become pointless; what can never work is put down in the catalogue with its reason, for
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
from pathlib import Path

from ckptd import errors
from ckptd.arena import Arena
from ckptd.attempt import Attempt, Effect
from ckptd.catalog import Catalog
from ckptd.flusher import Flusher, Stopped
from ckptd.ledger import Ledger
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import StoredShard

log = logging.getLogger(__name__)
#: Longest pause between two tries to make an attempt durable.
BACKOFF_SECONDS = 60.0


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
        #: Attempts of an earlier daemon: the store may have them already.
        self.recovered: set[str] = set()
        self._stops: dict[str, tuple[threading.Event, asyncio.Event]] = {}

    @property
    def busy(self) -> bool:
        """Something accepted is still on its way to the store."""
        return self.catalog.to_flush() is not None or bool(self._stops)

    def stop(self, name: str) -> None:
        """Tells the flush of an attempt to end soon; fine if there is none."""
        if name in self._stops:
            in_thread, on_loop = self._stops[name]
            in_thread.set()
            on_loop.set()

    def stop_all(self) -> None:
        """Tells all flushes to end soon."""
        for name in self._stops:
            self.stop(name)

    async def flush(self, attempt: Attempt) -> None:
        """Makes one attempt durable, or says in the catalogue why it never will be. Tries until then, or until it is stopped."""
        name, checkpoint = attempt.name, attempt.id
        stops = self._stops[name] = threading.Event(), asyncio.Event()
        self.catalog.pin(name)
        paths = {token: self.arena.get(token).path for token in attempt.tokens}
        done: dict[str, StoredShard] = {}
        tries = 0
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            while not stops[0].is_set():
                try:
                    stored = await loop.run_in_executor(self.threads, self._try, attempt, paths, done, stops[0])
                except Stopped:
                    return
                except (errors.Unavailable, errors.NotFound, errors.Corrupt) as exc:
                    if not isinstance(exc, errors.Unavailable):
                        done.clear()  # a file that was put is not there any more, or not whole: put all again
                    tries += 1
                    pause = random.uniform(0.5, 1.0) * min(BACKOFF_SECONDS, 0.25 * 2.0**tries)
                    log.warning("flush of %s failed, try %d, again in %.1f s: %s", checkpoint, tries, pause, exc)
                    self.catalog.warning = f"checkpoint {checkpoint} is not durable yet, {tries} tries failed: {exc}"
                    try:
                        await asyncio.wait_for(stops[1].wait(), pause)
                    except TimeoutError:
                        continue
                    return
                except errors.WrongPhase as exc:
                    log.warning("flush of %s ended: %s", checkpoint, exc)
                    self.apply(self.catalog.aborted(name, str(exc)))
                    return
                except errors.CkptdError as exc:
                    log.error("checkpoint %s cannot be made durable: %s", checkpoint, exc)  # noqa: TRY400 - the message says all
                    self.catalog.failed(name, str(exc))
                    return
                except Exception as exc:
                    log.exception("checkpoint %s cannot be made durable", checkpoint)
                    self.catalog.failed(name, f"{type(exc).__name__}: {exc}")
                    return
                self._durable(attempt, stored, time.monotonic() - started)
                return
        finally:
            del self._stops[name]
            self.apply(self.catalog.unpin(name))

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
            self.arena.move_record(attempt.name, "accepted", "durable", attempt.record.SerializeToString())
        log.info("durable %s: %d bytes stored of %d, %.2f s", attempt.id, stored_bytes, attempt.record.summary.raw_bytes, seconds)
        self.apply(effects)
