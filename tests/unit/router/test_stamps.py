"""Stamps: the parts add up to the time to first token, whatever happened on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.jobs import Reading
from core.telemetry import StallCause, TTFTPart
from router.stamps import Stamps

SECONDS = st.floats(0.0, 1e3, allow_nan=False)


@given(
    st.tuples(SECONDS, SECONDS, SECONDS),
    st.lists(st.tuples(SECONDS, SECONDS), max_size=4),
    SECONDS,
    SECONDS,
    SECONDS,
)
def test_the_parts_add_up_to_the_time_to_first_token(
    begin: tuple[float, float, float],
    failures: list[tuple[float, float]],
    call_s: float,
    queue_s: float,
    compute_s: float,
) -> None:
    arrived_at, tokenize_s, admit_s = begin
    now = arrived_at + tokenize_s + admit_s
    stamps = Stamps(arrived_at, tokenize_s)
    stamps.admitted(now)
    for place_s, lost_s in failures:
        now += place_s
        stamps.placed(now)
        now += lost_s
        stamps.lost([0], now)
    stamps.placed(now)
    now += call_s
    stamps.token(0, Reading(queue_s, compute_s), now)
    assert stamps.ttft_s == now - arrived_at
    assert sum(stamps.parts.values()) == pytest.approx(now - arrived_at, rel=1e-9, abs=1e-9)
    assert all(seconds >= 0.0 for seconds in stamps.parts.values())
    assert stamps.num_attempts == len(failures) + 1


def test_each_part_is_what_it_is_called() -> None:
    stamps = Stamps(10.0, tokenize_s=1.0)
    stamps.admitted(13.0)
    stamps.placed(13.5)
    stamps.token(0, Reading(queue_s=4.0, compute_s=8.0), 26.0)
    assert stamps.parts == {
        TTFTPart.TOKENIZE: 1.0,
        TTFTPart.ADMIT: 2.0,
        TTFTPart.PLACE: 0.5,
        TTFTPart.QUEUE: 4.0,
        TTFTPart.PREFILL: 8.0,
        TTFTPart.FIRST_TOKEN: 0.5,
    }


def _begun() -> Stamps:
    stamps = Stamps(0.0, 0.0)
    stamps.admitted(0.0)
    stamps.placed(0.0)
    stamps.token(0, Reading(), 1.0)
    return stamps


def test_a_wait_for_the_kv_is_no_stall() -> None:
    stamps = _begun()
    assert stamps.token(0, Reading(wait_s=0.25), 1.5) == 0.5
    assert stamps.transfer_wait_s == 0.25
    assert stamps.stalls == []


@pytest.mark.parametrize("cause", [StallCause.PREEMPT, StallCause.LOCAL_PREFILL])
def test_a_pause_that_the_worker_explains_has_its_cause_and_its_length(cause: StallCause) -> None:
    stamps = _begun()
    stamps.token(0, None, 2.0)
    stamps.token(0, Reading(cause=cause), 5.0)
    stamps.token(0, None, 5.5)
    assert [(stall.cause, stall.seconds, stall.ended_at) for stall in stamps.stalls] == [(cause, 3.0, 5.0)]


def test_a_pause_because_the_worker_was_lost_is_a_resume_of_the_samples_that_had_begun() -> None:
    stamps = _begun()
    stamps.lost([0, 1], 2.0)
    stamps.placed(2.5)
    stamps.token(1, Reading(queue_s=1.0), 3.0)  # had nothing yet: nobody saw it pause
    stamps.token(0, Reading(cause=StallCause.PREEMPT), 4.0)
    stamps.token(0, None, 4.5)
    assert [(stall.cause, stall.seconds) for stall in stamps.stalls] == [(StallCause.RESUME, 3.0)]
    assert stamps.parts.get(TTFTPart.RETRY) is None
    assert stamps.num_attempts == 2
