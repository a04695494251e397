"""Goodput and percentiles, against counting by hand."""

from __future__ import annotations

import random

import pytest

from cluster.loadtest.goodput import Percentiles, Slo, percentiles, summarize
from cluster.loadtest.record import Outcome, RequestRecord
from tests.unit.cluster.loadtest.records import record

SLO = Slo(ttft_s=1.0, itl_s=0.2)


def made_up(chance: random.Random, index: int) -> RequestRecord:
    due = chance.uniform(0.0, 10.0)
    outcome = chance.choices(list(Outcome), [8, 1, 1, 1])[0]
    times = [due + chance.uniform(0.1, 1.5)]
    for _ in range(chance.randrange(6)):
        times.append(times[-1] + chance.uniform(0.01, 0.4))
    count = len(times) * chance.choice((1, 1, 3))
    return record(due, *times, index=index, outcome=outcome, num_output_tokens=count, num_prompt_tokens=5)


def is_good(one: RequestRecord, ttft_s: float, itl_s: float) -> bool:
    """Spelled out, with none of the record's properties."""
    if one.outcome is not Outcome.COMPLETED or one.event_times_s[0] - one.due_s > ttft_s:
        return False
    num_events = len(one.event_times_s)
    if num_events == 1:
        return True
    per_event = one.num_output_tokens / num_events
    return (one.event_times_s[-1] - one.event_times_s[0]) / (one.num_output_tokens - per_event) <= itl_s


@pytest.mark.parametrize("seed", range(20))
def test_goodput_is_what_counting_gives(seed: int) -> None:
    chance = random.Random(seed)
    records = [made_up(chance, index) for index in range(60)]
    found = summarize(records, SLO, window_s=10.0)
    good = [one for one in records if is_good(one, 1.0, 0.2)]
    completed = [one for one in records if one.outcome is Outcome.COMPLETED]
    assert 0 < len(good) < len(completed) < len(records)
    assert found.goodput_rps == pytest.approx(len(good) / 10.0)
    assert found.attainment == pytest.approx(len(good) / 60)
    assert found.is_slo_met == (len(good) >= 54)
    assert found.num_completed == len(completed)
    assert found.num_completed + found.num_refused + found.num_errors + found.num_unfinished == 60
    waits = sorted(one.event_times_s[0] - one.due_s for one in completed)
    assert found.ttft is not None
    assert found.ttft.num_values == len(waits)
    assert found.ttft.largest == pytest.approx(waits[-1])
    span = max(one.ended_s for one in records) - min(one.due_s for one in records)
    assert found.output_tokens_per_s == pytest.approx(sum(one.num_output_tokens for one in completed) / span)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == Percentiles(1, 3.0, 3.0, 3.0, 3.0, 3.0)
    found = percentiles(float(value) for value in range(101))
    assert found == Percentiles(101, 50.0, 90.0, 95.0, 99.0, 100.0)
    between = percentiles([0.0, 10.0])
    assert between is not None
    assert (between.p50, between.p90) == (5.0, 9.0)


def test_failures_and_refusals_are_in_no_latency_and_against_attainment() -> None:
    fast = [record(0.0, 0.1, 0.2) for _ in range(8)]
    bad = [record(0.0, ended_s=0.0, outcome=kind) for kind in (Outcome.REFUSED, Outcome.ERROR)]
    found = summarize([*fast, *bad], SLO, 1.0)
    assert (found.num_refused, found.num_errors, found.attainment) == (1, 1, 0.8)
    assert found.ttft == Percentiles(8, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert not found.is_slo_met
    assert (found.ttft_attainment, found.itl_attainment) == (0.8, 0.8)


def test_each_promise_can_be_the_one_that_is_broken() -> None:
    late, slow, stalled = record(0.0, 1.5, 1.6), record(0.0, 0.5, 1.0), record(0.0, 0.1, 0.2, 0.3, 0.7)
    assert [SLO.is_met_by(one) for one in (late, slow, stalled)] == [False, False, True]
    strict = Slo(ttft_s=1.0, itl_s=0.2, longest_pause_s=0.3)
    assert not strict.is_met_by(stalled)
    assert all(Slo().is_met_by(one) for one in (late, slow, stalled))
    found = summarize([late, slow], SLO, 1.0)
    assert (found.ttft_attainment, found.itl_attainment, found.attainment) == (0.5, 0.5, 0.0)


def test_an_answer_without_tokens_is_judged_by_its_end() -> None:
    assert SLO.is_met_by(record(0.0, ended_s=0.9))
    assert not SLO.is_met_by(record(0.0, ended_s=1.1))


def test_short_answers_and_other_prompts_are_counted() -> None:
    wanted = {"planned_prompt_tokens": 7, "planned_output_tokens": 2}
    right = record(0.0, 0.1, 0.2, num_prompt_tokens=7, **wanted)
    short = record(0.0, 0.1, num_prompt_tokens=7, **wanted)
    other = record(0.0, 0.1, 0.2, num_prompt_tokens=8, **wanted)
    found = summarize([right, short, other], SLO, 1.0)
    assert (found.num_short, found.num_wrong_prompts) == (1, 1)


def test_no_requests_meet_no_promise() -> None:
    found = summarize([], SLO, 1.0)
    assert (found.num_requests, found.attainment, found.is_slo_met, found.ttft) == (0, 0.0, False, None)


@pytest.mark.parametrize(
    "wrong", [{"attainment": 0.0}, {"attainment": 1.1}, {"ttft_s": 0.0}, {"itl_s": -1.0}]
)
def test_an_impossible_promise_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Slo(**wrong)
    with pytest.raises(ValueError, match="window_s"):
        summarize([], SLO, 0.0)
