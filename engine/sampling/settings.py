"""SamplingColumns: the rows of a step to sample, as arrays.

Owns how one row's parameters become a record of numbers that stay the same from token to token. Values; no
tensors, no history: that is given only for the rows whose logits it changes. Used on the step thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.request import SamplingParams
from engine.sampling.noise import sample_key
from engine.sampling.row import SamplingRow

Ints = NDArray[np.int64]
Records = NDArray[np.void]

SETTINGS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("log_min_p", np.float64),  # -inf: off
        ("key", np.uint32, 2),  # of the noise, before the position
        ("num_logprobs", np.int64),  # -1: not wanted
        ("min_tokens", np.int64),
        ("is_penalized", np.bool_),  # bias or penalties change the logits, at any position
        ("needs_history", np.bool_),  # penalties do, by the tokens before
    ]
)


def settings_of(params: SamplingParams, sample_index: int) -> tuple[Any, ...]:
    """One record of SETTINGS."""
    needs_history = (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        sample_key(params.seed, sample_index),
        -1 if params.logprobs is None else params.logprobs,
        params.min_tokens,
        bool(params.logit_bias) or needs_history,
        needs_history,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Row i is the token at output index `positions[i]` of a sample with `settings[i]`.

    `adjusted` holds, by row, those whose logits are changed by bias, penalties or the mask (`is_adjusted`).
    """

    settings: Records  # [num_rows] of SETTINGS
    positions: Ints  # [num_rows]
    adjusted: Mapping[int, SamplingRow]

    def __len__(self) -> int:
        return len(self.positions)


def is_adjusted(settings: Records, positions: Ints) -> NDArray[np.bool_]:
    """Whether bias, penalties or the mask of the first `min_tokens` change the logits, for each row."""
    changed: NDArray[np.bool_] = settings["is_penalized"] | (positions < settings["min_tokens"])
    return changed


def columns_of(rows: Items[SamplingRow]) -> SamplingColumns:
    """The same rows as columns."""
    settings = np.array([settings_of(row.params, row.sample_index) for row in rows], dtype=SETTINGS)
    positions = np.array([row.position for row in rows], dtype=np.int64)
    changed = np.flatnonzero(is_adjusted(settings, positions)).tolist()
    return SamplingColumns(settings, positions, {index: rows[index] for index in changed})


def join_columns(first: SamplingColumns, second: SamplingColumns) -> SamplingColumns:
    """The rows of both, one after the other."""
    if not len(second):
        return first
    later = {len(first) + index: row for index, row in second.adjusted.items()}
    return SamplingColumns(
        np.concatenate([first.settings, second.settings]),
        np.concatenate([first.positions, second.positions]),
        {**first.adjusted, **later},
    )
