"""The facts of a sample: what is out is never sent twice and never contradicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import StepFailed
from core.request import FinishReason, TokenDelta, TokenLogprob
from router.sample_record import SampleRecord

_spans = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=20)


@given(_spans)
def test_whatever_is_repeated_or_skipped_the_tokens_are_the_sequence_without_gaps(
    spans: list[tuple[int, int]],
) -> None:
    record, seen = SampleRecord(0), []
    for position, length in spans:
        token_ids = tuple(range(position, position + length))
        logprobs = tuple(TokenLogprob(token_id, 0.0) for token_id in token_ids)
        delta = TokenDelta(0, position, token_ids, logprobs)
        if position > len(seen):
            with pytest.raises(StepFailed):
                record.take(delta)
            continue
        fresh = record.take(delta)
        if fresh is not None:
            assert fresh.position == len(seen)
            assert tuple(entry.token_id for entry in fresh.logprobs) == fresh.token_ids
            seen += fresh.token_ids
    assert record.emitted == seen == list(range(len(seen)))


def test_a_token_that_contradicts_one_that_is_out_is_an_error() -> None:
    record = SampleRecord(0)
    record.take(TokenDelta(0, 0, (5, 6)))
    with pytest.raises(StepFailed):
        record.take(TokenDelta(0, 1, (7, 8)))
    assert record.start().emitted == (5, 6)


def test_a_finish_reason_without_tokens_is_news() -> None:
    record = SampleRecord(0)
    assert record.take(TokenDelta(0, 0)) is None
    fresh = record.take(TokenDelta(0, 0, finish_reason=FinishReason.LENGTH))
    assert fresh is not None
    assert fresh.finish_reason is FinishReason.LENGTH
