"""SampledColumns and SampledToken: what the sampler answers, for many rows or for one. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; `logprob` only if the request asked for logprobs.

    `gap` is the top-two gap of the perturbed scores (greedy: logits), the measure of a near tie.
    """

    sample_index: int
    token_id: int
    logprob: TokenLogprob | None
    gap: float


@dataclass(frozen=True, slots=True, eq=False)
class SampledColumns:
    """Sampled tokens row by row; `logprobs` for the rows that asked. `gaps`: see SampledToken."""

    token_ids: NDArray[np.int64]  # [num_rows]
    gaps: NDArray[np.float64]  # [num_rows]
    logprobs: Mapping[int, TokenLogprob]

    def __len__(self) -> int:
        return len(self.token_ids)

    def token(self, row: int, sample_index: int) -> SampledToken:
        return SampledToken(
            sample_index, int(self.token_ids[row]), self.logprobs.get(row), float(self.gaps[row])
        )

    def settled(self) -> SampledColumns:
        """Itself: see `engine.executor.Pending`."""
        return self

    def take(self, rows: NDArray[np.int64]) -> SampledColumns:
        """Some of the rows."""
        logprobs = self.logprobs
        if logprobs:
            places = {row: place for place, row in enumerate(rows.tolist())}
            logprobs = {places[row]: logprob for row, logprob in logprobs.items() if row in places}
        return SampledColumns(self.token_ids[rows], self.gaps[rows], logprobs)


def no_tokens() -> SampledColumns:
    """Columns without a row."""
    return SampledColumns(np.zeros(0, dtype=np.int64), np.zeros(0), {})
