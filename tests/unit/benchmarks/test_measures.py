"""What a run's numbers mean."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measures import (
    NoOverlap,
    Summary,
    gaps_before,
    gaps_during,
    medians,
    ratio,
    shares,
    summarize_batch,
    summarize_interruption,
)
from cluster.loadtest.goodput import percentile
from tests.unit.benchmarks.streams import stream

VALUES = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=40)


@given(VALUES)
def test_the_fiftieth_percentile_is_the_median(values: list[float]) -> None:
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


@given(VALUES, st.floats(min_value=0, max_value=100))
def test_a_percentile_lies_within_the_values_and_grows(values: list[float], percent: float) -> None:
    found, less = percentile(values, percent), percentile(values, percent / 2)
    assert found is not None
    assert less is not None
    assert min(values) <= less <= found + 1e-9
    assert found <= max(values) + 1e-9


def test_percentiles_are_interpolated() -> None:
    assert percentile([10.0, 0.0], 99) == pytest.approx(9.9)
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


def test_a_ratio_without_a_base_is_missing() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(3.0, 0.0) is None
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None


def test_a_batch_counts_from_the_first_request_due_to_the_last_answer() -> None:
    found = summarize_batch([stream(0.0, [1.0, 1.5, 3.5]), stream(0.5, [1.0, 2.0])])
    assert found.tokens_per_s == pytest.approx(5 / 3.5)
    assert found.ttft_p50 == pytest.approx(0.75)
    assert found.itl_p50 == pytest.approx(1.0)
    assert found.longest_gap == pytest.approx(2.0)
    assert found.gap_ratio == pytest.approx(2.0)


def test_the_rate_counts_tokens_of_the_server_not_events() -> None:
    assert summarize_batch([stream(0.0, [1.0, 2.0], num_output_tokens=8)]).tokens_per_s == pytest.approx(4.0)


def test_a_burst_lowers_the_median_gap_but_not_the_time_per_token() -> None:
    found = summarize_batch([stream(0.0, [1.0, 4.0, 4.0, 4.0])])
    assert found.itl_p50 == 0.0
    assert found.tpot_p50 == pytest.approx(1.0)


def test_a_stream_of_one_event_has_no_gap() -> None:
    found = summarize_batch([stream(0.0, [1.0])])
    assert found.itl_p50 is None
    assert found.tpot_p50 is None
    assert found.longest_gap is None
    assert found.gap_ratio is None


def test_a_gap_that_reaches_into_the_interruption_counts_in_full() -> None:
    times = [0.0, 1.0, 5.0, 6.0, 9.0]
    assert gaps_before(times, 2.0) == [1.0]
    assert gaps_during(times, 2.0, 5.5) == [4.0, 1.0]


def test_an_interruption_compares_the_longest_gap_with_the_median_before() -> None:
    running = [
        stream(0.0, [1.0, 2.0, 3.0, 7.0, 8.0, 20.0]),
        stream(0.0, [1.0, 2.0, 3.0, 5.0, 8.0, 9.0]),
    ]
    found = summarize_interruption(running, stream(3.5, [6.0, 8.0]))
    assert found.itl_p50 == pytest.approx(1.0)
    assert found.longest_gap == pytest.approx(4.0), "the pause after the long answer is not its fault"
    assert found.gap_ratio == pytest.approx(4.0)
    assert found.ttft_p50 == pytest.approx(2.5)


def test_a_pause_after_the_long_prompts_first_token_counts_while_it_is_answered() -> None:
    running = [stream(0.0, [1.0, 2.0, 3.0, 4.0, 9.0, 10.0])]
    assert summarize_interruption(running, stream(2.5, [3.5, 9.5])).longest_gap == pytest.approx(5.0)


def test_streams_that_ended_before_the_long_prompt_was_read_show_nothing() -> None:
    running = [stream(0.0, [1.0, 2.0, 9.0]), stream(0.0, [1.0, 2.0, 3.0])]
    with pytest.raises(NoOverlap):
        summarize_interruption(running, stream(2.5, [5.0, 6.0]))


def test_medians_are_taken_measure_by_measure_over_the_runs_that_have_them() -> None:
    runs = [
        Summary(1.0, 30.0, None, 5.0, 1.0, None, 8.0),
        Summary(3.0, 10.0, None, 7.0, None, None),
        Summary(2.0, 20.0, 4.0, 6.0, 3.0, None),
    ]
    assert medians(runs) == Summary(2.0, 20.0, 4.0, 6.0, 2.0, None, 8.0)


def test_shares_are_of_what_was_counted_in_between() -> None:
    assert shares({"remote": 10.0}, {"remote": 13.0, "local": 1.0}) == {"local": 0.25, "remote": 0.75}
    assert shares({"remote": 10.0}, {"remote": 10.0}) == {}
    assert shares({}, {}) == {}
