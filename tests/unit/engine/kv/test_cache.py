"""KVCache: what is matched, named, shared and reserved."""

from __future__ import annotations

import pytest

from core.block_hash import BlockHash, hash_blocks
from core.errors import TransferCorrupt
from core.ids import RequestId
from core.request import Request
from engine.sequence import new_sequence
from tests.unit.engine.kv.cached import (
    BLOCK_SIZE,
    compute,
    expected,
    finished,
    new_cache,
    request,
    sequence_of,
    stored,
)


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_repeated_prompt_leaves_at_least_one_token_to_compute(num_tokens: int, num_cached: int) -> None:
    cache = new_cache(16)
    prompt = tuple(range(num_tokens))
    finished(cache, prompt)
    again = sequence_of(prompt)
    assert cache.try_start(again)
    assert again.num_computed_tokens == again.num_cached_tokens == num_cached
    assert len(again.block_hashes) == num_cached // BLOCK_SIZE


def test_a_cold_prompt_matches_nothing_and_counts_as_asked() -> None:
    cache = new_cache(16)
    sequence = sequence_of(tuple(range(9)))
    assert cache.try_start(sequence)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (0, 0)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (9, 0)


def test_hits_are_counted_once_however_often_a_sequence_starts() -> None:
    cache = new_cache(16)
    finished(cache, tuple(range(9)))
    sequence = sequence_of(tuple(range(9)))
    assert cache.try_start(sequence)
    cache.release(sequence)
    sequence.num_preemptions += 1
    assert cache.try_start(sequence)
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (18, 8)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    cache = new_cache(16)
    sequence = sequence_of((1, 2, 3))
    assert cache.try_start(sequence, num_extra_tokens=10)
    for token_id in range(10, 16):
        compute(cache, sequence, 1 if sequence.num_computed_tokens else 3)
        sequence.append(token_id)
    cache.release(sequence)
    turn = sequence_of((1, 2, 3, *range(10, 16), 7))
    assert cache.try_start(turn)
    assert turn.num_cached_tokens == 8
    assert stored(cache, turn) == expected(turn)


def test_reading_off_does_not_stop_publishing() -> None:
    cache = new_cache(16)
    finished(cache, tuple(range(9)))
    unread = sequence_of(tuple(range(9)), is_read=False)
    assert cache.try_start(unread)
    assert unread.num_computed_tokens == 0
    cache.allocator.clear_cache()
    compute(cache, unread, 9)
    reader = sequence_of(tuple(range(9)))
    assert cache.try_start(reader)
    assert reader.num_computed_tokens == 8


def test_prompt_logprobs_compute_each_token() -> None:
    cache = new_cache(16)
    finished(cache, tuple(range(9)))
    sequence = sequence_of(tuple(range(9)), prompt_logprobs=0)
    assert cache.try_start(sequence)
    assert sequence.num_computed_tokens == 0


def test_salts_and_adapters_do_not_meet() -> None:
    cache = new_cache(16)
    finished(cache, tuple(range(9)), salt="a")
    other = sequence_of(tuple(range(9)), salt="b")
    assert cache.try_start(other)
    assert other.num_computed_tokens == 0
    assert cache.hash_root(request((1,))) != cache.hash_root(
        Request(RequestId("r"), (1,), other.request.sampling, adapter="z")
    )


def test_a_disabled_cache_names_blocks_but_finds_none() -> None:
    cache = new_cache(16, enable_prefix_cache=False)
    finished(cache, tuple(range(9)))
    again = sequence_of(tuple(range(9)))
    assert cache.try_start(again)
    assert again.num_computed_tokens == 0
    compute(cache, again, 9)
    assert len(again.block_hashes) == 2
    assert cache.allocator.num_cached == 0
    assert cache.match(again.block_hashes) == []


def test_emitted_tokens_are_read_like_prompt_and_counted_like_it_where_they_are_cached() -> None:
    cache = new_cache(16)
    finished(cache, tuple(range(12)))
    resumed = new_sequence(request(tuple(range(6))), 0, tuple(range(6, 12)), 1000)
    assert cache.try_start(resumed)
    assert (resumed.num_computed_tokens, resumed.num_cached_tokens) == (8, 8)
    assert cache.num_hit_tokens == 6, "hits are those of prompts"


