"""What is kept for those that were told to come back, and for how long."""

from __future__ import annotations

from router.bookings import Bookings

SIZES = {"x": 10}


def test_who_comes_when_told_finds_what_was_kept_and_others_leave_it() -> None:
    bookings: Bookings[str] = Bookings()
    bookings.book(1, {"x": 4}, 10.0, SIZES)
    assert not bookings.is_due(1, 5.0)
    assert bookings.kept("x", 5.0) == [(10.0, 4.0)]
    assert bookings.is_due(1, 10.0)
    assert not bookings.is_due(2, 10.0)
    bookings.claim(1)
    assert bookings.kept("x", 10.0) == []
    assert len(bookings) == 0


def test_clients_that_never_come_soon_cost_the_others_nothing() -> None:
    bookings: Bookings[str] = Bookings()
    for call in range(10):
        bookings.book(call, {"x": 1}, 10.0, SIZES)
    assert bookings.num_kept("x") == 10
    assert bookings.kept("x", 13.5) == []
    for call in range(10, 20):
        bookings.book(call, {"x": 1}, 20.0, SIZES)
    assert bookings.num_kept("x") == 0
    assert bookings.kept("x", 14.0) == []


def test_equal_calls_are_told_apart_by_number() -> None:
    bookings: Bookings[str] = Bookings()
    for due_at in (10.0, 11.0, 12.0):
        bookings.book(7, {"x": 1}, due_at, SIZES)
    assert bookings.is_due(7, 10.0)
    bookings.claim(7)
    assert not bookings.is_due(7, 10.0)
    assert bookings.is_due(7, 11.0)


def test_what_is_noted_is_bounded() -> None:
    bookings: Bookings[str] = Bookings()
    for call in range(100_000):
        bookings.book(call, {"x": 1}, 10.0 + call, SIZES)
    assert len(bookings) <= 21 * SIZES["x"]
    assert bookings.num_kept("x") == SIZES["x"]
