"""The clock that stands still while the process does."""

from __future__ import annotations

import itertools

import pytest

from ckptd import awake
from ckptd.awake import STEP_SECONDS, Awake


class Machine:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(awake, "time", machine)
    return machine


def test_it_goes_like_any_other_as_long_as_it_ticks(machine: Machine) -> None:
    clock = Awake()
    before = clock.now()
    for _ in range(60):
        machine.seconds += 1.0
        clock.tick()
    machine.seconds += 0.5
    assert clock.now() - before == pytest.approx(60.5)


@pytest.mark.parametrize("asked_first", [False, True])
def test_what_passes_without_a_tick_does_not_count(machine: Machine, asked_first: bool) -> None:
    clock = Awake()
    before = clock.now()
    machine.seconds += 3600.0
    if asked_first:
        assert clock.now() - before == pytest.approx(STEP_SECONDS)
    clock.tick()
    assert clock.now() - before == pytest.approx(STEP_SECONDS)
    machine.seconds += 1.0
    assert clock.now() - before == pytest.approx(STEP_SECONDS + 1.0)


def test_it_never_goes_back(machine: Machine) -> None:
    clock = Awake()
    seen = []
    for step, ticks in itertools.product([0.1, 1.0, 2.9, 3.1, 60.0], [True, False, True]):
        machine.seconds += step
        seen.append(clock.now())
        if ticks:
            clock.tick()
            seen.append(clock.now())
    assert all(later - earlier > -1e-9 for earlier, later in itertools.pairwise(seen))
