"""What a policy keeps: the rules one by one, and what holds for all of them whatever the candidates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptd.errors import InvalidRequest
from ckptd.model import CheckpointId
from ckptd.retention import Candidate, Policy, Verdict, decide

HOUR_US = 3_600_000_000
NOW_US = 1_000 * HOUR_US


def ours(name: str, at_us: int, step: int | None = None, **marks: Any) -> Candidate:
    """A checkpoint of ours, accepted at that time; its step is the id's unless given."""
    id = CheckpointId.parse(name)
    return Candidate(id, f"{at_us:016x}{0:08x}", id.step if step is None else step, at_us, 10, **marks)


def stock(name: str, at_us: int, **marks: Any) -> Candidate:
    id = CheckpointId.parse(name)
    return Candidate(id, f"{at_us:016x}", id.step, at_us, 10, **marks)


def kept(candidates: list[Candidate], **rules: Any) -> set[str]:
    return {str(verdict.id) for verdict in decide(candidates, Policy(**rules), NOW_US) if verdict.keep}


def reasons(candidates: list[Candidate], **rules: Any) -> dict[str, str]:
    return {str(verdict.id): verdict.reason for verdict in decide(candidates, Policy(**rules), NOW_US)}


STEPS = [ours(f"step-{step}", step) for step in (0, 5, 10, 15, 20, 25)]


# --- the rules -----------------------------------------------------------------------------------------------------


def test_without_a_rule_all_stay() -> None:
    assert Policy().empty
    assert set(reasons(STEPS).values()) == {"kept: no rule was given"}


def test_the_last_ones_stay() -> None:
    assert kept(STEPS, keep_last=2) == {"step-20", "step-25"}
    assert kept(STEPS, keep_last=100) == {str(one.id) for one in STEPS}
    assert reasons(STEPS, keep_last=2)["step-25"] == "kept: one of the last 2"
    assert reasons(STEPS, keep_last=2)["step-15"] == "deleted: no rule keeps it"
    assert reasons(STEPS, keep_last=1)["step-25"] == "kept: the last one"


def test_every_so_many_steps_one_stays_and_the_newest_with_them() -> None:
    assert kept(STEPS, keep_every=10) == {"step-0", "step-10", "step-20", "step-25"}
    told = reasons(STEPS, keep_every=10)
    assert told["step-10"] == "kept: its step is a multiple of 10"
    assert told["step-25"] == "kept: the newest of its run"
    assert kept([ours("final", 1), ours("last", 2)], keep_every=1) == {"last"}, "what has no step is not kept by it"


def test_recent_ones_stay_to_the_microsecond_and_so_do_those_of_the_future() -> None:
    candidates = [ours(f"step-{number}", NOW_US + us) for number, us in enumerate((-HOUR_US - 1, -HOUR_US, 0, 5 * HOUR_US))]
    assert kept(candidates, keep_within_seconds=3600.0) == {"step-1", "step-2", "step-3"}
    assert reasons(candidates, keep_within_seconds=3600.0)["step-1"] == "kept: accepted within 1 h"
    assert reasons(candidates, keep_within_seconds=90.0)["step-2"] == "kept: accepted within 90 s"
    assert reasons(candidates, keep_within_seconds=172800.0)["step-0"] == "kept: accepted within 2 d"


def test_rules_are_united_and_a_verdict_names_each_that_keeps() -> None:
    assert kept(STEPS, keep_last=1, keep_every=15) == {"step-0", "step-15", "step-25"}
    both = reasons([ours("step-30", NOW_US)], keep_last=3, keep_every=15, keep_within_seconds=60.0)
    assert both == {"step-30": "kept: one of the last 3; its step is a multiple of 15; accepted within 1 min"}


def test_after_a_rollback_the_new_branch_wins() -> None:
    old = [ours(f"step-{step}", step) for step in (100, 200, 300)]
    new = [ours(f"step-{step}", 1000 + step) for step in (150, 160)]
    assert kept(old + new, keep_last=2) == {"step-150", "step-160"}
    assert kept(old + new, keep_every=100) == {"step-100", "step-200", "step-300", "step-160"}


def test_pinned_busy_and_damaged_ones_stay_and_take_no_place() -> None:
    candidates = [
        ours("step-1", 1),
        ours("step-2", 2, pinned=True),
        ours("step-3", 3, busy="a load reads it"),
        ours("step-4", 4),
        ours("step-5", 5, damaged="its manifest is missing"),
    ]
    told = reasons(candidates, keep_last=1)
    assert told == {
        "step-1": "deleted: no rule keeps it",
        "step-2": "kept: pinned",
        "step-3": "kept: a load reads it",
        "step-4": "kept: the last one",
        "step-5": "kept: damaged (its manifest is missing): look at it, then `ckptd delete step-5`",
    }


def test_a_damaged_one_is_not_the_newest_good_one() -> None:
    assert kept([ours("step-1", 1), ours("step-2", 2), ours("step-3", 3, damaged="x")], keep_every=10) == {"step-2", "step-3"}


