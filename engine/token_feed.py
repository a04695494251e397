"""TokenFeed: the newest token of each running stream, on the device.

Owns the memory in which a step leaves the tokens it sampled, and from which the next one takes those that the
host does not know yet; on a CPU host and device are the same. A stream's place is its slot in StreamRows.
Used on the step thread.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import Batch, Ints
from engine.gpu.staging import to_device
from engine.stream_step import UNKNOWN_TOKEN, StreamStep

NO_SLOT = -1
"""For a token that comes from the host."""


class TokenFeed:
    """`num_slots` places. Its memory never moves, so that recorded steps can name it."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def keep(self, streams: StreamStep, token_ids: torch.Tensor) -> None:
        """Note `token_ids` int32 `[num_streams]`, the next ones of `streams`."""
        if not len(streams):
            return
        assert streams.slots.max() < len(self._tokens), "more streams than the worker said it would run"
        self._tokens.index_copy_(0, to_device(streams.slots, self._tokens.device), token_ids.long())

    def resolve(self, token_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`token_ids` with those of `slots` (both int64 `[num_tokens]`) where there is one."""
        return torch.where(slots >= 0, self._tokens.index_select(0, slots.clamp(min=0)), token_ids)


def feed_slots(streams: StreamStep, batch: Batch) -> Ints | None:
    """For each token of `batch` the slot that it is to be taken from, or NO_SLOT; None if there is none."""
    is_unknown = streams.token_ids == UNKNOWN_TOKEN
    if not is_unknown.any():
        return None
    slots = np.full(batch.num_tokens, NO_SLOT, dtype=np.int64)
    places = batch.starts[batch.rows_by_plan()[: len(streams)]]
    slots[places[is_unknown]] = streams.slots[is_unknown]
    return slots
