"""KVCache: what is matched, named, shared and reserved; and that no sequence ever reads another's tokens."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_hash import BlockHash, hash_blocks
from core.errors import TransferCorrupt
from core.ids import RequestId
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from engine.kv.allocator import BlockAllocator
from engine.kv.cache import KVCache
from engine.kv.pool import KVPool
from engine.kv.reservation import Reservation
from engine.sequence import Sequence, new_sequence

BLOCK_SIZE = 4
LAYOUT = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE)


def new_cache(num_blocks: int, enable_prefix_cache: bool = True) -> KVCache:
    return KVCache(KVPool(LAYOUT, num_blocks), BlockAllocator(num_blocks), enable_prefix_cache)


def request(
    prompt: tuple[int, ...], salt: str = "", is_read: bool = True, prompt_logprobs: int | None = None
) -> Request:
    return Request(
        RequestId("r"),
        prompt,
        SamplingParams(max_tokens=100, seed=1, prompt_logprobs=prompt_logprobs),
        cache_salt=salt,
        is_prefix_cache_read=is_read,
    )


def sequence_of(prompt: tuple[int, ...], **options: object) -> Sequence:
    return new_sequence(request(prompt, **options), 0, (), 1000)  # type: ignore[arg-type]


def content(sequence: Sequence, position: int) -> float:
    """A stand-in for the KV of a token: depends on salt and all tokens up to it, as attention makes it."""
    text = repr((sequence.request.cache_salt, sequence.token_ids[: position + 1]))
    return float(zlib.crc32(text.encode()) % (1 << 20))


def compute(cache: KVCache, sequence: Sequence, num_tokens: int) -> None:
    """What a step does: write the KV of the next tokens, count them, publish."""
    for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens):
        block_id = sequence.block_table[position // BLOCK_SIZE]
        assert cache.allocator.is_writable(block_id), "a step would write to a block that others may read"
        cache.pool.tensor[:, :, block_id, :, position % BLOCK_SIZE] = content(sequence, position)
    sequence.num_computed_tokens += num_tokens
    cache.publish_full(sequence)


def stored(cache: KVCache, sequence: Sequence) -> list[float]:
    return [
        cache.pool.tensor[0, 0, sequence.block_table[i // BLOCK_SIZE], 0, i % BLOCK_SIZE, 0].item()
        for i in range(sequence.num_computed_tokens)
    ]


def expected(sequence: Sequence) -> list[float]:
    return [content(sequence, i) for i in range(sequence.num_computed_tokens)]


def finished(cache: KVCache, prompt: tuple[int, ...], **options: object) -> None:
    """Run a prompt to its end, so that its blocks are cached."""
    sequence = sequence_of(prompt, **options)
    assert cache.try_start(sequence)
    compute(cache, sequence, sequence.num_uncomputed_tokens)
    cache.release(sequence)


class CacheMachine(RuleBasedStateMachine):
    """Sequences, leases and reservations at random over a small pool; the KV of each is always compared."""

    NUM_BLOCKS = 14

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache(self.NUM_BLOCKS)
        self.sequences: list[Sequence] = []
        self.leases: list[list[int]] = []
        self.reservations: list[tuple[Request, Reservation]] = []

    # a few long texts cut anywhere, so that prompts often share a beginning
    prompts = st.builds(
        lambda fork, num: tuple([0] * fork + [1] * (18 - fork))[:num],
        st.sampled_from((0, 6, 8, 18)),
        st.integers(1, 18),
    )

    @rule(prompt=prompts, salt=st.sampled_from("xy"), is_read=st.booleans(), extra=st.integers(0, 5))
    def start(self, prompt: tuple[int, ...], salt: str, is_read: bool, extra: int) -> None:
        sequence = sequence_of(prompt, salt=salt, is_read=is_read)
        estimate = self.cache.count_cached_tokens(sequence)
        if not self.cache.try_start(sequence, extra):
            assert sequence.block_table == []
            return
        assert len(sequence.block_table) == LAYOUT.num_blocks(len(prompt) + extra)
        assert sequence.num_computed_tokens == sequence.num_cached_tokens == estimate < len(prompt)
        assert is_read or estimate == 0
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num=st.integers(1, 9))
    def step(self, data: st.DataObject, num: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        compute(self.cache, sequence, min(num, sequence.num_uncomputed_tokens))
        if sequence.num_uncomputed_tokens == 0 and self.cache.try_grow(sequence, sequence.num_tokens + 1):
            sequence.append(num % 2)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sample = self.cache.fork(sequence, sequence.sample_index + 1, num_extra_tokens=1)
        if sample is not None:
            sample.append(2)
            self.sequences.append(sample)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def preempt_and_restart(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        num_cached = sequence.num_cached_tokens
        self.cache.release(sequence)
        sequence.num_preemptions += 1
        if not self.cache.try_start(sequence):
            self.sequences.remove(sequence)
        assert sequence.num_cached_tokens == num_cached

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_leased=st.booleans())
    def finish(self, data: st.DataObject, is_leased: bool) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        if is_leased:
            self.leases.append(list(sequence.block_table))
            self.cache.allocator.hold(sequence.block_table)
        self.cache.release(sequence)

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self) -> None:
        self.cache.allocator.release(self.leases.pop())

    @rule(prompt=prompts, growth=st.integers(0, 6), num_samples=st.integers(1, 3), is_read=st.booleans())
    def reserve(self, prompt: tuple[int, ...], growth: int, num_samples: int, is_read: bool) -> None:
        owner = request(prompt, "x")
        names = hash_blocks(self.cache.hash_root(owner), prompt, BLOCK_SIZE)
        num_matching = len(self.cache.match(names))
        reservation = self.cache.reserve(names, len(prompt), growth, num_samples, is_read)
        if reservation is None:
            return
        assert reservation.held == tuple(range(num_matching if is_read else 0))
        assert len(reservation.table) == LAYOUT.num_blocks(len(prompt) + growth)
        for block_id in reservation.block_ids[len(reservation.held) :]:
            assert self.cache.allocator.is_writable(block_id)
        self.reservations.append((owner, reservation))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), is_committed=st.booleans())
    def abandon(self, data: st.DataObject, is_committed: bool) -> None:
        owner, reservation = self.reservations.pop()
        if is_committed:
            self.receive(owner, reservation)
            self.cache.publish_reserved(reservation)
        self.cache.abandon(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        owner, reservation = self.reservations.pop()
        self.receive(owner, reservation)
        self.cache.publish_reserved(reservation)
        num_samples = data.draw(st.integers(1, len(reservation.sample_tables) + 1))
        samples = [new_sequence(owner, i, (i,), 1000) for i in range(num_samples)]
        self.cache.claim(reservation, samples)
        for sample in samples:
            if self.cache.try_grow(sample, sample.num_tokens):
                self.sequences.append(sample)
            else:
                self.cache.release(sample)

    def receive(self, owner: Request, reservation: Reservation) -> None:
        """What the pushes of a ticket do: fill all blocks that were not held."""
        source = new_sequence(owner, 0, (), 1000)
        for position in range(reservation.num_tokens):
            index, offset = divmod(position, BLOCK_SIZE)
            if index not in reservation.held:
                block_id = reservation.table[index]
                assert self.cache.allocator.is_writable(block_id)
                self.cache.pool.tensor[:, :, block_id, :, offset] = content(source, position)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        tables = [
            *(sequence.block_table for sequence in self.sequences),
            *self.leases,
            *(reservation.block_ids for _, reservation in self.reservations),
        ]
        self.cache.allocator.check(tables)

    @invariant()
    def each_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.sequences:
            assert stored(self.cache, sequence) == expected(sequence)
            root = self.cache.hash_root(sequence.request)
            computed = sequence.token_ids[: sequence.num_computed_tokens]
            assert sequence.block_hashes == hash_blocks(root, computed, BLOCK_SIZE)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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
