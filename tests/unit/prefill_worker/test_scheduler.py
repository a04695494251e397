"""What the prefill scheduler promises, whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ContextTooLong, Overloaded
from engine.kv.cache import KVCache
from prefill_worker.config import PrefillConfig
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import PrefillPlan, PrefillScheduler
from tests.unit.prefill_worker.prompts import make_cache, make_prompt


def make_scheduler(cache: KVCache, **settings: float) -> PrefillScheduler:
    config = PrefillConfig(**settings)  # type: ignore[arg-type]
    return PrefillScheduler(config, cache.allocator.num_blocks, cache.layout.block_size, cache.try_start)


def apply(plan: PrefillPlan, scheduler: PrefillScheduler, cache: KVCache) -> list[Prompt]:
    """What a worker does after a step; returns the prompts that are read."""
    read = []
    for item, prompt in zip(plan.step.scheduled, plan.prompts, strict=True):
        prompt.sequence.num_computed_tokens += item.num_scheduled_tokens
        cache.publish_full(prompt.sequence)
        if prompt.sequence.num_uncomputed_tokens == 0:
            assert scheduler.remove(prompt)
            cache.release(prompt.sequence)
            read.append(prompt)
    return read


def test_short_prompts_share_a_step_and_a_long_one_is_read_in_chunks() -> None:
    cache = make_cache(50)
    scheduler = make_scheduler(cache, token_budget=16)
    prompts = [make_prompt(length, name=f"{index}") for index, length in enumerate((6, 6, 25))]
    for prompt in prompts:
        scheduler.admit(prompt, 0.0)
    steps = []
    while (plan := scheduler.plan(0.0)) is not None:
        steps.append([item.num_scheduled_tokens for item in plan.step.scheduled])
        apply(plan, scheduler, cache)
    assert steps == [[6, 6, 4], [16], [5]]


def test_a_short_prompt_overtakes_a_long_one_between_its_chunks() -> None:
    cache = make_cache(50)
    scheduler = make_scheduler(cache, token_budget=16)
    long, short = make_prompt(60, name="long"), make_prompt(6, name="short", now=1.0)
    scheduler.admit(long, 0.0)
    first = scheduler.plan(0.0, 100.0)
    assert first is not None
    apply(first, scheduler, cache)
    scheduler.admit(short, 0.0)
    plan = scheduler.plan(1.0, 10.0)
    assert plan is not None
    assert plan.prompts == (short, long)
    assert [item.num_scheduled_tokens for item in plan.step.scheduled] == [6, 10]


def test_a_prompt_larger_than_the_pool_is_refused_when_it_comes() -> None:
    cache = make_cache(3)
    scheduler = make_scheduler(cache)
    scheduler.admit(make_prompt(12), 0.0)
    with pytest.raises(ContextTooLong) as caught:
        scheduler.admit(make_prompt(13), 0.0)
    assert caught.value.details["max_tokens"] == 12


def test_a_full_queue_says_when_to_come_again() -> None:
    cache = make_cache(10)
    scheduler = make_scheduler(cache, max_waiting=2)
    for name in ("a", "b"):
        scheduler.admit(make_prompt(40, name=name), 0.0)
    with pytest.raises(Overloaded) as caught:
        scheduler.admit(make_prompt(4, name="c"), tokens_per_s=20.0)
    assert caught.value.details["retry_after_s"] == 4.0
    assert scheduler.num_waiting == 2


def test_the_head_of_the_queue_is_not_overtaken_for_want_of_blocks() -> None:
    cache = make_cache(10)
    scheduler = make_scheduler(cache, token_budget=100)
    taken = cache.allocator.try_allocate(6)
    assert taken is not None
    for name, length, now in (("long", 40, 0.0), ("short", 4, 1.0)):
        scheduler.admit(make_prompt(length, name=name, now=now), 0.0)
    assert scheduler.plan(1.0, 100.0) is None
    cache.allocator.release(taken)
    plan = scheduler.plan(1.0, 100.0)
    assert plan is not None
    assert [prompt.job.ticket_id for prompt in plan.started] == ["long"]


def test_a_removed_prompt_is_never_planned_again() -> None:
    cache = make_cache(10)
    scheduler = make_scheduler(cache, token_budget=4)
    running, waiting = make_prompt(12, name="a"), make_prompt(12, name="b")
    for prompt in (running, waiting):
        scheduler.admit(prompt, 0.0)
    assert scheduler.plan(0.0) is not None
    for prompt in (running, waiting):
        assert scheduler.remove(prompt)
        assert not scheduler.remove(prompt)
    cache.release(running.sequence)
    assert scheduler.plan(0.0) is None
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert (scheduler.num_waiting_tokens, scheduler.num_running_tokens) == (0, 0)


def test_prompts_expire_at_their_deadline_waiting_or_running() -> None:
    cache = make_cache(10)
    scheduler = make_scheduler(cache, token_budget=4)
    early, late = make_prompt(12, name="a", time_left_s=1.0), make_prompt(12, name="b", time_left_s=2.0)
    for prompt in (early, late):
        scheduler.admit(prompt, 0.0)
    assert scheduler.plan(0.0) is not None
    assert scheduler.expired(0.9) == []
    assert scheduler.expired(1.0) == [early]
    assert set(scheduler.expired(2.0)) == {early, late}


def test_another_order_of_the_queue_can_be_put_in() -> None:
    cache = make_cache(20)
    scheduler = PrefillScheduler(
        PrefillConfig(token_budget=4, max_num_seqs=1),
        cache.allocator.num_blocks,
        cache.layout.block_size,
        cache.try_start,
        order=lambda prompt, now, tokens_per_s: -prompt.num_remaining_tokens,
    )
    for name, length in (("long", 30), ("short", 4)):
        scheduler.admit(make_prompt(length, name=name), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.started[0].job.ticket_id == "long"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    token_budget=st.integers(1, 32),
    max_num_seqs=st.integers(1, 4),
    num_blocks=st.integers(10, 24),
    cancelled=st.sets(st.integers(0, 11)),
    data=st.data(),
)
def test_every_prompt_is_read_once_within_budget_and_nothing_leaks(
    lengths: list[int],
    token_budget: int,
    max_num_seqs: int,
    num_blocks: int,
    cancelled: set[int],
    data: st.DataObject,
) -> None:
    cache = make_cache(num_blocks)
    scheduler = make_scheduler(cache, token_budget=token_budget, max_num_seqs=max_num_seqs)
    prompts = [make_prompt(length, name=f"r{index}", now=index) for index, length in enumerate(lengths)]
    for prompt in prompts:
        scheduler.admit(prompt, 0.0)
    doomed = [prompts[index] for index in cancelled if index < len(prompts)]
    done: list[Prompt] = []
    for _ in range(2 * sum(lengths) + 2):
        is_cancelled: bool = data.draw(st.booleans())
        if doomed and is_cancelled:
            prompt = doomed.pop()
            if scheduler.remove(prompt):
                cache.release(prompt.sequence)
                done.append(prompt)
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        assert 0 < plan.step.num_tokens <= token_budget
        assert scheduler.num_running <= max_num_seqs
        for item in plan.step.scheduled:
            assert 0 < item.num_scheduled_tokens <= item.sequence.num_uncomputed_tokens
            assert len(item.sequence.block_table) == cache.layout.num_blocks(item.sequence.num_tokens)
        done += apply(plan, scheduler, cache)
        cache.allocator.check(prompt.sequence.block_table for prompt in scheduler.running)
    assert set(done) == set(prompts)
    assert len(done) == len(prompts)
    assert cache.allocator.num_held == 0
