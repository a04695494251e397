"""What steps cost is told apart: streams and prompts, alone and beside another worker's steps."""

from __future__ import annotations

import random

import pytest

from core.worker_status import StepCost, num_pairs
from engine.step_costs import StepCosts, StepWork


def test_nothing_measured_says_so() -> None:
    costs = StepCosts()
    assert costs.alone == costs.beside == StepCost()


def test_streams_and_prompt_tokens_have_prices_of_their_own() -> None:
    chance = random.Random(3)
    costs = StepCosts()
    for _ in range(200):
        num_streams, num_tokens = chance.randint(1, 16), chance.choice([0, 0, 16, 64])
        seconds = 0.010 + 0.001 * num_streams + (0.002 + 0.0005 * num_tokens if num_tokens else 0.0)
        costs.observe(seconds * chance.uniform(0.98, 1.02), StepWork(num_tokens, num_streams), False)
    found = costs.alone
    assert found.stream_s == pytest.approx(0.001, rel=0.1)
    assert found.decode_s == pytest.approx(0.010, rel=0.1)
    assert found.token_s == pytest.approx(0.0005, rel=0.1)
    assert found.prefill_s == pytest.approx(0.012, rel=0.15)


def test_long_decoding_does_not_wash_out_what_reading_costs() -> None:
    costs = StepCosts()
    for num_tokens in (64, 128, 512):
        costs.observe(0.02 + 0.001 * num_tokens, StepWork(num_tokens, 0), False)
    before = costs.alone.token_s
    for _ in range(5000):
        costs.observe(0.03, StepWork(0, 4), False)
    assert costs.alone.token_s == before == pytest.approx(0.001, rel=0.05)


def test_steps_beside_another_worker_are_kept_apart() -> None:
    costs = StepCosts()
    for num_streams in (1, 4, 8):
        costs.observe(0.01 + 0.001 * num_streams, StepWork(0, num_streams), False)
        costs.observe(0.02 + 0.002 * num_streams, StepWork(0, num_streams), True)
    assert costs.beside.stream_s == pytest.approx(2 * costs.alone.stream_s)
    assert costs.beside.prefill_s == 0.0
    known = costs.alone, costs.beside
    costs.observe(5.0, StepWork(0, 4), None)
    assert (costs.alone, costs.beside) == known


def test_what_streams_and_prompts_attend_to_has_prices_of_its_own() -> None:
    chance = random.Random(7)
    costs = StepCosts()
    for _ in range(400):
        num_streams, num_kv = chance.randint(1, 32), chance.randint(1_000, 400_000)
        num_tokens = chance.choice([0, 0, 512, 2_048])
        pairs = num_pairs(num_tokens, chance.randint(0, 60_000))
        seconds = 0.007 + 2e-5 * num_streams + 5e-8 * num_kv + 3e-5 * num_tokens + 1e-9 * pairs
        work = StepWork(num_tokens, num_streams, num_kv, pairs)
        costs.observe(seconds * chance.uniform(0.99, 1.01), work, False)
    found = costs.alone
    assert found.kv_s == pytest.approx(5e-8, rel=0.05)
    assert found.pair_s == pytest.approx(1e-9, rel=0.1)
    assert found.token_s == pytest.approx(3e-5, rel=0.1)
