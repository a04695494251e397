"""RunningStep: a step that was started; what came out of it, once somebody waits.

Owns how the sampled columns are told apart into streams and chunks. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.request import TokenLogprob
from engine.executor import Pending
from engine.sampling import SampledColumns
from engine.step import StepOutput

PendingLogprobs = Pending[Sequence[TokenLogprob]]


@dataclass(frozen=True, slots=True, eq=False)
class RunningStep:
    """`drawn` has a row for each stream, then one for each of `samples[i]`, the samples drawn for chunk i.

    `prompt_logprobs[i]` are those of chunk i, part after part.
    """

    num_streams: int
    drawn: Pending[SampledColumns]
    samples: tuple[tuple[int, ...], ...]
    prompt_logprobs: Mapping[int, list[PendingLogprobs]]

    def result(self) -> StepOutput:
        """Wait for the step. Raises StepFailed when logits are not finite; then nothing of it counts."""
        drawn = self.drawn.settled()
        row, sampled = self.num_streams, []
        for samples in self.samples:
            sampled.append(tuple(drawn.token(row + index, sample) for index, sample in enumerate(samples)))
            row += len(samples)
        streams = drawn if row == self.num_streams else drawn.take(np.arange(self.num_streams))
        logprobs = {
            index: tuple(entry for part in parts for entry in part.settled())
            for index, parts in self.prompt_logprobs.items()
        }
        return StepOutput(tuple(sampled), logprobs, streams)
