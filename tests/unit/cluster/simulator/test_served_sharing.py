"""Prompts that were read beside streams tell what steps of both, and workers of one host, take."""

from __future__ import annotations

import pytest

from cluster.loadtest.record import Outcome, RequestRecord
from cluster.simulator.served_calibration import Read, busy_of, features_of_prompt
from cluster.simulator.served_calls import Told
from cluster.simulator.served_sharing import Beside, features_of_chunks, mixed_steps, sharing_of
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import Features, StepPrice

PRICE = StepPrice(fixed_s=0.005, token_s=0.001, pair_s=0.0, stream_s=0.0025, kv_s=0.0)
ASSUMED = Sharing(2, 1.6, 1.5)
READ_ALONE_S = PRICE.seconds((1.0, 100.0, 5000.0, 0.0, 0.0))  # 0.105


def streams(pause_s: float = 0.015, until_s: float = 9.0) -> list[RequestRecord]:
    """Two from 0 to `until_s`, a token each `pause_s`."""
    times = tuple(pause_s * i for i in range(1, int(until_s / pause_s)))
    return [RequestRecord(i, 0.0, 0.0, times[-1], Outcome.COMPLETED, times) for i in range(2)]


def told(due_s: float, read_s: float, is_local: bool, num_tokens: int = 100) -> Told:
    return Told(num_tokens, due_s, due_s + 0.003 + read_s, 0.001, read_s, is_local)


def alone(num_tokens: int) -> Features:
    return features_of_prompt(num_tokens, 512)


def test_what_a_first_token_waited_for_besides_is_told() -> None:
    found = told(1.0, 0.1, True)
    assert found.rest_s == pytest.approx(0.002)
    assert found.reading(0.0) == pytest.approx((1.003, 1.103))


def test_a_prompt_that_is_read_with_streams_has_the_features_of_its_chunks() -> None:
    features = features_of_chunks(100, 64, (1.0, 0.0, 0.0, 2.0, 300.0))
    assert features == (2.0, 100.0, 5000.0, 4.0, 600.0)


def test_steps_of_prompts_and_streams_are_those_of_local_prompts_that_were_alone() -> None:
    reads = [
        told(1.0, 0.12, True),
        told(3.0, 0.2, True),
        told(3.1, 0.2, False),  # beside the one before
        told(20.0, 0.12, True),  # the streams have ended
    ]
    (only,) = mixed_steps([Beside(streams(), 32, reads)], 64)
    assert only.seconds == 0.12
    assert only.features[:2] == (2.0, 100.0)
    assert only.features[3] == 4.0
    # 32 tokens of its prompt and some 70 more have each stream in the middle of that
    assert only.features[4] == pytest.approx(2 * 2 * (32 + 70), rel=0.05)


def test_sharing_is_what_remote_prompts_and_the_streams_beside_them_take() -> None:
    slow = streams(pause_s=0.016)  # 0.010 alone
    reads = [told(1.0, 1.9 * READ_ALONE_S, False), told(2.0, 1.9 * READ_ALONE_S, False)]
    found = sharing_of([Beside(slow, 32, reads)], PRICE, alone, ASSUMED)
    assert found.reading == pytest.approx(1.9)
    assert found.decoding == pytest.approx(1.6, rel=0.1)


def test_steps_that_read_a_prompt_themselves_say_nothing_of_decoding_beside_another() -> None:
    reads = [told(1.0, 0.4, True), told(1.0, 0.2, False)]
    found = sharing_of([Beside(streams(), 32, reads)], PRICE, alone, ASSUMED)
    assert found.reading == pytest.approx(0.2 / READ_ALONE_S)
    assert found.decoding == ASSUMED.decoding


def test_where_no_prompt_was_read_beside_another_worker_sharing_is_assumed() -> None:
    assert sharing_of([Beside(streams(), 32, [told(1.0, 0.2, True)])], PRICE, alone, ASSUMED) == ASSUMED
    fast = sharing_of([Beside(streams(0.005), 32, [told(1.0, 0.05, False)])], PRICE, alone, ASSUMED)
    assert (fast.reading, fast.decoding) == (1.0, 1.0)  # nobody is faster beside others


def test_the_way_to_a_busy_worker_is_longer_than_to_an_idle_one() -> None:
    reads = [Read(num, None, 0.001 + 1e-5 * num) for num in (100, 200)]  # type: ignore[arg-type]
    assert busy_of(reads, []) == 0.0
    assert busy_of(reads, [told(1.0, 0.1, True, num) for num in (150, 200)]) == 0.0
    late = [Told(num, 1.0, 1.2, 0.05, 0.1, True) for num in (100, 150, 200)]
    assert busy_of(reads, late) == pytest.approx(0.05 - 0.0025)
