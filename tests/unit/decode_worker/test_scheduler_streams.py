"""The columns of a plan are what its sequences say, whatever has happened to them before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import Request, SamplingParams
from decode_worker.config import DecodeConfig
from decode_worker.scheduler import Scheduler
from engine.batch import build_batch
from engine.sampling import columns_of, row_of
from engine.sequence import Sequence, finish_reason_after, new_sequence
from engine.step import StepPlan
from tests.unit.decode_worker.decode_cases import LAYOUT, MAX_CONTEXT, make_cache, make_request

EOS = frozenset({2, 3})


@dataclass
class Room:
    """A scheduler in a small pool, and the samples that its sequences are to part into."""

    num_blocks: int
    max_num_seqs: int
    scheduler: Scheduler = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.cache = make_cache(self.num_blocks)
        config = DecodeConfig(max_num_seqs=self.max_num_seqs, token_budget=24, prefill_chunk=6, watermark=0.0)
        self.scheduler = Scheduler(config, self.cache, EOS)

    def add(self, request: Request, emitted: tuple[int, ...]) -> None:
        sequence = new_sequence(request, 0, emitted, MAX_CONTEXT)
        if not emitted or finish_reason_after(sequence, EOS) is None:
            is_parted = request.num_samples > 1 and not emitted
            self.scheduler.add(sequence, tuple(range(request.num_samples)) if is_parted else ())

    def step(self, draws: st.DataObject, is_run: bool) -> StepPlan:
        """Plan and check a step; `is_run`: it does not fail. Tokens are drawn, and ends follow from them."""
        plan = self.scheduler.schedule()
        self.check(plan)
        if len(plan) and is_run:
            token_ids = np.array(
                [draws.draw(st.integers(0, 9)) for _ in range(len(plan.streams))], dtype=np.int64
            )
            is_ended = plan.streams.is_ended_by(token_ids)
            self.scheduler.advance(plan, token_ids)
            for sequence, is_over in zip(plan.streams.sequences, is_ended.tolist(), strict=True):
                assert is_over == (finish_reason_after(sequence, EOS) is not None)
                if is_over:
                    self.scheduler.remove(sequence)
            for item in plan.chunks:
                if item.sequence.num_uncomputed_tokens == 0:
                    self.part(item.sequence, item.sample_indices, draws)
        self.scheduler.check()
        self.cache.allocator.check(self.scheduler.tables())
        return plan

    def part(self, sequence: Sequence, sample_indices: tuple[int, ...], draws: st.DataObject) -> None:
        """The first token, for each sample."""
        samples = [sequence]
        for sample_index in sample_indices[1:]:
            sample = self.cache.fork(sequence, sample_index)
            sample = sample or new_sequence(sequence.request, sample_index, (), MAX_CONTEXT)
            self.scheduler.join(sample, sequence)
            samples.append(sample)
        self.scheduler.settle_first_samples(sequence)
        for sample in samples:
            sample.append(draws.draw(st.integers(0, 9)))
            if finish_reason_after(sample, EOS) is not None:
                self.scheduler.remove(sample)

    def check(self, plan: StepPlan) -> None:
        """Columns against what is built from the sequences one by one."""
        if not len(plan):
            return
        by_columns, one_by_one = (
            build_batch(plan, LAYOUT.block_size),
            build_batch(apart(plan), LAYOUT.block_size),
        )
        for name in by_columns.__dataclass_fields__:
            found, wanted = getattr(by_columns, name), getattr(one_by_one, name)
            assert found.tolist() == wanted.tolist(), name
        streams = plan.streams
        found = streams.sampling(EOS)
        wanted = columns_of([row_of(sequence, EOS) for sequence in streams.sequences])
        for name in found.settings.dtype.names:
            assert np.array_equal(found.settings[name], wanted.settings[name]), name
        assert found.positions.tolist() == wanted.positions.tolist()
        assert found.adjusted == wanted.adjusted
        assert streams.traits["num_cached_tokens"].tolist() == [
            s.num_cached_tokens for s in streams.sequences
        ]
        held = [sequence.block_table for sequence in self.scheduler.running]
        assert self.scheduler.num_held_slots == sum(map(len, held)) * LAYOUT.block_size
        computed = sum(sequence.num_computed_tokens for sequence in self.scheduler.running)
        assert self.scheduler.num_computed_tokens == computed


def apart(plan: StepPlan) -> StepPlan:
    """The same step with each stream as a chunk."""
    return StepPlan(plan.scheduled)


REQUESTS = st.builds(
    lambda num_prompt, prefix, num_samples, fields: replace(
        make_request(num_prompt, first=prefix * 100, num_samples=num_samples),
        sampling=SamplingParams(seed=5, **fields),
    ),
    st.integers(1, 20),
    st.integers(0, 2),
    st.integers(1, 3),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 14),
            "min_tokens": st.sampled_from([0, 0, 2, 5]),
            "stop_token_ids": st.sampled_from([(), (4,), (4, 5, 6)]),
            "ignore_eos": st.booleans(),
            "temperature": st.sampled_from([0.0, 0.7]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "logprobs": st.sampled_from([None, 2]),
        }
    ),
)
ACTS = st.one_of(
    st.tuples(st.just("add"), REQUESTS, st.lists(st.integers(0, 9), max_size=4).map(tuple)),
    st.tuples(st.just("step"), st.booleans().map(lambda fails: not fails)),
    st.tuples(st.just("steps"), st.integers(1, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 10)),
)


@settings(max_examples=150, deadline=None)
@given(acts=st.lists(ACTS, max_size=14), num_blocks=st.integers(9, 20), draws=st.data())
def test_columns_equal_what_is_built_from_the_sequences(
    acts: list[tuple],
    num_blocks: int,
    draws: st.DataObject,  # type: ignore[type-arg]
) -> None:
    room = Room(num_blocks, max_num_seqs=4)
    for act, *values in acts:
        if act == "add":
            room.add(*values)
        elif act == "step":
            room.step(draws, *values)
        elif act == "steps":
            for _ in range(values[0]):
                room.step(draws, True)
        elif here := [*room.scheduler.running, *room.scheduler.waiting]:
            room.scheduler.remove(here[values[0] % len(here)])
    for _ in range(400):
        if not room.scheduler.has_work:
            return
        room.step(draws, True)
    raise AssertionError("not all finished")


def test_a_stream_that_is_preempted_leaves_its_row_and_comes_back_to_it() -> None:
    room = Room(num_blocks=6, max_num_seqs=4)
    old, new = make_request(7, "old", max_tokens=12), make_request(7, "new", first=100, max_tokens=12)
    for request in (old, new):
        room.scheduler.add(new_sequence(request, 0, (), MAX_CONTEXT))
    seen: set[tuple[int, ...]] = set()
    for _ in range(60):
        plan = room.scheduler.schedule()
        room.check(plan)
        room.scheduler.advance(plan, plan.streams.num_tokens % 2)
        seen.add(tuple(sequence.num_preemptions for sequence in plan.streams.sequences))
        for item in plan.chunks:
            if item.sequence.num_uncomputed_tokens == 0:
                item.sequence.append(7)
        for sequence in plan.streams.sequences:
            if sequence.num_output_tokens == 12:
                room.scheduler.remove(sequence)
        room.scheduler.check()
    assert not room.scheduler.has_work
    assert room.scheduler.num_preemptions > 0
    assert any(1 in preemptions for preemptions in seen), "the preempted one never was a stream again"
