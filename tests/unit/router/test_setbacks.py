"""What follows from a failure: whom to avoid, for how long, and when to give up."""

from __future__ import annotations

import math

import pytest

from core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkerAvailable,
    Overloaded,
    ReservationRefused,
    ServingError,
    StaleEpoch,
    StepFailed,
    TransferTimeout,
    WorkerDraining,
    WorkerLost,
)
from core.ids import Epoch, Role, WorkerId, WorkerRef
from router.config import RouterConfig
from router.setbacks import Setbacks
from tests.doubles import FakeClock

P = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(1), "")
D = WorkerRef(WorkerId("d"), Role.DECODE, Epoch(1), "")
CONFIG = RouterConfig(refusal_backoff_s=0.1, max_backoff_s=1.0, max_failures=3)


def _new() -> tuple[Setbacks, FakeClock]:
    clock = FakeClock()
    return Setbacks(CONFIG, clock), clock


@pytest.mark.parametrize(
    ("error", "avoided"),
    [
        (ReservationRefused("full"), D),
        (WorkerDraining("drains", worker_id="d"), D),
        (WorkerDraining("drains", worker_id="p"), P),
        (WorkerLost("gone", worker_id="d"), D),
        (WorkerLost("gone", worker_id="p"), P),
        (WorkerLost("gone"), P),
        (StaleEpoch("old", worker_id="p"), P),
        (StaleEpoch("old"), D),
        (StepFailed("boom"), P),
        (Overloaded("full"), P),
    ],
    ids=repr,
)
def test_the_worker_at_fault_is_avoided_for_a_while_and_the_other_is_not(
    error: ServingError, avoided: WorkerRef
) -> None:
    setbacks, clock = _new()
    setbacks.note(error, P, D)
    assert [setbacks.is_avoided(ref, clock.now()) for ref in (P, D)] == [avoided is P, avoided is D]
    assert setbacks.next_chance_at((P, D), clock.now()) <= clock.now() + CONFIG.max_backoff_s
    clock.advance(CONFIG.max_backoff_s)
    assert not setbacks.is_avoided(avoided, clock.now())
    assert setbacks.next_chance_at((P, D), clock.now()) == math.inf


def test_refusals_back_off_further_each_time_up_to_a_limit_and_are_not_failures() -> None:
    setbacks, clock = _new()
    waits = []
    for _ in range(8):
        setbacks.note(Overloaded("full"), D)
        waits.append(setbacks.next_chance_at((P, D), clock.now()) - clock.now())
        clock.advance(10)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0])
    for _ in range(CONFIG.max_failures):
        setbacks.note(WorkerLost("gone"), D)


def test_a_decode_worker_that_refuses_twice_is_sent_no_more_kv() -> None:
    setbacks, _ = _new()
    setbacks.note(ReservationRefused("full"), P, D)
    assert setbacks.is_handoff_target(D)
    setbacks.note(ReservationRefused("full"), P, D)
    assert not setbacks.is_handoff_target(D)


def test_a_failed_transfer_makes_decode_read_the_prompt_without_delay() -> None:
    setbacks, clock = _new()
    setbacks.note(TransferTimeout("slow"), P, D)
    assert not setbacks.is_handoff_target(D)
    assert not setbacks.is_avoided(D, clock.now())
    assert not setbacks.is_avoided(P, clock.now())


def test_another_incarnation_of_an_avoided_worker_is_welcome() -> None:
    setbacks, clock = _new()
    setbacks.note(WorkerLost("gone"), D)
    assert not setbacks.is_avoided(WorkerRef(D.worker_id, D.role, Epoch(2), ""), clock.now())


def test_a_prefill_worker_whose_pool_is_too_small_is_not_asked_again() -> None:
    setbacks, clock = _new()
    setbacks.note(ContextTooLong("pool"), P, D)
    clock.advance(1e6)
    assert setbacks.is_avoided(P, clock.now())


@pytest.mark.parametrize("target", [D, None])
def test_a_prompt_that_one_pool_cannot_hold_is_too_long_only_when_none_can(target: WorkerRef | None) -> None:
    setbacks, clock = _new()
    other = WorkerRef(WorkerId("d2"), Role.DECODE, Epoch(1), "")
    setbacks.note(ContextTooLong("pool of p"), P, target)
    setbacks.note(ContextTooLong("pool of d", max_context=30), D)
    assert setbacks.is_avoided(D, clock.now())
    assert not setbacks.is_avoided(other, clock.now())
    assert not setbacks.is_too_long_for([D, other])
    assert not setbacks.is_too_long_for([])
    setbacks.note(ContextTooLong("pool of d2", max_context=20), other)
    assert setbacks.is_too_long_for([D, other])
    final = setbacks.final_error([D, other])
    assert isinstance(final, ContextTooLong)
    assert final.details["max_context"] == 30


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ReservationRefused("full"), Overloaded),
        (Overloaded("full", retry_after_s=1), Overloaded),
        (WorkerDraining("drains"), NoWorkerAvailable),
    ],
)
def test_a_request_that_is_given_up_after_refusals_is_told_when_to_come_again(
    error: ServingError, final: type[ServingError]
) -> None:
    setbacks, _ = _new()
    setbacks.note(error, P, D)
    found = setbacks.final_error([D])
    assert type(found) is final
    assert found.details["retry_after_s"]
    assert isinstance(setbacks.final_error([]), NoWorkerAvailable)


def test_a_sample_that_two_workers_could_not_compute_is_given_up() -> None:
    setbacks, _ = _new()
    for _ in range(2):
        setbacks.note(StepFailed("boom"), P, D)
    setbacks.note(StepFailed("boom"), D, samples=(1,))
    with pytest.raises(StepFailed):
        setbacks.note(StepFailed("boom"), D, samples=(0,))


def test_a_worker_that_many_samples_lose_is_one_failure_of_each() -> None:
    setbacks, _ = _new()
    for sample in range(20):
        setbacks.note(WorkerLost("gone"), D, samples=(sample,))
    setbacks.note(WorkerLost("gone"), D, samples=range(20))
    setbacks.note(WorkerLost("gone"), D, samples=range(20))
    with pytest.raises(WorkerLost):
        setbacks.note(WorkerLost("gone"), D, samples=(7,))


@pytest.mark.parametrize("error", [InvalidRequest("no"), DeadlineExceeded("late"), ServingError("?")])
def test_what_another_try_cannot_mend_is_raised(error: ServingError) -> None:
    with pytest.raises(type(error)):
        _new()[0].note(error, D)


def test_after_enough_failures_the_last_one_is_raised() -> None:
    setbacks, _ = _new()
    for _ in range(CONFIG.max_failures):
        setbacks.note(WorkerLost("gone"), D)
    with pytest.raises(StepFailed):
        setbacks.note(StepFailed("boom"), D)
