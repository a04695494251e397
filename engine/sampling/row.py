"""SamplingRow: all that one row of logits needs to become a token. A value; no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from core.request import SamplingParams
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One token to sample.

    `token_ids` is prompt + output so far, of which the first `num_prompt_tokens` are prompt; it is only read
    during the call. Two rows that are equal in all fields and in their logits give the same token, wherever
    and beside whatever they run.
    """

    params: SamplingParams
    sample_index: int
    token_ids: Items[int]
    num_prompt_tokens: int
    eos_token_ids: frozenset[int]

    @property
    def position(self) -> int:
        """Output index of the token to sample."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def is_adjusted(self) -> bool:
        """Whether bias, penalties or the mask change the logits."""
        params = self.params
        return (
            bool(params.logit_bias)
            or params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or self.position < params.min_tokens
        )


def row_of(sequence: Sequence, eos_token_ids: frozenset[int], sample_index: int | None = None) -> SamplingRow:
    """The row for the next token of `sequence`, or of another sample that starts from the same tokens."""
    return SamplingRow(
        params=sequence.request.sampling,
        sample_index=sequence.sample_index if sample_index is None else sample_index,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        eos_token_ids=eos_token_ids,
    )
