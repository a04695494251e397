"""What one request's moments say."""

from __future__ import annotations

import pytest

from cluster.loadtest.record import Outcome
from tests.unit.cluster.loadtest.records import record


def test_latency_counts_from_when_the_request_was_due() -> None:
    late = record(1.0, 3.0, 3.5, sent_s=2.5)
    assert (late.ttft_s, late.send_lag_s, late.e2e_s) == (2.0, 1.5, 2.5)


def test_single_tokens_have_their_pauses_as_inter_token_latencies() -> None:
    one = record(0.0, 1.0, 1.1, 1.4)
    assert one.itl_s == one.pauses_s == pytest.approx([0.1, 0.3])
    assert one.tpot_s == pytest.approx(0.2)
    assert one.longest_pause_s == pytest.approx(0.3)


def test_tokens_that_arrive_together_share_the_pause_before_them() -> None:
    """Forty tokens, one each 0.1 s, sent four at a time."""
    four = record(0.0, *(1.0 + 0.4 * number for number in range(10)), num_output_tokens=40)
    assert four.tokens_per_event == 4
    assert four.itl_s == pytest.approx([0.1] * 9)
    assert four.tpot_s == pytest.approx(0.1), "the first piece's tokens took no time after the first piece"
    assert four.longest_pause_s == pytest.approx(0.4), "a reader waits that long"


def test_first_token_and_the_rest_are_the_whole() -> None:
    whole = record(0.5, 1.0, 1.25, 1.75, 2.0, num_output_tokens=12)
    assert whole.ttft_s is not None
    assert whole.ttft_s + sum(whole.itl_s) * whole.tokens_per_event == pytest.approx(whole.e2e_s)


def test_an_answer_in_one_piece_has_no_inter_token_latency() -> None:
    one = record(0.0, 2.0, num_output_tokens=40)
    assert (one.ttft_s, one.tpot_s, one.itl_s, one.longest_pause_s) == (2.0, None, [], None)


def test_a_token_without_text_is_there_at_the_end_and_no_token_never() -> None:
    assert record(0.0, ended_s=2.0, num_output_tokens=1).ttft_s == 2.0
    assert record(0.0, ended_s=2.0, num_output_tokens=0).ttft_s is None
    assert record(0.0, ended_s=2.0, num_output_tokens=1, outcome=Outcome.ERROR).ttft_s is None


def test_more_pieces_than_tokens_are_not_less_than_a_token_each() -> None:
    assert record(0.0, 1.0, 2.0, 3.0, num_output_tokens=2).tpot_s == 1.0
