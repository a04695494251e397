"""first_tokens: what the client gets from prefill, one delta per sample. A pure function."""

from __future__ import annotations

from collections.abc import Sequence as Items

from core.request import FinishReason, TokenDelta
from engine.sequence import Sequence, finish_reason_after
from engine.step import SampledToken


def first_tokens(
    sequence: Sequence,
    sample_indices: tuple[int, ...],
    sampled: Items[SampledToken],
    eos_token_ids: frozenset[int],
) -> tuple[TokenDelta, ...]:
    """The deltas of `sequence`, whose tokens are all computed, in the order of `sample_indices`.

    `sampled` has one token per sample, or none when the prompt was only to be read: then each delta finishes
    by LENGTH without a token.
    """
    if not sampled:
        return tuple(_delta(sequence, index, None, FinishReason.LENGTH) for index in sample_indices)
    tokens = {token.sample_index: token for token in sampled}
    assert tokens.keys() == set(sample_indices), "one token is sampled for each sample"
    return tuple(
        _delta(sequence, index, tokens[index], _finish_reason(sequence, index, tokens[index], eos_token_ids))
        for index in sample_indices
    )


def _delta(
    sequence: Sequence, sample_index: int, token: SampledToken | None, reason: FinishReason | None
) -> TokenDelta:
    return TokenDelta(
        sample_index=sample_index,
        position=sequence.num_output_tokens,
        token_ids=() if token is None else (token.token_id,),
        logprobs=() if token is None or token.logprob is None else (token.logprob,),
        finish_reason=reason,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def _finish_reason(
    sequence: Sequence, sample_index: int, token: SampledToken, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Whether `token` ends the sample. `sequence` keeps its length, which is that of the ticket."""
    continued = Sequence(
        sequence.request, sample_index, [*sequence.token_ids, token.token_id], sequence.max_context
    )
    return finish_reason_after(continued, eos_token_ids)
