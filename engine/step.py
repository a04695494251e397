"""StepPlan and StepOutput: one iteration, what to run and what came out.

Both schedulers emit the same plan; the runner knows only this. Values made and used on the step thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from core.request import TokenLogprob
from engine.sampling.sampled import SampledColumns, SampledToken, no_tokens
from engine.sampling.settings import Ints
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

    @property
    def num_slots(self) -> int:
        """Rows of streams grow by doubling (StreamRows), so a slot is less than this."""
        return max(16, 2 * self.max_sequences)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `num_scheduled_tokens` tokens of `sequence`, starting at its `num_computed_tokens`, or where
    `starts_at` says, behind what a step that still runs computes.

    The next token is sampled exactly when this reaches the end of `token_ids` and `is_sampled` (a prompt
    with `max_tokens` 0 is only read). `sample_indices`: several samples drawn from the same last logits
    (the API's `n` at the first token); empty means the sequence's own.
    """

    sequence: Sequence
    num_scheduled_tokens: int
    is_sampled: bool = True
    sample_indices: tuple[int, ...] = ()
    starts_at: int | None = None

    @property
    def num_context_tokens(self) -> int:
        """Tokens that are computed when this runs."""
        return self.sequence.num_computed_tokens if self.starts_at is None else self.starts_at

    @property
    def reaches_end(self) -> bool:
        return self.num_context_tokens + self.num_scheduled_tokens == self.sequence.num_tokens


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

    @property
    def must_be_known(self) -> bool:
        """Whether the next step cannot be planned before the result of this one is read.

        So it is when a prompt is read to its end, since samples part at its first token, and when a stream's
        penalties have to know its new token. What else a step brings is one more token for each stream.
        """
        needs_history = self.streams.traits["sampling"]["needs_history"].any()
        return bool(needs_history) or any(item.reaches_end for item in self.chunks)

    def known(self) -> StepPlan:
        """The same step, once the one before it has ended."""
        return replace(self, streams=self.streams.known())

    def apart(self) -> Iterator[tuple[Sequence, StepPlan]]:
        """Each sequence with a plan for it alone."""
        for index, sequence in enumerate(self.streams.sequences):
            yield sequence, StepPlan(streams=self.streams.take(np.array([index])))
        for item in self.chunks:
            yield item.sequence, StepPlan((item,))

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.streams.sequences or any(item.sequence is sequence for item in self.chunks)

    def rows_without(self, gone: Collection[Sequence]) -> tuple[Ints, tuple[int, ...]]:
        """Indexes of the streams and of the chunks whose sequences are not in `gone`."""
        streams = [index for index, item in enumerate(self.streams.sequences) if item not in gone]
        chunks = tuple(index for index, item in enumerate(self.chunks) if item.sequence not in gone)
        return np.array(streams, dtype=np.int64), chunks

    def take(self, streams: Ints, chunks: tuple[int, ...]) -> StepPlan:
        """Some of the streams and chunks."""
        return StepPlan(tuple(self.chunks[i] for i in chunks), self.copies, self.streams.take(streams))


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

    def take(self, streams: Ints, chunks: tuple[int, ...]) -> StepOutput:
        """The output of the same part of the plan."""
        logprobs = {
            place: self.prompt_logprobs[index]
            for place, index in enumerate(chunks)
            if index in self.prompt_logprobs
        }
        return StepOutput(tuple(self.sampled[i] for i in chunks), logprobs, self.streams.take(streams))
