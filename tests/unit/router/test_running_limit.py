"""What closes the limit on how many run at once, what does not, and how it opens again."""

from __future__ import annotations

import math

import pytest

from router.running_limit import RunningLimit


def answer(limit: RunningLimit, num: int, held_s: float, num_running: int, start: float = 0.0) -> float:
    """`num` answers of requests with 10 s, one every 0.25 s; returns when the last one ends."""
    for index in range(num):
        limit.answered(held_s, 10.0, held_s, num_running, start + 0.25 * index)
    return start + 0.25 * (num - 1)


def cut(limit: RunningLimit, num: int, given_s: float, now: float) -> None:
    for _ in range(num):
        limit.cut_off(given_s, given_s, 2.0, 60, now)


def test_nothing_is_limited_while_answers_come_in_time() -> None:
    limit = RunningLimit()
    answer(limit, 100, 3.0, 64)
    assert limit.num == math.inf


def test_many_that_are_cut_off_close_it_to_what_is_done_in_time() -> None:
    limit = RunningLimit()
    now = answer(limit, 40, 2.0, 60)  # four a second
    cut(limit, 20, 10.0, now)
    assert limit.num == pytest.approx(0.4 * 10.0 * 4.0, rel=0.25)


def test_a_few_long_answers_that_are_cut_off_close_nothing() -> None:
    limit = RunningLimit()
    now = 0.0
    for _ in range(20):
        now = answer(limit, 9, 2.0, 60, now + 0.25)
        cut(limit, 1, 10.0, now)
    assert limit.num == math.inf


def test_clients_in_a_hurry_close_nothing() -> None:
    limit = RunningLimit()
    now = answer(limit, 40, 2.0, 60)
    cut(limit, 100, 3.0, now)
    assert limit.num == math.inf


def test_one_wave_of_late_ones_closes_it_once_and_quick_answers_open_it() -> None:
    limit = RunningLimit()
    now = answer(limit, 40, 2.0, 60)
    cut(limit, 20, 10.0, now)
    closed = limit.num
    cut(limit, 20, 10.0, now + 5.0)
    assert limit.num == closed
    answer(limit, 20, 2.0, int(closed) // 2, now)  # those had room
    answer(limit, 20, 5.5, 60, now)  # no less time would be better
    assert limit.num == closed
    answer(limit, 20, 2.0, 60, now)
    assert limit.num == closed + 10.0


def test_answers_that_come_late_close_it_before_any_comes_too_late() -> None:
    limit = RunningLimit()
    now = answer(limit, 40, 2.0, 60)
    cut(limit, 20, 10.0, now)
    closed = limit.num
    answer(limit, 4, 7.0, int(closed), now)
    assert limit.num == closed - 2.0


def test_it_falls_to_no_less_than_a_quarter_at_once() -> None:
    limit = RunningLimit()
    answer(limit, 2, 2.0, 60)
    cut(limit, 20, 10.0, 30.0)  # no answer for long: what the workers do is not known
    assert limit.num == 15.0
