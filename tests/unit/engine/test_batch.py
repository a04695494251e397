"""A plan becomes flat arrays in which every token knows its position and its slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.ids import RequestId
from core.request import Request, SamplingParams
from engine.batch import build_batch
from engine.sequence import Sequence
from engine.step import ScheduledSequence, StepPlan

_BLOCK_SIZE = 4


def scheduled(num_context: int, num_new: int, num_later: int, first_block: int) -> ScheduledSequence:
    num_tokens = num_context + num_new + num_later
    token_ids = [first_block * 1000 + i for i in range(num_tokens)]
    request = Request(RequestId("r"), tuple(token_ids), SamplingParams(max_tokens=1, seed=0))
    table = [first_block + i for i in range(-(-num_tokens // _BLOCK_SIZE))]
    return ScheduledSequence(Sequence(request, 0, token_ids, 1000, num_context, block_table=table), num_new)


_COUNTS = st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 5))


@given(st.lists(_COUNTS, min_size=1, max_size=8))
def test_each_scheduled_token_appears_once_at_its_position_and_slot(
    counts: list[tuple[int, int, int]],
) -> None:
    plan = StepPlan(tuple(scheduled(*numbers, first_block=100 * i) for i, numbers in enumerate(counts)))
    batch = build_batch(plan, _BLOCK_SIZE)
    assert batch.num_tokens == plan.num_tokens == len(batch.token_ids) == len(batch.positions)
    for index, row in enumerate(batch.rows_by_plan()):
        item = plan.scheduled[index]
        sequence, context = item.sequence, item.sequence.num_computed_tokens
        assert (batch.num_context[row], batch.num_new[row]) == (context, item.num_scheduled_tokens)
        tokens = slice(batch.starts[row], batch.starts[row] + batch.num_new[row])
        positions = np.arange(context, context + item.num_scheduled_tokens)
        assert batch.positions[tokens].tolist() == positions.tolist()
        assert batch.token_ids[tokens].tolist() == [sequence.token_ids[p] for p in positions]
        assert batch.token_blocks[tokens].tolist() == [
            sequence.block_table[p // _BLOCK_SIZE] for p in positions
        ]
        assert batch.token_offsets[tokens].tolist() == [p % _BLOCK_SIZE for p in positions]


@given(st.lists(_COUNTS, min_size=1, max_size=8))
def test_block_tables_name_only_blocks_of_their_own_sequence(counts: list[tuple[int, int, int]]) -> None:
    plan = StepPlan(tuple(scheduled(*numbers, first_block=100 * i) for i, numbers in enumerate(counts)))
    batch = build_batch(plan, _BLOCK_SIZE)
    for index, row in enumerate(batch.rows_by_plan()):
        table = plan.scheduled[index].sequence.block_table
        needed = -(-int(batch.num_context[row] + batch.num_new[row]) // _BLOCK_SIZE)
        assert batch.block_tables[row, :needed].tolist() == table[:needed]
        assert set(batch.block_tables[row, needed:].tolist()) <= {table[0]}


def test_sequences_that_can_run_together_lie_side_by_side() -> None:
    counts = [(5, 1), (0, 9), (30, 1), (2, 4), (8, 1), (7, 4)]
    plan = StepPlan(tuple(scheduled(*numbers, 0, first_block=100 * i) for i, numbers in enumerate(counts)))
    batch = build_batch(plan, _BLOCK_SIZE)
    assert batch.num_new.tolist() == [9, 4, 4, 1, 1, 1]
    assert batch.num_context.tolist() == [0, 7, 2, 30, 8, 5]