def test_blocks_that_nobody_owned_are_whose_prompt_is_found_there() -> None:
    cache = new_cache(16)
    owner = request(tuple(range(12)), salt="tenant")
    names = hash_blocks(cache.hash_root(owner), owner.prompt_token_ids, cache.layout.block_size)
    reservation = cache.reserve(names[:2], 8)
    assert reservation is not None
    cache.publish_reserved(reservation)
    cache.abandon(reservation)  # as lent ones are
    assert cache.allocator.num_owned("tenant") == 0
    sequence = new_sequence(owner, 0, (), 1000)
    assert cache.try_start(sequence)
    assert sequence.num_cached_tokens == 8
    assert cache.allocator.num_owned("tenant") == 2
    cache.release(sequence)
    cache.allocator.check([])


def test_growth_is_all_or_nothing() -> None:
    cache = new_cache(4)
    sequence = sequence_of(tuple(range(5)))
    assert cache.try_start(sequence)
    assert cache.try_grow(sequence, 8)
    assert len(sequence.block_table) == 2
    assert not cache.try_grow(sequence, 17)
    assert len(sequence.block_table) == 2
    assert cache.try_grow(sequence, 16)


def test_samples_share_full_blocks_and_copy_the_tail() -> None:
    cache = new_cache(16)
    parent = sequence_of(tuple(range(10)))
    assert cache.try_start(parent, num_extra_tokens=1)
    compute(cache, parent, 10)
    sample = cache.fork(parent, 1, emitted=(77,))
    assert sample is not None
    parent.append(55)
    assert sample.block_table[:2] == parent.block_table[:2]
    assert sample.block_table[2] != parent.block_table[2]
    compute(cache, parent, 1)
    compute(cache, sample, 1)
    assert stored(cache, parent) == expected(parent)
    assert stored(cache, sample) == expected(sample)
    assert (sample.sample_index, sample.token_ids[-1], sample.num_output_tokens) == (1, 77, 1)


def test_a_fork_without_room_changes_nothing() -> None:
    cache = new_cache(3)
    parent = sequence_of(tuple(range(10)))
    assert cache.try_start(parent)
    compute(cache, parent, 10)
    assert cache.fork(parent, 1) is None
    cache.allocator.check([parent.block_table])


def test_a_ticket_gets_room_for_all_or_is_refused() -> None:
    cache = new_cache(9)
    prompt = tuple(range(10))
    names = hash_blocks(cache.hash_root(request(prompt)), prompt, BLOCK_SIZE)
    assert cache.reserve(names, 10, 6, num_samples=5) is None
    assert cache.allocator.num_free == 9
    reservation = cache.reserve(names, 10, 6, num_samples=3)
    assert reservation is not None
    assert len(reservation.table) == 4
    assert [len(table) for table in reservation.sample_tables] == [2, 2]
    cache.allocator.check([reservation.block_ids])


def test_a_claim_with_other_tokens_than_were_named_is_refused() -> None:
    cache = new_cache(9)
    prompt = tuple(range(10))
    names = hash_blocks(cache.hash_root(request(prompt)), prompt, BLOCK_SIZE)
    reservation = cache.reserve(names, 10)
    assert reservation is not None
    for wrong in (sequence_of((99, *range(1, 11))), sequence_of(tuple(range(9)))):
        with pytest.raises(TransferCorrupt):
            cache.claim(reservation, [wrong])
        assert wrong.block_table == []
    salted = new_sequence(request((*prompt, 1), "other"), 0, (), 1000)
    with pytest.raises(TransferCorrupt):
        cache.claim(reservation, [salted])
    cache.allocator.check([reservation.block_ids])


def test_unverified_blocks_are_not_findable_before_the_commit() -> None:
    cache = new_cache(9)
    prompt = tuple(range(10))
    names: list[BlockHash] = hash_blocks(cache.hash_root(request(prompt)), prompt, BLOCK_SIZE)
    reservation = cache.reserve(names, 10)
    assert reservation is not None
    assert cache.match(names) == []
    cache.publish_reserved(reservation)
    assert cache.match(names) == list(reservation.table[:2])
    cache.abandon(reservation)
    assert (cache.allocator.num_cached, cache.allocator.num_free) == (2, 7)
