"""Scheduler: which sequences run in the next step, with how many tokens.

Policy without tensors. Owns the order (waiting, running) and decides who gets blocks and who gives them
back; the blocks themselves are KVCache's, sequences that wait for their KV to arrive are the inbox's. Used
on the step thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping

from decode_worker.config import DecodeConfig
from decode_worker.running import Running
from engine.kv.cache import KVCache
from engine.sampling.settings import Ints
from engine.sequence import Sequence
from engine.step import ScheduledSequence, StepPlan

_NO_SAMPLES: tuple[int, ...] = ()


class Scheduler:
    """Running streams first, then chunks of prefills under what is left of the budget, then newcomers in
    order.

    Preempts the newest when blocks run out: the oldest sequence never loses its blocks to another, so it
    always progresses, and with it, one after the other, all. A preempted sequence keeps its place in the
    order of arrival.
    """

    def __init__(self, config: DecodeConfig, cache: KVCache, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._cache = cache
        self._waiting: list[Sequence] = []
        self._arrivals: dict[Sequence, int] = {}
        self._running = Running(cache.layout.block_size, eos_token_ids, self._arrivals.__getitem__)
        self._first_samples: dict[Sequence, tuple[int, ...]] = {}
        self._num_uncached: dict[Sequence, int] = {}
        self._num_arrived = 0
        self._in_flight: list[StepPlan] = []
        self._leaving: list[Sequence] = []  # removed while a step computes them: their blocks stay until then
        self.num_preemptions = 0
        self.started: tuple[Sequence, ...] = ()
        """The newcomers of the last plan."""
        self.is_short = False
        """Whether the last plan left somebody waiting for want of blocks or places: then no ticket should
        come first.
        """

    # ------------------------------------------------------------ who is here

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting sequences have to compute, by what was cached when they began to wait."""
        return sum(self._num_uncached.values())

    @property
    def num_running_tokens(self) -> int:
        """Tokens that running sequences still have to compute before their next one is sampled."""
        return self._running.num_uncomputed_tokens

    @property
    def num_held_slots(self) -> int:
        """Token slots in the blocks of running sequences; a shared block counts for each of them."""
        return self._running.num_held_slots

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of running sequences that those slots hold."""
        return self._running.num_computed_tokens

    @property
    def has_work(self) -> bool:
        return len(self._running) + len(self._waiting) + len(self._in_flight) > 0

    def tables(self) -> Iterator[list[int]]:
        """The block tables of all sequences here, for the allocator's check."""
        return (sequence.block_table for sequence in (*self._arrivals, *self._leaving))

    def check(self) -> None:
        """Assert that each running sequence reads or has a row, and that the rows are right."""
        self._running.check()

    def add(self, sequence: Sequence, first_samples: tuple[int, ...] = _NO_SAMPLES) -> None:
        """Queue a sequence that has no blocks. `first_samples`: samples to draw at its first token (empty:
        its own).
        """
        self._arrive(sequence, self._next_arrival())
        if first_samples:
            self._first_samples[sequence] = first_samples
        self._wait(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Let a sequence that brings its blocks join the next step; without room for its tokens it is
        preempted at once.
        """
        self._arrive(sequence, self._next_arrival())
        self._join(sequence)

    def join(self, sample: Sequence, sibling: Sequence) -> None:
        """Like `adopt` for a sample forked from `sibling`, whose place in the order it shares.

        It may come without blocks, if there were none for it.
        """
        self._arrive(sample, self._arrivals[sibling])
        self._join(sample)

    def remove(self, sequence: Sequence) -> None:
        """Finished or no longer wanted: give its blocks back, as soon as no step that runs works on them. The
        sequence must be here.
        """
        if sequence in self._num_uncached:
            self._waiting.remove(sequence)
            del self._num_uncached[sequence]
        else:
            self._running.leave(sequence)
        del self._arrivals[sequence]
        self._first_samples.pop(sequence, None)
        if any(sequence in plan for plan in self._in_flight):
            self._leaving.append(sequence)
        else:
            self._cache.release(sequence)

    # ------------------------------------------------------------ one step

    def schedule(self, num_reserved_samples: int = 0) -> StepPlan:
        """The next step; empty if nothing can run. `num_reserved_samples`: places kept for tickets."""
        assert not self._in_flight, "whoever is preempted may still be computed"
        self._running.settle_readers()
        num_preemptions = self.num_preemptions
        self._grow_streams()
        return self._plan(StepPlan(), num_reserved_samples, self.num_preemptions > num_preemptions)

    def try_schedule_ahead(self, num_reserved_samples: int = 0) -> StepPlan | None:
        """The step after the one that runs, whose tokens are not known yet; None if its result has to be
        awaited, by its nature or because blocks are scarce: nobody is preempted while a step runs.
        """
        (running,) = self._in_flight
        self.started = ()
        if running.must_be_known:
            return None
        running = running.take(*running.rows_without(self._leaving)) if self._leaving else running
        self._running.settle_readers()
        streams = self._running.streams
        for sequence, num_tokens in streams.at_border(running.streams):
            num_blocks = len(sequence.block_table)
            if not self._cache.try_grow(sequence, num_tokens):
                return None
            streams.enter_block(sequence, num_tokens, len(sequence.block_table) - num_blocks)
        return self._plan(running, num_reserved_samples)

    def begin(self, plan: StepPlan) -> None:
        """The step is started: until `end`, nobody else gets the blocks of its sequences."""
        self._in_flight.append(plan)

    def end(self, plan: StepPlan) -> tuple[Sequence, ...]:
        """The step has run, or nothing of it counts; steps end in the order of their beginnings. Returns
        those who left meanwhile, whose blocks are given back now.
        """
        assert self._in_flight[0] is plan
        del self._in_flight[0]
        gone = tuple(sequence for sequence in self._leaving if sequence in plan)
        for sequence in gone:
            if not any(sequence in later for later in self._in_flight):
                self._leaving.remove(sequence)
                self._cache.release(sequence)
        return gone

    def advance(self, plan: StepPlan, token_ids: Ints) -> None:
        """After the step ran: its tokens are computed, each stream has its next one of `token_ids`, blocks
        that became full get their names. All of its sequences are still here.
        """
        for sequence in self._running.streams.advance(plan.streams, token_ids):
            self._cache.publish_full(sequence)
        for item in plan.chunks:
            item.sequence.num_computed_tokens += item.num_scheduled_tokens
            self._cache.publish_full(item.sequence)

    def first_samples(self, sequence: Sequence) -> tuple[int, ...]:
        """The samples that `sequence` still has to draw at its first token; empty means its own."""
        return self._first_samples.get(sequence, _NO_SAMPLES)

    def settle_first_samples(self, sequence: Sequence) -> None:
        """The first token of each sample is drawn: from here on `sequence` is one sample like any other."""
        self._first_samples.pop(sequence, None)

    # ------------------------------------------------------------ inside

    def _grow_streams(self) -> None:
        """Blocks for the streams that need one; oldest first, so that the newest pays for scarcity."""
        streams = self._running.streams
        for sequence, num_tokens in streams.at_border():
            num_blocks = len(sequence.block_table)
            if sequence in streams and self._make_room(sequence):
                streams.enter_block(sequence, num_tokens, len(sequence.block_table) - num_blocks)

    def _plan(self, running: StepPlan, num_reserved_samples: int, is_short: bool = False) -> StepPlan:
        """What to run after `running`. The streams have their blocks."""
        self.is_short = is_short
        self.started = ()
        streams = self._running.streams.step(running.streams)
        ahead = {item.sequence: item.num_scheduled_tokens for item in running.chunks}
        left = [
            (sequence, sequence.num_uncomputed_tokens - ahead.get(sequence, 0))
            for sequence in self._running.reading
        ]
        # prompts of which one token is left run like streams; readers got their blocks when they started
        plan = [self._scheduled(item, 1, ahead) for item, num_left in left if num_left == 1]
        num_streams = len(streams) + len(plan)
        budget = self._config.token_budget - num_streams
        if num_streams:
            budget = min(budget, self._config.prefill_chunk)
        for sequence, num_left in left:
            if num_left > 1 and budget > 0:
                chunk = min(num_left, budget)
                plan.append(self._scheduled(sequence, chunk, ahead))
                budget -= chunk
        if not is_short:
            self._plan_newcomers(plan, budget, self._config.max_num_seqs - num_reserved_samples)
        return StepPlan(tuple(plan), streams=streams)

    def _plan_newcomers(self, plan: list[ScheduledSequence], budget: int, max_running: int) -> None:
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            if len(self._running) >= max_running or not self._try_start(sequence):
                self.is_short = True
                return
            del self._waiting[0]
            del self._num_uncached[sequence]
            self._running.enter(sequence)
            self.started += (sequence,)
            chunk = min(sequence.num_uncomputed_tokens, budget)
            plan.append(self._scheduled(sequence, chunk, {}))
            budget -= chunk

    def _try_start(self, sequence: Sequence) -> bool:
        """Start if it fits; beside others only if the watermark stays free for their growth."""
        num_extra_tokens = 1 if _is_sampled(sequence) else 0
        if self._running:
            num_blocks = self._cache.layout.num_blocks(sequence.num_tokens + num_extra_tokens)
            num_new = num_blocks - self._cache.count_cached_tokens(sequence) // self._cache.layout.block_size
            num_spare = max(
                len(self._running), int(self._config.watermark * self._cache.allocator.num_blocks)
            )
            if self._cache.allocator.num_available - num_new < num_spare:
                return False
        return self._cache.try_start(sequence, num_extra_tokens)

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for the sequence's next token, taken from the newest if need be; False if it was itself
        preempted.
        """
        while not self._cache.try_grow(sequence, sequence.num_tokens):
            newest = self._running.newest
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks back; what they hold stays cached as long as it can, the rest is recomputed."""
        self._running.leave(sequence)
        self._cache.release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=self._arrivals.__getitem__)
        self._num_uncached[sequence] = sequence.num_tokens - self._cache.count_cached_tokens(sequence)

    def _join(self, sequence: Sequence) -> None:
        self._running.enter(sequence)
        has_place = bool(sequence.block_table) and len(self._running) <= self._config.max_num_seqs
        if not has_place or not self._cache.try_grow(sequence, sequence.num_tokens):
            self._preempt(sequence)

    def _scheduled(
        self, sequence: Sequence, num_tokens: int, ahead: Mapping[Sequence, int]
    ) -> ScheduledSequence:
        samples, starts_at = (
            self.first_samples(sequence),
            sequence.num_computed_tokens + ahead.get(sequence, 0),
        )
        return ScheduledSequence(sequence, num_tokens, _is_sampled(sequence), samples, starts_at)

    def _arrive(self, sequence: Sequence, arrival: int) -> None:
        assert sequence not in self._arrivals
        self._arrivals[sequence] = arrival

    def _next_arrival(self) -> int:
        self._num_arrived += 1
        return self._num_arrived


def _is_sampled(sequence: Sequence) -> bool:
    """A prompt with `max_tokens` 0 is only read."""
    return sequence.request.sampling.max_tokens > sequence.num_output_tokens
