"""A bucket's tokens come back a fixed time after they were taken, so no minute sees more than its size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.buckets import Bucket

TRIES = st.lists(
    st.tuples(st.integers(0, 80).map(lambda quarters: quarters / 4), st.integers(0, 40)),
    min_size=1,
    max_size=60,
)


@given(st.integers(1, 100), TRIES)
def test_no_minute_lets_more_through_than_the_bucket_holds(size: int, tries: list[tuple[float, int]]) -> None:
    bucket, now = Bucket(60.0, size), 0.0
    taken: list[tuple[float, int]] = []
    for pause, amount in tries:
        now += pause
        if bucket.try_take(amount, now) is not None:
            taken.append((now, amount))
        assert sum(amount for at, amount in taken if at > now - 60.0) <= size
        assert bucket.num_free(now) == size - sum(amount for at, amount in taken if at > now - 60.0)


@given(st.integers(1, 50), TRIES, st.integers(1, 50))
def test_after_the_predicted_wait_there_is_room_and_before_there_is_not(
    size: int, tries: list[tuple[float, int]], amount: int
) -> None:
    bucket, now = Bucket(60.0, size), 0.0
    for pause, cost in tries:
        now += pause
        bucket.try_take(cost, now)
    wait_s = bucket.wait_s(min(amount, size), now)
    if wait_s > 0.01:
        assert bucket.num_free(now + wait_s - 0.01) < min(amount, size)
    assert bucket.num_free(now + wait_s + 1e-6) >= min(amount, size)


def test_what_was_not_needed_comes_back_at_once_and_only_once() -> None:
    bucket = Bucket(60.0, 100)
    take = bucket.try_take(80, 0.0)
    assert take is not None
    assert bucket.give_back(take, 50) == 50
    assert bucket.num_free(1.0) == 70
    assert bucket.num_free(60.0) == 100
    assert bucket.give_back(take, 30) == 0
    assert bucket.num_free(60.0) == 100


def test_tokens_that_are_out_cannot_leave_the_bucket() -> None:
    bucket = Bucket(60.0, 10)
    assert bucket.try_take(7, 0.0) is not None
    assert bucket.remove(10, 1.0) == 3
    assert bucket.num_free(1.0) == 0
    assert bucket.num_free(60.0) == 7


def test_more_than_the_bucket_holds_takes_several_rounds() -> None:
    bucket = Bucket(60.0, 10)
    assert bucket.try_take(10, 0.0) is not None
    assert [bucket.wait_s(amount, 0.0) for amount in (0, 10, 11, 20, 21)] == [0.0, 60.0, 120.0, 120.0, 180.0]


def test_without_a_period_tokens_come_back_only_when_they_are_given_back() -> None:
    bucket = Bucket(math.inf, 10)
    take = bucket.try_take(10, 0.0)
    assert take is not None
    assert bucket.num_free(1e9) == 0
    assert bucket.wait_s(1, 0.0) == math.inf
    bucket.give_back(take, 10)
    assert bucket.num_free(0.0) == 10


@pytest.mark.parametrize("num_calls", [200_000])
def test_the_bucket_forgets_what_came_back(num_calls: int) -> None:
    bucket = Bucket(1.0, 10)
    for index in range(num_calls):
        bucket.try_take(1, index * 0.2)
    assert len(bucket._out) <= 10
