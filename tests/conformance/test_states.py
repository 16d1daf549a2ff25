"""One process: what goes in comes out as from stock DCP, whatever it is, however it is stored, whoever reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd_client import DaemonStorageReader
from conformance.outcomes import Outcome, assert_like, outcome_of
from conformance.states import CASES, Case, many_keys
from conformance.templates import LAYOUTS, TEMPLATES
from conformance.ways import QUICK_AND_SLOW, Ways, as_torch_save, load, stocks


def rows(cases: list[Case]) -> list[Any]:
    """The cases as parameters; torch's warnings about some of them are not of interest."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.filterwarnings(f"ignore:{re.escape(case.warns)}")] if case.warns else [])
        for case in cases
    ]


@pytest.mark.parametrize("codec", QUICK_AND_SLOW)
@pytest.mark.parametrize("case", rows(CASES))
def test_a_state_comes_back_as_from_stock(ways_of: Callable[[str], Ways], case: Case, codec: str) -> None:
    ways, checkpoint_id = ways_of(codec), f"{case.name}/step-1"
    if not case.better:
        outcome = ways.assert_conforms(checkpoint_id, case.make, case.template)
        assert outcome.error == case.error, outcome.said
        return
    assert not ways.save(checkpoint_id, case.make).error
    found = ways.loads(checkpoint_id, case.template)
    for way in ("ours from memory", "ours from the store"):
        assert_like(found[way], Outcome(case.make()), way)


@pytest.mark.parametrize("case", rows([case for case in CASES if case.name not in {"quantised", "other_scales", "sparse"}]))
def test_it_converts_to_a_file_of_torch_save_as_stocks_does(ways_of: Callable[[str], Ways], case: Case, tmp_path: Path) -> None:
    ways, checkpoint_id = ways_of("zstd:1"), f"converted/{case.name}-1"
    if ways.save_stock(checkpoint_id, case.make).error:
        return
    assert not ways.save(checkpoint_id, case.make).error
    stock = outcome_of(lambda: as_torch_save(ways.pair.store / stocks(checkpoint_id), tmp_path / "stock.pt"))
    assert_like(outcome_of(lambda: as_torch_save(ways.pair.store / checkpoint_id, tmp_path / "ours.pt")), stock, "converted")


@pytest.mark.parametrize("case", rows(TEMPLATES))
def test_a_target_that_is_not_what_was_saved_is_filled_or_refused_as_by_stock(ways_of: Callable[[str], Ways], case: Case) -> None:
    outcome = ways_of("zstd:1").assert_conforms(f"targets/{case.name}-1", case.make, case.template)
    assert outcome.error == case.error, outcome.said
    if not outcome.error:
        # And it can be saved again, unless its keys have become ambiguous: that is refused, as by stock.
        ways_of("zstd:1").assert_conforms(f"again/{case.name}-1", lambda: outcome.value, lambda: outcome.value)


@pytest.mark.parametrize("case", rows(LAYOUTS))
def test_tensors_are_filled_where_they_are(ways_of: Callable[[str], Ways], case: Case) -> None:
    ways, checkpoint_id = ways_of("zstd:1"), f"places/{case.name}-1"
    ways.save(checkpoint_id, case.make)
    template = case.template()
    target, pointer = template["x"], 0 if template["x"].layout is not torch.strided else template["x"].data_ptr()
    outcome = outcome_of(lambda: load(template, DaemonStorageReader(checkpoint_id, address=ways.pair.saving.address)))
    assert outcome.error == case.error, outcome.said
    assert outcome.error or (outcome.value["x"] is target and target.data_ptr() == pointer)


def test_a_target_whose_storage_was_freed_is_named_where_stock_would_crash(ways_of: Callable[[str], Ways]) -> None:
    ways, target = ways_of("zstd:1"), torch.zeros(300)
    ways.save("freed/step-1", lambda: {"x": torch.ones(300)})
    target.untyped_storage().resize_(8)
    outcome = outcome_of(lambda: load({"x": target}, DaemonStorageReader("freed/step-1", address=ways.pair.saving.address)))
    assert outcome.said.startswith("InvalidRequest: 'x' at (0,): the target's storage was freed or shortened"), outcome


def test_three_thousand_small_keys(ways_of: Callable[[str], Ways]) -> None:
    ways_of("zstd:1").assert_conforms("many/step-1", many_keys, lambda: many_keys(-1))
