"""The segments that a daemon has, whatever their state, and how one becomes another.

Promises: the table and the directory say the same; a segment counts as used from before
its first page is made until after its last is freed; what another process may still map
is not given to somebody else. Knows no budget and no queue: the arena decides when, the
pool does it. State lives on the event loop; pages are made and freed in threads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from itertools import chain
from typing import TYPE_CHECKING

from ckptd import segment as files
from ckptd.errors import ArenaFull, CkptdError, Unavailable
from ckptd.model import mint_token
from ckptd.pages import Pages
from ckptd.segment import Segment, State, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ckptd.shmdir import ShmDirectory

_log = logging.getLogger(__name__)


class Pool:
    """The segments in `directory`; `freed` is called on the loop whenever some bytes have become free."""

    def __init__(self, directory: ShmDirectory, freed: Callable[[], None]) -> None:
        self._directory = directory
        self._freed = freed
        self._segments: dict[str, Segment] = {}
        self._leaving: dict[str, Segment] = {}  # given up, pages not yet freed
        self._growing: dict[str, asyncio.Task[None]] = {}  # spares that are being populated
        self._pages = Pages()

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __contains__(self, segment: Segment) -> bool:
        return self._segments.get(segment.token) is segment

    def get(self, token: str) -> Segment | None:
        """The segment of this token, or None."""
        return self._segments.get(token)

    def used(self, *, metadata: bool | None = None) -> int:
        """Bytes that all segments hold, or are about to; with `metadata`, only those that are (not) for metadata."""
        every = chain(self._segments.values(), self._leaving.values())
        return sum(one.charged for one in every if metadata is None or one.metadata == metadata)

    def ready(self, segment: Segment) -> bool:
        """Whether all pages of a spare are there."""
        return segment.token not in self._growing

    def spares(self) -> list[Segment]:
        """Segments without content, kept for their owners; the smallest first."""
        return sorted((one for one in self if one.state == "spare"), key=lambda spare: spare.nbytes)

    def adopt(self, keep: Mapping[str, int]) -> set[str]:
        """Takes the sealed segments in `keep` (token -> bytes) that are whole, unlinks every other segment's file.

        What cannot be unlinked is left, with a warning: it costs memory, but no start.
        """
        for token, state, path in self._directory.segments():
            found = files.whole_nbytes(path)
            if state == "sealed" and token in keep and found is not None and found[1] >= keep[token]:
                self._segments[token] = Segment(token, "", found[1], found[0], path, "sealed", found[1])
            else:
                self._remove_left(path)
        return set(self._segments)

    def create(self, nbytes: int, owner: str, state: State, *, metadata: bool = False) -> Segment:
        """A new segment without pages: `make` or `grow` adds them; a cache stays sparse and holds nothing yet.

        Raises ArenaFull if the file system is full, Unavailable if it refuses otherwise.
        """
        token, sparse = mint_token(), state == "cache"
        path = files.path_of(self._directory.path, token, state)
        try:
            inode = files.create(path, sparse_nbytes=nbytes if sparse else 0)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._translated(error, nbytes) from error
        segment = Segment(token, owner, nbytes, inode, path, state, 0 if sparse else nbytes, metadata)
        self._segments[token] = segment
        return segment

    async def make(self, segment: Segment) -> None:
        """Makes all pages. If that fails (ArenaFull, Unavailable) or is cancelled, the segment is given up."""
        try:
            await self._pages.make(segment)
        except OSError as error:
            self.discard(segment)
            raise self._translated(error, segment.nbytes) from error
        except BaseException:
            self.discard(segment)
            raise

    def grow(self, spare: Segment) -> None:
        """Begins to make the pages of a spare, at low priority; if there is no memory for it, it just goes."""
        self._growing[spare.token] = asyncio.get_running_loop().create_task(self._grow(spare))

    def become(self, old: Segment, new: Segment, *, foreign: bool = False) -> bool:
        """Renames `old`, which is stale from here on. FileNotFoundError if somebody has removed the file.

        With `foreign`, it was another process's: False, and nothing done, if anybody still maps it.
        """
        new.path = files.path_of(self._directory.path, new.token, new.state)
        if not foreign:
            old.path.rename(new.path)
        elif not files.take_over(old.path, old.inode, new.path):
            return False
        del self._segments[old.token]
        self._segments[new.token] = new
        return True

    def discard(self, segment: Segment) -> bool:
        """Unlinks and frees in a thread; False if it had gone already. The bytes stay used until they are free."""
        if segment not in self:
            return False
        del self._segments[segment.token]
        if (growing := self._growing.pop(segment.token, None)) is not None:
            growing.cancel()
        self._leaving[segment.token] = segment
        self._pages.free(segment, lambda: self._gone(segment))
        return True

    def close(self) -> None:
        """Ends the threads (within one piece of work each) and unlinks everything but sealed segments."""
        self._pages.close()
        for segment in chain((one for one in self if one.state != "sealed"), self._leaving.values()):
            files.remove(segment.path)
        self._segments.clear()
        self._leaving.clear()

    def _remove_left(self, path: Path) -> None:
        try:
            files.remove(path)
        except OSError as error:
            _log.warning("%s is left alone: it cannot be removed (%s)", path, error.strerror)

    def _gone(self, segment: Segment) -> None:
        self._leaving.pop(segment.token, None)
        self._freed()

    async def _grow(self, spare: Segment) -> None:
        try:
            await self._pages.make(spare, gentle=True)
        except (OSError, Unavailable) as error:
            _log.warning("no spare for the next save: %s", error)
            self._growing.pop(spare.token, None)
            self.discard(spare)
        else:
            self._growing.pop(spare.token, None)

    def _translated(self, error: OSError, nbytes: int) -> CkptdError:
        where = self._directory.path
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            return Unavailable(f"cannot make a segment of {shown(nbytes)} in {where}: {error.strerror}")
        return ArenaFull(
            f"no room for {shown(nbytes)}: {where} is full ({error.strerror}; {shown(self._directory.free())} left, "
            f"{shown(self.used())} held by ckptd) although the budget is not: lower --memory, or give --shm-dir a place of its own"
        )