def test_each_run_is_decided_by_itself() -> None:
    candidates = [ours("a/step-1", 1), ours("a/step-2", 2), ours("b/step-1", 10), ours("step-9", 20), ours("a", 30)]
    assert kept(candidates, keep_last=1) == {"a/step-2", "b/step-1", "a"}


def test_copies_of_one_attempt_count_as_one() -> None:
    candidates = [ours("step-1", 1), ours("step-2", 2), ours("copy-of-2", 2), ours("step-3", 3)]
    assert kept(candidates, keep_last=2) == {"step-2", "copy-of-2", "step-3"}
    newest = [ours("step-1", 1), ours("step-3", 3), ours("copy-of-3", 3)]
    assert kept(newest, keep_every=7) == {"step-3", "copy-of-3"}


def test_of_stock_ones_the_highest_steps_are_the_last() -> None:
    """Copying a directory gives its files the time of the copy; `latest` goes by the step, and so does what is kept."""
    candidates = [stock("step-10", 500), stock("step-20", 400), stock("step-30", 100), stock("step-40", 200)]
    assert kept(candidates, keep_last=1) == {"step-40"}
    assert kept(candidates, keep_last=2) == {"step-30", "step-40"}
    assert kept(candidates, keep_every=7) == {"step-40"}


def test_of_stock_ones_with_the_times_of_their_steps_only_the_last_stay() -> None:
    candidates = [stock(f"step-{step}", step) for step in (9, 10, 99, 10**40)]
    assert kept(candidates, keep_last=2) == {"step-99", f"step-{10**40}"}
    unknown = [replace(one, order=f"{0:016x}", accepted_us=0) for one in candidates]
    assert kept(unknown, keep_last=1) == {f"step-{10**40}"}


def test_ours_that_are_newer_than_all_stock_ones_are_the_last() -> None:
    candidates = [stock("step-300", 100), stock("step-200", 90), ours("step-100", 1000), ours("step-110", 1100)]
    assert kept(candidates, keep_last=2) == {"step-100", "step-110"}
    assert kept([*candidates, stock("step-400", 2000)], keep_last=1) == {"step-400"}


def test_verdicts_come_in_the_order_of_a_list_and_know_the_bytes() -> None:
    candidates = [ours(name, 1) for name in ("b/step-2", "step-10", "a/step-1", "step-9", "b/x")]
    verdicts = decide(candidates, Policy(keep_last=1), NOW_US)
    assert [str(verdict.id) for verdict in verdicts] == ["step-9", "step-10", "a/step-1", "b/x", "b/step-2"]
    assert all(verdict.stored_bytes == 10 for verdict in verdicts)
    assert decide([], Policy(keep_last=1), NOW_US) == []


@pytest.mark.parametrize(
    "rules",
    [{"keep_last": 0}, {"keep_last": -1}, {"keep_every": 0}, {"keep_within_seconds": 0.0}]
    + [{"keep_within_seconds": value} for value in (-1.0, math.inf, math.nan)],
    ids=str,
)
def test_a_rule_that_could_keep_nothing_is_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Policy(**rules)


# --- whatever the candidates -----------------------------------------------------------------------------------------

names = st.from_regex(r"(a/|b/|)(x|y[0-7]|z[0-7])", fullmatch=True)
marks = st.sampled_from([{}] * 8 + [{"pinned": True}, {"damaged": "why"}, {"busy": "why"}, {"pinned": True, "damaged": "why"}])
times = st.integers(1, 12).map(lambda hours: hours * HOUR_US)
policies = st.builds(
    Policy,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 6),
    keep_within_seconds=st.none() | st.integers(1, 13).map(lambda hours: hours * 3600.0),
)


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    found = {}
    for _ in range(draw(st.integers(0, 10))):
        of = draw(st.sampled_from([ours, stock]))
        name = draw(names)
        found[name] = of(name, draw(times), **draw(marks))
    return list(found.values())


def keeps(candidates: list[Candidate], policy: Policy, now_us: int = 13 * HOUR_US) -> dict[str, Verdict]:
    return {str(verdict.id): verdict for verdict in decide(candidates, policy, now_us)}


def kept_ids(candidates: list[Candidate], policy: Policy) -> set[str]:
    return {id for id, verdict in keeps(candidates, policy).items() if verdict.keep}


def step_of(candidate: Candidate) -> int:
    return -1 if candidate.step is None else candidate.step


def latest(run: list[Candidate]) -> Candidate:
    """What `Ledger.latest` gives."""
    ours = [one for one in run if len(one.order) == 24]
    stock = [one for one in run if len(one.order) == 16]
    best = [max(ours, key=lambda one: (one.order, step_of(one)), default=None)]
    best += [max(stock, key=lambda one: (step_of(one), one.order), default=None)]
    return max((one for one in best if one is not None), key=lambda one: one.accepted_us)


@settings(max_examples=100, deadline=None)
@given(candidate_lists(), policies)
def test_the_newest_good_one_of_a_run_stays_whatever_the_policy(candidates: list[Candidate], policy: Policy) -> None:
    stay = kept_ids(candidates, policy)
    for run in {one.id.run for one in candidates}:
        good = [one for one in candidates if one.id.run == run and not one.damaged]
        if good:
            assert str(latest(good).id) in stay


