"""What the decode scheduler promises of order, budget and progress."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.config import DecodeConfig
from decode_worker.scheduler import Scheduler
from engine.kv.cache import KVCache
from engine.sequence import Sequence, new_sequence
from engine.step import StepPlan
from tests.unit.decode_worker.decode_cases import LAYOUT, MAX_CONTEXT, make_cache, make_request


def make_sequence(
    num_tokens: int, name: str = "r", *, max_tokens: int = 8, first: int = 0, emitted: tuple[int, ...] = ()
) -> Sequence:
    request = make_request(num_tokens, name, max_tokens=max_tokens, first=first)
    return new_sequence(request, 0, emitted, MAX_CONTEXT)


def make_scheduler(cache: KVCache, **settings: float) -> Scheduler:
    values: dict[str, float] = {"max_num_seqs": 8, "token_budget": 32, "prefill_chunk": 8, "watermark": 0.0}
    return Scheduler(DecodeConfig(**(values | settings)), cache, frozenset())  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, num_reserved_samples: int = 0) -> StepPlan:
    """Plan a step and do what the engine would: compute, sample, finish."""
    plan = scheduler.schedule(num_reserved_samples)
    planned = [item.sequence for item in plan.scheduled]
    scheduler.advance(plan, plan.streams.num_tokens % 50)
    for sequence in planned:
        if sequence.num_uncomputed_tokens == 0:
            sequence.append(sequence.num_tokens % 50)
        num_output = sequence.num_output_tokens
        if sequence.num_uncomputed_tokens == 1 and num_output >= sequence.request.sampling.max_tokens:
            scheduler.remove(sequence)
    scheduler.check()
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int]]:
    return [(str(item.sequence.request.request_id), item.num_scheduled_tokens) for item in plan.scheduled]


def test_a_lone_prefill_may_use_the_whole_budget() -> None:
    scheduler = make_scheduler(make_cache(64))
    scheduler.add(make_sequence(40, "a"))
    assert shape(run_step(scheduler)) == [("a", 32)]
    assert shape(run_step(scheduler)) == [("a", 8)]
    assert shape(run_step(scheduler)) == [("a", 1)]


def test_streams_run_first_and_a_prefill_beside_them_gets_the_smaller_chunk() -> None:
    scheduler = make_scheduler(make_cache(64))
    scheduler.add(make_sequence(4, "a"))
    run_step(scheduler)
    scheduler.add(make_sequence(20, "b", first=500))
    assert shape(run_step(scheduler)) == [("a", 1), ("b", 8)]
    assert shape(run_step(scheduler)) == [("a", 1), ("b", 8)]
    assert shape(run_step(scheduler)) == [("a", 1), ("b", 4)]
    assert shape(run_step(scheduler)) == [("a", 1), ("b", 1)]


def test_the_chunk_beside_streams_is_shared_by_all_prefills_in_order_of_arrival() -> None:
    scheduler = make_scheduler(make_cache(64))
    scheduler.add(make_sequence(4, "a"))
    run_step(scheduler)
    for name, first in (("b", 100), ("c", 200)):
        scheduler.add(make_sequence(5, name, first=first))
    assert shape(run_step(scheduler)) == [("a", 1), ("b", 5), ("c", 3)]


def test_streams_count_against_the_token_budget() -> None:
    scheduler = make_scheduler(make_cache(64), token_budget=8, prefill_chunk=8)
    for index in range(6):
        scheduler.add(make_sequence(1, f"s{index}", first=10 * index))
    run_step(scheduler)
    scheduler.add(make_sequence(20, "long", first=500))
    plan = run_step(scheduler)
    assert plan.num_tokens == 8
    assert shape(plan)[-1] == ("long", 2)


def test_newcomers_start_in_order_of_arrival_and_wait_for_places() -> None:
    scheduler = make_scheduler(make_cache(64), max_num_seqs=2, token_budget=32)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        scheduler.add(make_sequence(2, name, first=first, max_tokens=2))
    assert shape(run_step(scheduler)) == [("a", 2), ("b", 2)]
    assert scheduler.is_short
    run_step(scheduler)
    assert shape(run_step(scheduler)) == [("c", 2)]


def test_places_reserved_for_tickets_are_left_free() -> None:
    scheduler = make_scheduler(make_cache(64), max_num_seqs=2)
    scheduler.add(make_sequence(2, "a"))
    scheduler.add(make_sequence(2, "b", first=100))
    assert shape(run_step(scheduler, num_reserved_samples=1)) == [("a", 2)]


def test_the_newest_is_preempted_and_comes_back_before_those_that_wait() -> None:
    cache = make_cache(5)  # 20 tokens
    scheduler = make_scheduler(cache, max_num_seqs=2)
    old, new = make_sequence(7, "old", max_tokens=8), make_sequence(5, "new", first=100, max_tokens=8)
    for sequence in (old, new, make_sequence(4, "late", first=200)):
        scheduler.add(sequence)
    for _ in range(8):
        if not scheduler.num_preemptions:
            run_step(scheduler)
            cache.allocator.check(scheduler.tables())
    assert new.num_preemptions == 1
    assert old.num_preemptions == 0
    assert [str(item.request.request_id) for item in scheduler.waiting] == ["new", "late"]
    assert scheduler.is_short
    assert new.num_computed_tokens == 0


def test_a_preempted_sequence_finds_its_blocks_cached_and_is_not_counted_as_a_hit() -> None:
    cache = make_cache(7)
    scheduler = make_scheduler(cache)
    old, new = make_sequence(8, "old", max_tokens=8), make_sequence(8, "new", first=100, max_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    for _ in range(100):
        run_step(scheduler)
        if new in scheduler.waiting and new.num_preemptions == 1:
            assert cache.count_cached_tokens(new) > 0
    assert scheduler.num_preemptions >= 1
    assert cache.num_hit_tokens == 0
    assert new.num_cached_tokens == 0


def test_an_adopted_sequence_joins_the_next_step() -> None:
    cache = make_cache(16)
    scheduler = make_scheduler(cache)
    sequence = make_sequence(6, "moved", emitted=(9,))
    reservation = cache.reserve([], 3)
    assert reservation is not None
    cache.claim(reservation, [sequence])
    scheduler.adopt(sequence)
    assert shape(scheduler.schedule()) == [("moved", 4)]
    cache.allocator.check(scheduler.tables())


def test_an_adopted_sequence_without_room_waits_like_a_preempted_one() -> None:
    cache = make_cache(2)
    scheduler = make_scheduler(cache)
    sequence = make_sequence(8, "moved", emitted=(9,))
    reservation = cache.reserve(cache_names(cache, sequence), 8)
    assert reservation is not None
    cache.publish_reserved(reservation)
    cache.claim(reservation, [sequence])
    scheduler.adopt(sequence)
    assert scheduler.num_running == 0
    assert scheduler.waiting == (sequence,)
    cache.allocator.check(scheduler.tables())


def cache_names(cache: KVCache, sequence: Sequence) -> list:  # type: ignore[type-arg]
    from core.block_hash import hash_blocks

    root = cache.hash_root(sequence.request)
    return hash_blocks(root, sequence.request.prompt_token_ids, LAYOUT.block_size)


def test_a_newcomer_leaves_the_watermark_to_those_who_run() -> None:
    cache = make_cache(8)
    scheduler = make_scheduler(cache, watermark=0.5)
    scheduler.add(make_sequence(4, "a"))
    run_step(scheduler)
    scheduler.add(make_sequence(12, "b", first=100))
    assert shape(run_step(scheduler)) == [("a", 1)]
    assert scheduler.is_short


def test_removing_gives_blocks_back_wherever_the_sequence_is() -> None:
    cache = make_cache(8)
    scheduler = make_scheduler(cache, max_num_seqs=1)
    running, waiting = make_sequence(4, "a"), make_sequence(4, "b", first=100)
    scheduler.add(running)
    scheduler.add(waiting)
    run_step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.has_work
    assert scheduler.num_waiting_tokens == 0
    assert cache.allocator.num_held == 0


def test_waiting_tokens_are_what_is_not_cached() -> None:
    cache = make_cache(32)
    scheduler = make_scheduler(cache)
    scheduler.add(make_sequence(9, "a", max_tokens=1))
    assert scheduler.num_waiting_tokens == 9
    run_step(scheduler)
    assert scheduler.num_waiting_tokens == 0
    scheduler.add(make_sequence(9, "b", max_tokens=1))
    assert scheduler.num_waiting_tokens == 1


def test_a_prompt_without_output_is_read_and_not_sampled() -> None:
    scheduler = make_scheduler(make_cache(8))
    scheduler.add(make_sequence(4, "a", max_tokens=0))
    assert [item.is_sampled for item in scheduler.schedule().scheduled] == [False]


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt tokens
        st.integers(1, 16),  # output tokens
        st.integers(0, 3),  # which prefix
        st.integers(0, 6),  # arrives after that many steps
        st.booleans(),  # brings its KV, like a claimed ticket
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(10, 16),
    token_budget=st.integers(4, 20),
    prefill_chunk=st.integers(1, 20),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_all_sequences_finish_in_a_tiny_pool_and_blocks_add_up_after_each_step(
    arrivals: list[tuple[int, int, int, int, bool]],
    num_blocks: int,
    token_budget: int,
    prefill_chunk: int,
    watermark: float,
) -> None:
    cache = make_cache(num_blocks)
    scheduler = make_scheduler(
        cache, max_num_seqs=4, token_budget=token_budget, prefill_chunk=prefill_chunk, watermark=watermark
    )
    sequences = []
    for index, (num_prompt, num_output, prefix, _, _) in enumerate(arrivals):
        sequences.append(make_sequence(num_prompt, f"s{index}", max_tokens=num_output, first=prefix * 100))
    for step in range(2000):
        for sequence, (_, _, _, after, is_claimed) in zip(sequences, arrivals, strict=True):
            if after == step:
                arrive(scheduler, cache, sequence, is_claimed)
        arrived = [s for s, a in zip(sequences, arrivals, strict=True) if a[3] <= step]
        unfinished = [s for s in arrived if s.num_output_tokens < s.request.sampling.max_tokens]
        plan = run_step(scheduler)
        cache.allocator.check(scheduler.tables())
        assert plan.num_tokens <= token_budget
        assert scheduler.num_running <= 4
        assert bool(plan.scheduled) == bool(unfinished), "there is work, but nothing runs"
        if len(arrived) == len(sequences) and not scheduler.has_work:
            break
    assert not scheduler.has_work, "not all finished"
    assert all(s.num_output_tokens == s.request.sampling.max_tokens for s in sequences)
    assert cache.allocator.num_held == 0


def arrive(scheduler: Scheduler, cache: KVCache, sequence: Sequence, is_claimed: bool) -> None:
    names = cache_names(cache, sequence)
    reservation = cache.reserve(names, sequence.num_tokens, 1) if is_claimed else None
    if reservation is None:
        scheduler.add(sequence)
        return
    cache.publish_reserved(reservation)
    sequence.append(1)
    if sequence.request.sampling.max_tokens == 1:
        cache.abandon(reservation)
        return
    cache.claim(reservation, [sequence])
    scheduler.adopt(sequence)


def test_a_budget_below_the_number_of_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget"):
        DecodeConfig(max_num_seqs=64, token_budget=32)
