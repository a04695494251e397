"""StepPlan and StepOutput: one iteration, what to run and what came out.

Both schedulers emit the same plan; the runner knows only this. Values made and used on the step thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from core.request import TokenLogprob
from engine.sampling.sampled import SampledColumns, SampledToken, no_tokens
from engine.sequence import Sequence
from engine.stream_step import NO_STREAMS, StreamStep

__all__ = ["SampledToken", "ScheduledSequence", "StepLimits", "StepOutput", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a worker will ask for: what memory is measured and steps are recorded with.

    `is_decoding`: many of its steps are one token for each of several sequences, and so worth recording.
    """

    max_tokens: int = 512
    max_sequences: int = 64
    is_decoding: bool = True


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
    """What to compute: sequences with any number of tokens one by one, running streams as columns.

    And block copies (source, target) to make before it (copy on write).
    """

    chunks: tuple[ScheduledSequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    streams: StreamStep = NO_STREAMS

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.streams) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.streams) + sum(item.num_scheduled_tokens for item in self.chunks)

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """All sequences one by one, streams first: an object for each, so not for what is done each step."""
        return (*(ScheduledSequence(sequence, 1) for sequence in self.streams.sequences), *self.chunks)

    def apart(self) -> Iterator[tuple[Sequence, StepPlan]]:
        """Each sequence with a plan for it alone."""
        for index, sequence in enumerate(self.streams.sequences):
            yield sequence, StepPlan(streams=self.streams.take(np.array([index])))
        for item in self.chunks:
            yield item.sequence, StepPlan((item,))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` are the tokens sampled for `plan.chunks[i]` (none if it did not reach its end), row i of
    `streams` is the one for stream i.

    `prompt_logprobs[i]` are those of the prompt tokens of chunk i whose predecessor was computed in this
    step, in order (requests that ask only). The runner does not change sequences: the worker applies the
    output.
    """

    sampled: tuple[tuple[SampledToken, ...], ...] = ()
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    streams: SampledColumns = field(default_factory=no_tokens)
