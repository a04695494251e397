"""A prompt that is handed over ends in a small step, and is read whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.config import PrefillConfig
from prefill_worker.prompt import new_prompt
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.taper import num_tapered_tokens
from tests.unit.prefill_worker.prompts import DECODE, MAX_CONTEXT, VOCAB_SIZE, make_cache, make_job


def steps_of(num_tokens: int, token_budget: int) -> list[int]:
    steps = []
    while num_tokens:
        steps.append(num_tapered_tokens(num_tokens, token_budget))
        num_tokens -= steps[-1]
    return steps


def test_a_long_prompt_leaves_an_eighth_of_a_step_to_the_last() -> None:
    assert steps_of(1000, 512) == [512, 424, 64]
    assert steps_of(1500, 512) == [512, 512, 412, 64]


def test_a_prompt_of_half_a_step_is_read_in_one() -> None:
    assert steps_of(256, 512) == [256]
    assert steps_of(257, 512) == [193, 64]


@given(st.integers(1, 5000), st.integers(1, 1024))
def test_every_token_is_read_and_at_most_one_step_is_added(num_tokens: int, token_budget: int) -> None:
    steps = steps_of(num_tokens, token_budget)
    assert sum(steps) == num_tokens
    assert 0 < min(steps) <= max(steps) <= token_budget
    assert len(steps) <= -(-num_tokens // token_budget) + 1


def test_only_a_prompt_that_is_handed_over_is_tapered() -> None:
    for decode, wanted in ((DECODE, [16, 14, 2]), (None, [16, 16])):
        cache = make_cache(50)
        config = PrefillConfig(token_budget=16)
        scheduler = PrefillScheduler(config, cache.allocator.num_blocks, 4, cache.try_start)
        prompt = new_prompt(make_job(tuple(range(32)), decode=decode), MAX_CONTEXT, VOCAB_SIZE, 0.0)
        scheduler.admit(prompt, 0.0)
        steps = []
        while prompt.sequence.num_uncomputed_tokens:
            plan = scheduler.plan(0.0)
            assert plan is not None
            steps.append(plan.step.num_tokens)
            prompt.sequence.num_computed_tokens += steps[-1]
        assert steps == wanted
