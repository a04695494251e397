"""Setbacks: what a failure says about the next placement."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequest, ReservationRefused, ServingError, TransferCorrupt, WorkerLost
from core.ids import Epoch, Role, WorkerId, WorkerRef
from router.config import RouterConfig
from router.setbacks import Setbacks

PREFILL = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(1), "p:1")
DECODE = WorkerRef(WorkerId("d"), Role.DECODE, Epoch(2), "d:1")


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def setbacks(clock: HandClock) -> Setbacks:
    return Setbacks(RouterConfig(max_failures=3, max_backoff_s=1.0), clock)


@pytest.mark.parametrize(
    "error",
    [WorkerLost("no way to decode", worker_id="d"), TransferCorrupt("a bad frame", worker_id="d")],
    ids=lambda error: error.code,
)
def test_decode_that_prefill_cannot_send_to_may_still_read_the_prompt_itself(
    setbacks: Setbacks, clock: HandClock, error: ServingError
) -> None:
    setbacks.note(error, PREFILL, DECODE)
    clock.time += 1.1
    assert not setbacks.is_avoided(DECODE)
    assert not setbacks.is_handoff_target(DECODE)


def test_a_lost_prefill_worker_is_avoided_and_decode_is_not_blamed(
    setbacks: Setbacks, clock: HandClock
) -> None:
    setbacks.note(WorkerLost("it died", worker_id="p"), PREFILL, DECODE)
    assert setbacks.is_avoided(PREFILL)
    assert not setbacks.is_avoided(DECODE)
    assert setbacks.is_handoff_target(DECODE)
    assert setbacks.next_chance_at() == clock.now() + 1.0


def test_refusals_are_no_failures_but_two_of_them_end_the_offers(
    setbacks: Setbacks, clock: HandClock
) -> None:
    for _ in range(2):
        assert setbacks.is_handoff_target(DECODE)
        setbacks.note(ReservationRefused("no room", worker_id="d"), PREFILL, DECODE)
        clock.time += 1.1
    assert setbacks.num_failures == 0
    assert not setbacks.is_handoff_target(DECODE)


def test_after_enough_failures_the_last_error_is_the_answer(setbacks: Setbacks) -> None:
    for _ in range(3):
        setbacks.note(WorkerLost("it died", worker_id="p"), PREFILL, DECODE)
    with pytest.raises(WorkerLost):
        setbacks.note(WorkerLost("it died", worker_id="p"), PREFILL, DECODE)


def test_the_clients_fault_is_never_tried_again(setbacks: Setbacks) -> None:
    with pytest.raises(InvalidRequest):
        setbacks.note(InvalidRequest("bad", param="n"), DECODE)
