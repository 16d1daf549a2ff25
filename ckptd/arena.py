"""Memory: all segments of a daemon, under one budget that is never exceeded.

Who asks first is served first. What makes room, in this order: spares (empty, warm
segments kept for their owner), then what the catalogue offers as victims, in its order.
Promises: `used` is what the segments hold on tmpfs, from before a page is made until
after it is freed, and stays within the budget; a cancelled or failed call leaves nothing
behind; no page of a segment is made by anybody else, so nobody gets a SIGBUS. The arena
never decides what is worth keeping (`victims` does) and never touches a shard's bytes.

All state lives on the event loop: methods are called on it, and only `allocate` and
`reserve` wait. `evicted` is never called from inside `seal`, `drop` and the like.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptd import segment as files
from ckptd.budget import Budget
from ckptd.errors import CkptdError, InvalidRequest, LeaseLost, Unavailable
from ckptd.line import Line, Tokens, Waiter, cache_lost
from ckptd.model import mint_token
from ckptd.pool import Pool
from ckptd.segment import Segment, shown
from ckptd.shmdir import ShmDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

_log = logging.getLogger(__name__)


class Arena:
    """Owns `directory` until `close`.

    `budget` is in bytes; None means half of what the file system can hold. `victims` yields
    (token, precious) of what may be evicted, in order; a precious one only if nothing else makes
    room, and its owner does not just get it again. `evicted` is told each token whose bytes are gone. Raises InvalidRequest if
    the directory cannot be had, or the budget makes no sense there.
    """

    def __init__(
        self,
        directory: Path,
        budget: int | None,
        *,
        victims: Callable[[], Iterable[tuple[str, bool]]],
        evicted: Callable[[str], None],
    ) -> None:
        self._directory = ShmDirectory(directory)
        try:
            self._budget = Budget.checked(budget, self._directory.capacity(), directory)
        except InvalidRequest:
            self._directory.close()
            raise
        self._victims = victims
        self._evicted = evicted
        self._pool = Pool(self._directory, self.poke)
        self._wanted: dict[str, int] = {}  # owner -> size of the spare to make next
        self._line = Line()
        self._poked = False
        self._closed = False
        self.records = self._directory.records
        self.put_record = self._directory.put_record
        self.move_record = self._directory.move_record
        self.drop_record = self._directory.drop_record

    @property
    def budget(self) -> int:
        """Bytes that may be used at most."""
        return self._budget.nbytes

    @property
    def used(self) -> int:
        """Bytes of the budget in use: what all segments hold on tmpfs, or are about to."""
        return self._pool.used()

    @property
    def waiting(self) -> int:
        """How many requests wait for room."""
        return len(self._line)

    def __len__(self) -> int:
        return len(self._pool)

    def __contains__(self, token: str) -> bool:
        return self._pool.get(token) is not None

    def get(self, token: str) -> Segment:
        """The segment of this token; KeyError if there is none (any more). Stale after the next change of its state."""
        segment = self._pool.get(token)
        if segment is None:
            raise KeyError(token)
        return segment

    def owned(self, owner: str) -> list[int]:
        """Inodes of all segments of a trainer process: what it may keep mapped."""
        return [segment.inode for segment in self._pool if owner and segment.owner == owner]

    def adopt(self, keep: Mapping[str, int]) -> set[str]:
        """At start: takes back the sealed segments in `keep` (token -> bytes it must hold), unlinks all others.

        Returns the tokens that are really there, whole. They have no owner.
        """
        self._directory.remove_temporaries()
        found = self._pool.adopt(keep)
        if self.used > self.budget:
            _log.warning("re-adopted %s, over the budget of %s: saves wait until some is durable", shown(self.used), shown(self.budget))
        return found

    async def allocate(
        self,
        nbytes: int,
        owner: str,
        *,
        metadata: bool = False,
        deadline: float | None = None,
        sparing: Tokens = tuple,
        beside: Tokens = tuple,
    ) -> Segment:
        """A segment of at least `nbytes`, open, all pages there; its bytes are whatever was there before.

        Waits its turn until `deadline` (loop time; None: for ever). Raises ArenaFull if there is no room by then, or never can be,
        or if the file system is full. An `owner` of "" reuses nothing. `sparing`: tokens of what is not evicted for it;
        `beside`: of what the same save holds here, for the error's sake.
        """
        if nbytes < 0:
            raise InvalidRequest(f"a segment of {nbytes} bytes")
        segment, fresh = await self._turn(Waiter(files.rounded(nbytes), owner, metadata, sparing=sparing, beside=beside), deadline)
        if fresh:
            await self._pool.make(segment)
        return segment

    def seal(self, token: str, nbytes: int, *, name: str = "") -> None:
        """The owner's copy of `nbytes` has ended: immutable from here on, as token `name` if given. LeaseLost if it is not held."""
        segment = self._pool.get(token)
        if segment is None or segment.state not in ("open", "sealed"):
            raise LeaseLost(f"segment {token} is not held any more: save again")
        if nbytes > segment.nbytes:
            raise InvalidRequest(f"{nbytes} bytes are more than segment {token} holds ({segment.nbytes})")
        if segment.state == "open":
            if not self._become(segment, replace(segment, token=name or token, state="sealed")):
                raise LeaseLost(f"segment {token} has been removed from {self._directory.path}: save again")
            if not segment.metadata:
                self.prepare(segment.owner, segment.nbytes)

    def drop(self, token: str) -> None:
        """Gives a segment up; fine if it is gone. A sealed one becomes a spare of its owner, while that lives."""
        segment = self._pool.get(token)
        if segment is not None and segment.state != "spare":
            self._give_up(segment, reusable=segment.state == "sealed")

    def release(self, token: str, reusable: bool) -> None:  # noqa: FBT001 - the one thing a Release says
        """The owner's copy has ended without Seal. With `reusable` the segment becomes its spare. Sealed ones stay."""
        segment = self._pool.get(token)
        if segment is not None and segment.state == "open":
            self._give_up(segment, reusable=reusable)

    def disown(self, owner: str) -> None:
        """The lease has ended: its spares go, its requests fail, and what else it has stays, without an owner."""
        if not owner:
            return
        self._wanted.pop(owner, None)
        for segment in (found for found in self._pool if found.owner == owner):
            segment.owner = ""
            if segment.state == "spare":
                self._pool.discard(segment)
        for waiter in (found for found in self._line if found.owner == owner):
            self._line.settle(waiter, LeaseLost("the lease ended while a request waited for memory: save again"))
        self.poke()

    def prepare(self, owner: str, nbytes: int) -> None:
        """Soon populates a spare for the owner's next save, if that takes no room from anybody."""
        if owner:
            self._wanted[owner] = files.rounded(nbytes)
            self.poke()

    def create_cache(self, nbytes_virtual: int) -> Segment:
        """A sparse segment of one big hole, charged nothing yet. `reserve` before writing into it."""
        return self._pool.create(max(1, -(-nbytes_virtual // _PAGE)) * _PAGE, "", "cache")

    async def reserve(self, token: str, nbytes: int, deadline: float | None = None) -> None:
        """Charges a cache for `nbytes` more, rounded up to pages. Waits, and fails, like `allocate`; LeaseLost if it is gone."""
        cache = self._pool.get(token)
        if cache is None or cache.state != "cache":
            raise cache_lost(token)
        if nbytes > 0:
            await self._turn(Waiter(-(-nbytes // _PAGE) * _PAGE, cache=cache), deadline)

    def charge(self, token: str, nbytes: int, *, settled: int = 0) -> None:
        """Lowers what a cache is charged to the `nbytes` it holds and what is still reserved; `settled` of that has ended."""
        cache = self._pool.get(token)
        if cache is not None:
            cache.reserved -= settled
            cache.charged = min(cache.charged, nbytes + cache.reserved)
            self.poke()

    def poke(self) -> None:
        """Something may have become evictable: serves the queue, and makes spares, in a moment."""
        if (self._line or self._wanted) and not self._poked and not self._closed:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._serve)

    def close(self) -> None:
        """Ends the threads (within one piece of work), unlinks all but sealed segments and records, lets go of the directory."""
        self._closed = True
        for waiter in self._line:
            self._line.settle(waiter, Unavailable("the daemon is stopping"))
        self._pool.close()
        self._directory.close()

    # -- waiting for room ------------------------------------------------------------------------

    async def _turn(self, waiter: Waiter, deadline: float | None) -> tuple[Segment, bool]:
        """Waits for room; the segment (or the cache), and whether its pages are still to be made."""
        if self._closed:
            raise Unavailable("the daemon is stopping")
        self._budget.refuse_what_never_fits(waiter.nbytes, metadata=waiter.metadata)
        self._line.join(waiter)
        self._serve()
        if not waiter.granted.done():
            try:
                await self._line.wait(waiter, deadline, self._shortage)
            except asyncio.CancelledError:
                self._undo(waiter)
                raise
            self.poke()
        return waiter.granted.result()

    def _undo(self, waiter: Waiter) -> None:
        """Takes back what was granted to a caller that has been cancelled, if anything was."""
        if waiter.granted.done() and waiter.granted.exception() is None:
            segment, _ = waiter.granted.result()
            if waiter.cache is None:
                self._pool.discard(segment)
            elif segment in self._pool:
                segment.charged -= waiter.nbytes
                segment.reserved -= waiter.nbytes
        self.poke()

    # -- making room -----------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poked = False
        if self._closed:
            return
        for waiter in self._line:
            if waiter.metadata and waiter is not self._line.head():
                self._grant(waiter, head=False)
        while (first := self._line.head()) and self._grant(first, head=True):
            pass
        if not self._line:
            for owner, nbytes in self._wanted.items():
                self._begin_spare(owner, nbytes)
        self._wanted.clear()

    def _grant(self, waiter: Waiter, *, head: bool) -> bool:
        """Ends a waiter's wait, or begins to make room. Ahead of its turn it evicts only metadata segments."""
        if waiter.cache is not None and waiter.cache not in self._pool:
            return self._line.settle(waiter, cache_lost(waiter.cache.token))
        if any(self._reuse(segment, waiter) for segment in self._warm(waiter)):
            return True
        if self._free(metadata=waiter.metadata) < waiter.nbytes:
            spared = {*waiter.sparing(), *([waiter.cache.token] if waiter.cache else [])}
            able = [one for one in self._evictable() if one.token not in spared and (head or one.metadata)]
            going = self._budget.least(self._pool, able, waiter.nbytes, metadata=waiter.metadata)
            if any(self._reuse(segment, waiter) for segment in going if waiter.fits(segment)):
                return True
            for segment in going:
                self._evict(segment)
            return False  # until the threads have freed it
        if waiter.cache is not None:
            waiter.cache.charged += waiter.nbytes
            waiter.cache.reserved += waiter.nbytes
            return self._line.settle(waiter, (waiter.cache, False))
        outcome: tuple[Segment, bool] | CkptdError
        try:
            outcome = self._pool.create(waiter.nbytes, waiter.owner, "open", metadata=waiter.metadata), True
        except CkptdError as error:
            outcome = error
        return self._line.settle(waiter, outcome)

    def _free(self, *, metadata: bool) -> int:
        return self._budget.room(self._pool.used(), self._pool.used(metadata=True), metadata=metadata)

    def _offered(self) -> Iterator[tuple[Segment, bool]]:
        for token, precious in self._victims():
            segment = self._pool.get(token)
            if segment is not None and segment.state in ("sealed", "cache"):
                yield segment, precious

    def _evictable(self) -> list[Segment]:
        return sorted(self._pool.spares(), key=self._pool.ready) + [segment for segment, _ in self._offered()]

    def _warm(self, waiter: Waiter) -> list[Segment]:
        """What the owner may reuse, the best first: its spares, then its own victims."""
        able = self._pool.spares() + [segment for segment, precious in self._offered() if not precious]
        return [segment for segment in able if waiter.owner and segment.owner == waiter.owner and waiter.fits(segment)]

    def _begin_spare(self, owner: str, nbytes: int) -> None:
        """Begins a spare, unless the owner has something large enough, or it would take room from what is there."""
        own = self._pool.spares() + [segment for segment, precious in self._offered() if not precious]
        if any(segment.owner == owner and segment.nbytes >= nbytes for segment in own) or self._free(metadata=False) < nbytes:
            return
        try:
            self._pool.grow(self._pool.create(nbytes, owner, "spare"))
        except CkptdError as error:
            _log.warning("no spare for the next save: %s", error)

    # -- what happens to a segment ---------------------------------------------------------------

    def _become(self, old: Segment, new: Segment, *, foreign: bool = False) -> bool:
        try:
            return self._pool.become(old, new, foreign=foreign)
        except FileNotFoundError:  # somebody else has removed it
            self._pool.discard(old)
            return False

    def _reuse(self, old: Segment, waiter: Waiter) -> bool:
        if old not in self._pool or not self._pool.ready(old):
            return False
        new = replace(old, token=mint_token(), owner=waiter.owner, state="open")
        reused = self._become(old, new, foreign=not waiter.owner or old.owner != waiter.owner)
        if reused:
            self._line.settle(waiter, (new, False))
        if old.state == "sealed" and old not in self._pool:
            self._evicted(old.token)
        return reused

    def _give_up(self, segment: Segment, *, reusable: bool) -> None:
        if not (reusable and segment.owner and self._become(segment, replace(segment, token=mint_token(), state="spare"))):
            self._pool.discard(segment)
        self.poke()

    def _evict(self, segment: Segment) -> None:
        if self._pool.discard(segment) and segment.state in ("sealed", "cache"):
            self._evicted(segment.token)

    def _shortage(self, waiter: Waiter) -> tuple[str, str]:
        able = {segment.token for segment in self._evictable()}
        kept = [segment for segment in self._pool if segment.token not in able]
        return self._budget.shortage(waiter.nbytes, kept, waiter.beside(), self._line.ahead_of(waiter))
