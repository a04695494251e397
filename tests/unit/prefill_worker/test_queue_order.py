"""Short prompts come first, and no prompt starves whatever comes after it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_worker.config import PrefillConfig
from prefill_worker.queue_order import aged_shortest
from prefill_worker.scheduler import PrefillScheduler
from tests.unit.prefill_worker.prompts import make_cache, make_prompt

_RATE = 10.0  # tokens a second


def test_of_two_that_came_together_the_shorter_is_first() -> None:
    order = aged_shortest(0.5)
    long, short = make_prompt(30, name="long"), make_prompt(5, name="short")
    assert order(short, 3.0, _RATE) < order(long, 3.0, _RATE)


def test_waiting_makes_up_for_length() -> None:
    order = aged_shortest(0.5)
    long, late = make_prompt(30, name="long"), make_prompt(5, name="late", now=5.1)
    assert order(long, 5.1, _RATE) < order(late, 5.1, _RATE), "25 tokens are 2.5 s, as are 5 s of waiting"


@settings(max_examples=50, deadline=None)
@given(
    long_length=st.integers(8, 40),
    lengths=st.lists(st.integers(1, 8), min_size=30, max_size=30),
    aging=st.sampled_from([0.25, 0.5, 2.0]),
)
def test_a_long_prompt_is_read_at_last_under_a_flood_of_short_ones(
    long_length: int, lengths: list[int], aging: float
) -> None:
    """Each step takes as long as its tokens at the rate, and in each a short prompt comes that fills it."""
    cache = make_cache(60)
    config = PrefillConfig(token_budget=8, aging=aging)
    scheduler = PrefillScheduler(config, cache.allocator.num_blocks, cache.layout.block_size, cache.try_start)
    now = 0.0
    long = make_prompt(long_length, name="long")
    scheduler.admit(long, 0.0)
    # it yields only to what came within its work / aging, and each of those is at most a step's work
    bound_s = long_length / _RATE / aging
    num_after = 0
    flood = iter(range(10_000))
    while long in scheduler:
        index = next(flood)
        assert index < 2000, "the long prompt starves"
        prompt = make_prompt(lengths[index % len(lengths)], name=f"s{index}", now=now)
        scheduler.admit(prompt, 0.0)
        plan = scheduler.plan(now, _RATE)
        assert plan is not None
        for item, read in zip(plan.step.scheduled, plan.prompts, strict=True):
            if read is not long and read.arrived_at > bound_s and plan.prompts.index(read) == 0:
                num_after += 1
            read.sequence.num_computed_tokens += item.num_scheduled_tokens
            if read.sequence.num_uncomputed_tokens == 0:
                scheduler.remove(read)
                cache.release(read.sequence)
        now += plan.step.num_tokens / _RATE
    assert num_after == 0, "overtaken by what came after its bound"
