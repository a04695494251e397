from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cluster.stopper import Stopper, StopRequested


@pytest.fixture
def stopper() -> Iterator[Stopper]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stopper = Stopper()
    stopper.install()
    yield stopper
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_breaks_into_what_is_going_on(stopper: Stopper, number: signal.Signals) -> None:
    with pytest.raises(StopRequested), stopper.raising():
        signal.raise_signal(number)
    assert stopper.requested.is_set()


def test_otherwise_a_signal_is_only_noted(stopper: Stopper) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert stopper.requested.is_set()


def test_a_signal_noted_before_is_not_forgotten(stopper: Stopper) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(StopRequested), stopper.raising():
        pytest.fail("went on after the signal")


def test_a_second_signal_does_not_break_into_the_cleanup_after_the_first(stopper: Stopper) -> None:
    cleaned_up = False
    try:
        with stopper.raising():
            signal.raise_signal(signal.SIGINT)
    except StopRequested:
        signal.raise_signal(signal.SIGINT)
        cleaned_up = True
    assert cleaned_up
