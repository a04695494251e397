"""StreamStep: the running streams of one step, as columns.

A stream is a sequence that has output and lacks only its last token: a step computes that token and samples
the next. Owns the arithmetic that all streams share: output index, end of a sample, rows to sample. A value,
a copy of what `StreamRows` keeps; made and used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.sampling.row import SamplingRow, row_of
from engine.sampling.settings import SETTINGS, Ints, Records, SamplingColumns, is_adjusted
from engine.sequence import Sequence

TRAITS = np.dtype(
    [
        ("sampling", SETTINGS),
        ("sample_index", np.int64),
        ("num_prompt_tokens", np.int64),
        ("num_cached_tokens", np.int64),
        ("num_unending_tokens", np.int64),  # up to so many tokens, `end_ids` do not count
        ("max_tokens", np.int64),  # prompt and output at most
    ]
)
"""What stays the same of a stream from step to step."""

UNKNOWN_TOKEN = -1
"""In place of a token that a step which still runs samples."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamStep:
    """Row i belongs to `sequences[i]`, oldest first.

    `block_tables[i]` names the blocks of its `num_tokens[i]` tokens, then its first block, so that each entry
    is one that it may read. `end_ids[i]` are the ids that end it, padded with -1. `slots` are its places in
    StreamRows.
    """

    sequences: tuple[Sequence, ...]
    slots: Ints  # [num_streams]
    token_ids: Ints  # [num_streams], the last ones, which this step computes
    num_tokens: Ints  # [num_streams], with that one
    block_tables: Ints  # [num_streams, max_blocks]
    traits: Records  # [num_streams] of TRAITS
    end_ids: Ints  # [num_streams, max_end_ids]

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def positions(self) -> Ints:
        """Output indexes of the tokens that this step samples."""
        positions: Ints = self.num_tokens - self.traits["num_prompt_tokens"]
        return positions

    def take(self, rows: Ints) -> StreamStep:
        """Some of the streams."""
        return StreamStep(
            sequences=tuple([self.sequences[row] for row in rows.tolist()]),
            slots=self.slots[rows],
            token_ids=self.token_ids[rows],
            num_tokens=self.num_tokens[rows],
            block_tables=self.block_tables[rows],
            traits=self.traits[rows],
            end_ids=self.end_ids[rows],
        )

    def sampling(self, eos_token_ids: frozenset[int]) -> SamplingColumns:
        """The rows to sample. Where the last token is unknown, it is so in the row's history, too."""
        settings, positions = self.traits["sampling"], self.positions
        rows: dict[int, SamplingRow] = {}
        for index in np.flatnonzero(is_adjusted(settings, positions)).tolist():
            row = row_of(self.sequences[index], eos_token_ids)
            if self.token_ids[index] == UNKNOWN_TOKEN:
                assert not settings["needs_history"][index], "penalties need a history that the host knows"
                row = replace(row, token_ids=[*row.token_ids, UNKNOWN_TOKEN])
            rows[index] = row
        return SamplingColumns(settings, positions, rows)

    def known(self) -> StreamStep:
        """The same rows, once the step before has ended and its tokens are those of the sequences."""
        last = [sequence.token_ids[-1] for sequence in self.sequences]
        return replace(self, token_ids=np.array(last, dtype=np.int64))

    def is_ended_by(self, token_ids: Ints) -> NDArray[np.bool_]:
        """Which streams end with these tokens, by `finish_reason_after`."""
        num_tokens = self.num_tokens + 1
        is_end_id = (self.end_ids == token_ids[:, None]).any(axis=1)
        is_stopped = is_end_id & (num_tokens > self.traits["num_unending_tokens"])
        is_ended: NDArray[np.bool_] = is_stopped | (num_tokens >= self.traits["max_tokens"])
        return is_ended


def _no_ints(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int64)


NO_STREAMS = StreamStep(
    sequences=(),
    slots=_no_ints(0),
    token_ids=_no_ints(0),
    num_tokens=_no_ints(0),
    block_tables=_no_ints(0, 1),
    traits=np.zeros(0, dtype=TRAITS),
    end_ids=_no_ints(0, 1),
)
