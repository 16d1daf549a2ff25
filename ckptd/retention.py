"""Which checkpoints a policy keeps, and why: pure, no store, no clock.

Promises: each run is decided by itself; a rule only ever keeps, so what several rules say is united; whatever the
rules, the newest good checkpoint of a run stays, and so does what is pinned, in use or damaged; without a rule
all stay. A looser policy keeps at least what a stricter one does. The order in which candidates are given does
not matter. Every verdict says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ckptd.errors import InvalidRequest
from ckptd.model import CheckpointId

#: Digits of a time in microseconds; an attempt's token begins with them and is longer.
_TIME_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of each run; None: no such rule. Raises InvalidRequest for a rule that could keep nothing."""

    keep_last: int | None = None
    """So many of those that were accepted last."""
    keep_every: int | None = None
    """Those whose step is a multiple of this."""
    keep_within_seconds: float | None = None
    """Those accepted so recently."""

    def __post_init__(self) -> None:
        for rule, value in (("keep-last", self.keep_last), ("keep-every", self.keep_every)):
            if value is not None and value < 1:
                raise InvalidRequest(f"{rule} must be at least 1, not {value}: leave the rule out if it is not wanted")
        if self.keep_within_seconds is not None and not 0 < self.keep_within_seconds < math.inf:
            raise InvalidRequest(f"keep-within must be more than nothing, not {self.keep_within_seconds} seconds")

    @property
    def empty(self) -> bool:
        """Whether there is no rule: then nothing is deleted."""
        return self.keep_last is None and self.keep_every is None and self.keep_within_seconds is None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a policy is to decide on."""

    id: CheckpointId
    order: str
    """Sorts by time of acceptance: the attempt's token; of a stock checkpoint the 16 hex digits of its microseconds."""
    step: int | None
    accepted_us: int
    """Microseconds since the epoch."""
    stored_bytes: int
    pinned: bool = False
    damaged: str = ""
    """What is wrong with it; empty if nothing is."""
    busy: str = ""
    """Why it must stay now; empty if nothing says so."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint stays, and which rule says so."""

    id: CheckpointId
    keep: bool
    reason: str
    stored_bytes: int


def decide(candidates: Iterable[Candidate], policy: Policy, now_us: int) -> list[Verdict]:
    """A verdict on each candidate, in ascending order of run, step (those without first), name.

    "The last" are those accepted last, whatever their step: after a rollback the new branch wins. Copies of one attempt
    count as one. What is pinned, busy or damaged stays and is not counted.
    """
    verdicts = []
    for _, run in groupby(sorted(candidates, key=_place), key=lambda candidate: candidate.id.run):
        verdicts += _decide_run([*run], policy, now_us)
    return verdicts


def _decide_run(run: Sequence[Candidate], policy: Policy, now_us: int) -> list[Verdict]:
    newest = _last([candidate for candidate in run if not candidate.damaged], 1)
    counted = [candidate for candidate in run if not (candidate.pinned or candidate.busy or candidate.damaged)]
    last = _last(counted, policy.keep_last) if policy.keep_last is not None else set()
    verdicts = []
    for candidate in run:
        reasons = _excused(candidate, policy) or _kept_by(candidate, policy, now_us, is_last=candidate.id in last)
        if not reasons and candidate.id in newest:
            reasons = ["the newest of its run"]
        reason = f"kept: {'; '.join(reasons)}" if reasons else "deleted: no rule keeps it"
        verdicts.append(Verdict(candidate.id, bool(reasons), reason, candidate.stored_bytes))
    return verdicts


def _excused(candidate: Candidate, policy: Policy) -> list[str]:
    """Why no rule is asked about it."""
    if policy.empty:
        return ["no rule was given"]
    found = ["pinned"] if candidate.pinned else []
    if candidate.damaged:
        found.append(f"damaged ({candidate.damaged}): look at it, then `ckptd delete {candidate.id}`")
    if candidate.busy:
        found.append(candidate.busy)
    return found


def _kept_by(candidate: Candidate, policy: Policy, now_us: int, *, is_last: bool) -> list[str]:
    found = []
    if is_last:
        found.append("the last one" if policy.keep_last == 1 else f"one of the last {policy.keep_last}")
    if policy.keep_every is not None and candidate.step is not None and candidate.step % policy.keep_every == 0:
        found.append(f"its step is a multiple of {policy.keep_every}")
    if policy.keep_within_seconds is not None and now_us - candidate.accepted_us <= policy.keep_within_seconds * 1e6:
        found.append(f"accepted within {_duration(policy.keep_within_seconds)}")
    return found


def _last(candidates: Sequence[Candidate], count: int) -> set[CheckpointId]:
    """The first `count` of what `latest` would find one after another; copies of one attempt are one.

    Stock ones do not tell when they were accepted: they stand in the order of their steps among themselves, and each
    takes its place among the others by its own time.
    """
    ours = sorted((one for one in candidates if not _is_stock(one)), key=lambda one: one.order)
    stock = sorted(filter(_is_stock, candidates), key=lambda one: (_step(one), one.order))
    found: dict[str, list[CheckpointId]] = {}
    while ours or stock:
        newest = (ours if not stock or (ours and ours[-1].order > stock[-1].order) else stock).pop()
        place = str(newest.id) if _is_stock(newest) else newest.order
        if place not in found and len(found) == count:
            break
        found.setdefault(place, []).append(newest.id)
    return {id for ids in found.values() for id in ids}


def _is_stock(candidate: Candidate) -> bool:
    return len(candidate.order) == _TIME_DIGITS


def _place(candidate: Candidate) -> tuple[str, int, str]:
    return (candidate.id.run, _step(candidate), candidate.id.name)


def _step(candidate: Candidate) -> int:
    return -1 if candidate.step is None else candidate.step


def _duration(seconds: float) -> str:
    for unit, nseconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= nseconds and seconds % nseconds == 0:
            return f"{seconds / nseconds:g} {unit}"
    return f"{seconds:g} s"
