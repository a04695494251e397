"""The verdict says whether it has passed, why, and what to be wary of."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.loadtest.goodput import Slo, summarize
from cluster.loadtest.record import Outcome, RequestRecord
from cluster.loadtest.report import SearchOutcome, Step, Verdict
from cluster.loadtest.verdict import duration, has_passed, judge, promise
from tests.unit.cluster.loadtest.records import record

SLO = Slo(ttft_s=1.0)
GOOD = [record(float(i), i + 0.5, i + 0.6) for i in range(40)]


def verdict(
    records: list[RequestRecord], search: SearchOutcome | None = None, is_cut_short: bool = False
) -> Verdict:
    summary = summarize(records, SLO, 40.0)
    step = Step("1/s", 1.0, None, has_passed(summary, 0.01), is_cut_short, None, summary)
    return judge(step, records, SLO, 0.01, search)


def test_a_kept_promise_passes_without_warnings() -> None:
    found = verdict(GOOD)
    assert found.has_passed
    assert found.headline.startswith("SLO kept: 100.0% of 40 requests")
    assert found.warnings == ()


def test_too_many_errors_fail_even_within_the_slo() -> None:
    found = verdict([*GOOD, record(0.0, outcome=Outcome.ERROR, detail="the answer was cut off")])
    assert not found.has_passed
    assert any("too many errors: 2.4%, 1.0% allowed" in reason for reason in found.reasons)
    assert any("1 × the answer was cut off" in reason for reason in found.reasons)


def test_refusals_are_no_errors_and_no_good_answers() -> None:
    refused = [record(0.0, outcome=Outcome.REFUSED) for _ in range(3)]
    assert verdict([*GOOD, *refused]).has_passed
    found = verdict([*GOOD, *refused * 10])
    assert not found.has_passed
    assert any("30 refused" in reason for reason in found.reasons)


def test_a_search_passes_if_any_rate_does() -> None:
    found = verdict(GOOD, SearchOutcome(3.5, 3.8, "within 10%"))
    assert found.has_passed
    assert found.headline == "Goodput 3.5 requests/s: the highest rate that keeps the SLO; 3.8 does not"
    assert not verdict(GOOD, SearchOutcome(None, 1.0, "the lowest fails")).has_passed


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sent_s": 0.3}, "the sender was late, by 300 ms"),
        ({"planned_output_tokens": 9}, "40 answers had fewer tokens"),
        ({"planned_prompt_tokens": 9, "num_prompt_tokens": 8}, "another number of tokens"),
        ({"has_usage": False}, "without a count of tokens"),
        ({"num_output_tokens": 8}, "4.0 tokens came in one event"),
    ],
)
def test_what_makes_numbers_less_than_they_seem_is_said(more: dict[str, Any], words: str) -> None:
    found = verdict([record(0.0, 0.5, 0.6, **more) for _ in range(40)])
    assert any(words in warning for warning in found.warnings)


def test_few_answers_and_partial_runs_are_said() -> None:
    found = verdict(GOOD[:5], is_cut_short=True)
    assert any("only 5 complete" in warning for warning in found.warnings)
    assert any("stopped once" in warning for warning in found.warnings)


def test_times_are_written_for_people() -> None:
    assert [duration(value) for value in (None, 12.34, 1.234, 0.1234, 0.0012)] == [
        *("–", "12.3 s", "1.23 s", "123 ms", "1.2 ms"),
    ]
    assert promise(SLO) == "90% of requests with TTFT ≤ 1.00 s"
    assert promise(Slo()) == "90% of requests with a complete answer"


def test_a_rate_that_was_not_offered_is_said() -> None:
    """As where conversations are longer than the window: their later turns were never due."""
    records = [record(i * 1.0, i + 0.5, i + 0.6) for i in range(40)]
    for rate, is_said in ((1.0, False), (1.4, False), (3.0, True)):
        summary = summarize(records, SLO, 40.0)
        step = Step(f"{rate}/s", rate, None, True, False, None, summary)
        warnings = judge(step, records, SLO, 0.01, None).warnings
        assert any(f"1 requests/s were due, not {rate:g}" in text for text in warnings) == is_said
