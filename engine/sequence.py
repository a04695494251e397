"""Sequence: the running state of one sample on one worker.

Owned by the worker's step thread; mutable. Holds token ids, the counts and the block table, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.block_hash import BlockHash
from core.request import FinishReason, Request, TokenLogprob


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request.

    `token_ids` is prompt + output so far, emitted tokens of an earlier worker included. KV exists exactly
    for the first `num_computed_tokens`. `block_table[i]` is the pool's block for token slots `[i *
    block_size, (i + 1) * block_size)`; `block_hashes` are the names of the full blocks computed so far (a
    prefix of the table). `num_cached_tokens` counts tokens (prompt, and emitted ones of a resumed sample)
    that were found in the prefix cache at first start. `max_context` is prompt + output at most.
    """

    request: Request
    sample_index: int
    token_ids: list[int]
    max_context: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        """Add a token that was sampled here or is a fact from elsewhere."""
        self.token_ids.append(token_id)


def new_sequence(request: Request, sample_index: int, emitted: tuple[int, ...], max_context: int) -> Sequence:
    """A sequence at its start: nothing computed, emitted tokens read like prompt but counted as output."""
    return Sequence(request, sample_index, [*request.prompt_token_ids, *emitted], max_context)


def finish_reason_after(sequence: Sequence, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Whether the last token of `sequence` ends it.

    End-of-sequence ids count unless `ignore_eos`, stop ids always; both only from `min_tokens` on (the
    sampler masks them before). A token that ends the sequence by STOP is part of `token_ids`. LENGTH at
    `max_tokens` or when the context is full.
    """
    sampling = sequence.request.sampling
    num_output = sequence.num_output_tokens
    if num_output > 0:
        last = sequence.token_ids[-1]
        if num_output > sampling.min_tokens:
            if last in sampling.stop_token_ids:
                return FinishReason.STOP
            if last in eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
    if num_output >= sampling.max_tokens or sequence.num_tokens >= sequence.max_context:
        return FinishReason.LENGTH
    return None
