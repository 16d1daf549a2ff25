"""What the doctor tries on a store: every kind passes, and the witness finds nothing of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd import findings, trial
from ckptd.store import Store

if TYPE_CHECKING:
    from conftest import Bench


def test_every_store_keeps_the_promises_and_is_left_as_it_was(bench: Bench, store: Store) -> None:
    bench.witness.plant("step-1/.metadata", b"x")
    tried = trial.promises(store)
    assert (tried.torn, tried.stale) == ("", "")
    assert findings.clock(tried).verdict == "ok"
    assert min(trial.speed(store)) > 0
    assert bench.witness.keys() == {"step-1/.metadata": 1}