@settings(max_examples=100, deadline=None)
@given(candidate_lists(), policies)
def test_what_is_pinned_busy_or_damaged_stays_and_changes_nothing_for_the_others(candidates: list[Candidate], policy: Policy) -> None:
    stay = kept_ids(candidates, policy)
    excused = [one for one in candidates if one.pinned or one.busy or one.damaged]
    assert {str(one.id) for one in excused} <= stay
    assume(not policy.empty)
    others = [one for one in candidates if one not in excused]
    # But for the newest of a run, which may then be another one, nothing of the rest changes.
    good = [[one for one in candidates if one.id.run == run and not one.damaged] for run in {one.id.run for one in candidates}]
    newest = {str(latest(run).id) for run in good if run}
    assert stay - {str(one.id) for one in excused} <= kept_ids(others, policy) | newest
    if policy.keep_last is not None:
        for run in {one.id.run for one in others}:
            assert len([one for one in others if one.id.run == run and str(one.id) in stay]) >= min(
                policy.keep_last, len({one.order for one in others if one.id.run == run})
            )


@settings(max_examples=100, deadline=None)
@given(candidate_lists(), policies, st.randoms(use_true_random=False))
def test_the_order_of_candidates_and_other_runs_do_not_matter(candidates: list[Candidate], policy: Policy, random: Any) -> None:
    verdicts = decide(candidates, policy, 13 * HOUR_US)
    shuffled = list(candidates)
    random.shuffle(shuffled)
    assert decide(shuffled, policy, 13 * HOUR_US) == verdicts
    alone = [decide([one for one in candidates if one.id.run == run], policy, 13 * HOUR_US) for run in ("", "a", "b")]
    assert [verdict for run in alone for verdict in run] == verdicts
    assert [verdict.id for verdict in verdicts] == sorted(
        (one.id for one in candidates), key=lambda id: (id.run, -1 if id.step is None else id.step, id.name)
    )


@settings(max_examples=150, deadline=None)
@given(candidate_lists(), policies, st.data())
def test_a_looser_policy_keeps_at_least_as_much(candidates: list[Candidate], policy: Policy, data: st.DataObject) -> None:
    assume(not policy.empty)
    looser = Policy(
        keep_last=policy.keep_last + data.draw(st.integers(0, 3)) if policy.keep_last else data.draw(st.none() | st.integers(1, 4)),
        keep_every=data.draw(st.sampled_from([k for k in range(1, policy.keep_every + 1) if policy.keep_every % k == 0]))
        if policy.keep_every
        else data.draw(st.none() | st.integers(1, 4)),
        keep_within_seconds=policy.keep_within_seconds * data.draw(st.integers(1, 3))
        if policy.keep_within_seconds
        else data.draw(st.none() | st.just(3600.0)),
    )
    assert kept_ids(candidates, policy) <= kept_ids(candidates, looser) <= kept_ids(candidates, Policy())
    assert kept_ids(candidates, Policy()) == {str(one.id) for one in candidates}


@settings(max_examples=100, deadline=None)
@given(candidate_lists(), policies)
def test_deciding_again_on_what_was_kept_deletes_nothing_more(candidates: list[Candidate], policy: Policy) -> None:
    """Two prunes at the same time, or one after another, end at the same.

    Not so in a run that both DCP and ckptd wrote: of stock ones the highest step stands for the rest, so that without it
    another one is `latest`.
    """
    mixed = {one.id.run for one in candidates if len(one.order) == 16} & {one.id.run for one in candidates if len(one.order) == 24}
    candidates = [one for one in candidates if one.id.run not in mixed]
    stay = [one for one in candidates if str(one.id) in kept_ids(candidates, policy)]
    assert kept_ids(stay, policy) == {str(one.id) for one in stay}


@settings(max_examples=100, deadline=None)
@given(candidate_lists(), policies)
def test_what_is_deleted_is_kept_by_no_rule(candidates: list[Candidate], policy: Policy) -> None:
    """Against a reading of the rules that is as plain as can be."""

    def place(one: Candidate) -> str:
        return str(one.id) if len(one.order) == 16 else one.order

    verdicts = keeps(candidates, policy)
    for one in candidates:
        verdict = verdicts[str(one.id)]
        assert verdict.reason.startswith("kept: " if verdict.keep else "deleted: ")
        if verdict.keep:
            continue
        run = [other for other in candidates if other.id.run == one.id.run]
        counted = [other for other in run if not (other.pinned or other.busy or other.damaged)]
        newer = set()
        while (newest := latest(counted)) != one:
            newer.add(place(newest))
            counted.remove(newest)
        assert policy.keep_last is None or len(newer - {place(one)}) >= policy.keep_last
        assert policy.keep_every is None or one.step is None or one.step % policy.keep_every != 0
        assert policy.keep_within_seconds is None or 13 * HOUR_US - one.accepted_us > policy.keep_within_seconds * 1e6
