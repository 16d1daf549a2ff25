"""How many bytes of memory there are, and what would have to go so that a request fits.

Arithmetic only: nothing here waits, evicts or touches a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptd.errors import ArenaFull, InvalidRequest
from ckptd.segment import rounded, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from ckptd.segment import Segment

MiB: Final = 1024 * 1024
#: A daemon with less memory is of no use.
LEAST_NBYTES: Final = 16 * MiB


@dataclass(frozen=True, slots=True)
class Budget:
    """All sizes in bytes."""

    nbytes: int

    @classmethod
    def checked(cls, nbytes: int | None, capacity: int, where: Path) -> Budget:
        """Half of the file system's capacity for None. Raises InvalidRequest if it makes no sense there."""
        if nbytes is None:
            nbytes = capacity // 2
        if nbytes > capacity:
            raise InvalidRequest(
                f"--memory {shown(nbytes)} is more than the {shown(capacity)} that {where} can hold: give less, or enlarge the tmpfs "
                "(mount -o remount,size=…; for a container --shm-size)"
            )
        if nbytes < LEAST_NBYTES:
            raise InvalidRequest(f"{shown(nbytes)} in {where} is too little memory: --memory must be at least {shown(LEAST_NBYTES)}")
        return cls(nbytes)

    @property
    def kept_back(self) -> int:
        """What shards leave to metadata segments, which therefore need not wait behind them."""
        return rounded(max(self.nbytes // 100, min(8 * MiB, self.nbytes // 10)))

    def refuse_what_never_fits(self, nbytes: int, *, metadata: bool) -> None:
        """Raises ArenaFull if a request does not fit into an empty arena."""
        if nbytes > self.nbytes - (0 if metadata else self.kept_back):
            raise ArenaFull(
                f"{shown(nbytes)} can never fit into {shown(self.nbytes)} of memory, {shown(self.kept_back)} of it kept back "
                "for metadata: raise --memory, or spread the state over more nodes"
            )

    def shortage(self, nbytes: int, kept: Iterable[Segment], beside: Collection[str], ahead: int) -> tuple[str, str]:
        """Why there is no room for a request now, and what to do about it.

        `kept`: what cannot go for it. `beside`: tokens of what its save needs at the same time. `ahead`: requests that came earlier.
        """
        segments = list(kept)
        together = nbytes + sum(segment.charged for segment in segments if segment.token in beside)
        if together > nbytes and together > self.nbytes - self.kept_back:
            why = (
                f"no room for {shown(nbytes)}: the shards of this save on this node need {shown(together)} or more together, which can "
                f"never fit into {shown(self.nbytes)} of memory, {shown(self.kept_back)} of it kept back for metadata"
            )
            return why, "raise --memory, or spread the state over more nodes"
        figures = [f"no room for {shown(nbytes)}: {shown(self.nbytes)} budget"]
        if together > nbytes:
            figures.append(f"{shown(together - nbytes)} held by other shards of this save")
        for state, what in (("sealed", "held by checkpoints that are not durable yet"), ("open", "being written"), ("cache", "being read")):
            if total := sum(one.charged for one in segments if one.state == state and one.token not in beside):
                figures.append(f"{shown(total)} {what}")
        if ahead:
            figures.append(f"{ahead} earlier requests waiting")
        return ", ".join(figures), "raise --memory, save less often, or wait"

    def room(self, used: int, used_for_metadata: int, *, metadata: bool) -> int:
        """What is left for a request of this kind; negative if too much is used."""
        return self.nbytes - used - (0 if metadata else max(0, self.kept_back - used_for_metadata))

    def least(self, held: Iterable[Segment], able: Iterable[Segment], nbytes: int, *, metadata: bool) -> list[Segment]:
        """The first few of `able` that have to go out of `held` so that `nbytes` fit; none if that would not do, or need not."""
        segments = list(held)
        used = sum(segment.charged for segment in segments)
        pickles = sum(segment.charged for segment in segments if segment.metadata)
        room = self.room(used, pickles, metadata=metadata)
        going: list[Segment] = []
        for segment in able:
            if room >= nbytes:
                break
            left = used - segment.charged, pickles - (segment.charged if segment.metadata else 0)
            # A shard gains nothing from metadata segments that lie in what is kept back for them.
            if self.room(*left, metadata=metadata) > room:
                going.append(segment)
                used, pickles = left
                room = self.room(used, pickles, metadata=metadata)
        return going if room >= nbytes else []
