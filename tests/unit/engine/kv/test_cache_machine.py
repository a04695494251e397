"""Whatever happens to sequences, leases and reservations: no sequence ever reads another's tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_hash import hash_blocks
from core.request import Request
from engine.kv.reservation import Reservation
from engine.sequence import Sequence, new_sequence
from tests.unit.engine.kv.cached import (
    BLOCK_SIZE,
    LAYOUT,
    compute,
    content,
    expected,
    new_cache,
    request,
    sequence_of,
    stored,
)


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
