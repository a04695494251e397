"""StepPlan and StepOutput: one iteration, what to run and what came out.

Both schedulers emit the same plan; the runner knows only this. Values made and used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.request import TokenLogprob
from engine.sampling.sampled import SampledToken
from engine.sequence import Sequence

__all__ = ["SampledToken", "ScheduledSequence", "StepOutput", "StepPlan"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `num_scheduled_tokens` tokens of `sequence`, starting at its `num_computed_tokens`.

    The next token is sampled exactly when this reaches the end of `token_ids` and `is_sampled` (a prompt
    with `max_tokens` 0 is only read). `sample_indices`: several samples drawn from the same last logits
    (the API's `n` at the first token); empty means the sequence's own.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    is_sampled: bool = True
    sample_indices: tuple[int, ...] = ()

    @property
    def reaches_end(self) -> bool:
        return self.sequence.num_computed_tokens + self.num_scheduled_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Sequences of this step in order,

    And block copies (source, target) to make before it (copy on write).
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` are the tokens sampled for `plan.scheduled[i]` (none if it did not reach its end).

    `prompt_logprobs[i]` are those of the prompt tokens whose predecessor was computed in this step, in
    order (requests that ask only). The runner does not change sequences: the worker applies the output.
    """

    sampled: tuple[tuple[SampledToken, ...], ...]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
