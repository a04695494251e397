"""SamplingBatch: what each row of a step asks of the sampler, as arrays on the device.

Owns the layout of a row's words, which kernels read by column; `sampling_pack` fills it. Any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl

from engine.sampling.noise import row_keys

ROW = np.dtype(
    [
        ("presence", "f8"),
        ("frequency", "f8"),
        ("temperature", "f4"),  # 0 is greedy
        ("top_p", "f4"),  # infinite is off
        ("depth", "f4"),  # -log(min_p): a token whose scaled logit lies deeper below the best is dropped
        ("repetition", "f4"),
        ("top_k", "i4"),  # 0 is off
        ("key", "u4", 2),  # of the noise, before the position
        ("position", "i4"),  # in the output; also the number of output tokens
        ("num_prompt", "i4"),
        ("history", "i4"),  # where the row's prompt starts in `SamplingBatch.history`; the output follows it
        ("count_slot", "i4"),  # the row of counts that penalties use, -1: none
        ("cut_slot", "i4"),  # the row of candidates that top-k and top-p use, -1: none
        ("bias_start", "i4"),
        ("bias_end", "i4"),
        ("mask_start", "i4"),
        ("mask_end", "i4"),
        ("num_top", "i4"),  # log-probabilities wanted, -1: not even the token's
    ],
    align=True,  # whole doubles
)


def _column(name: str) -> tl.constexpr:
    assert ROW.fields is not None
    dtype, offset = ROW.fields[name][:2]
    return tl.constexpr(int(offset) // dtype.base.itemsize)


ROW_WORDS = tl.constexpr(ROW.itemsize // 4)
ROW_DOUBLES = tl.constexpr(ROW.itemsize // 8)
PRESENCE, FREQUENCY = _column("presence"), _column("frequency")  # in doubles, all others in words
TEMPERATURE, TOP_P, DEPTH, REPETITION = (
    _column(name) for name in ("temperature", "top_p", "depth", "repetition")
)
TOP_K, NUM_PROMPT, HISTORY, NUM_TOP = (
    _column(name) for name in ("top_k", "num_prompt", "history", "num_top")
)
KEY, POSITION = _column("key"), _column("position")
COUNT_SLOT, CUT_SLOT = _column("count_slot"), _column("cut_slot")
BIAS_START, BIAS_END = _column("bias_start"), _column("bias_end")
MASK_START, MASK_END = _column("mask_start"), _column("mask_end")


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step on the device. `table` is int32 `[num_rows, ROW_WORDS]`; the rest are ragged lists
    that it points into. The counts are the host's: they size buffers and skip kernels nobody needs.
    """

    vocab_size: int
    table: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor  # float32
    mask_ids: torch.Tensor
    history: torch.Tensor
    is_adjusted: bool
    num_counted: int  # rows with penalties
    num_cut: int  # rows with top-k or top-p
    num_top: int  # the most log-probabilities that a row wants

    def floats(self, column: tl.constexpr) -> torch.Tensor:
        """A column as float32 `[num_rows]`."""
        return self.table.view(torch.float32)[:, column.value]

    def doubles(self, column: tl.constexpr) -> torch.Tensor:
        return self.table.view(torch.float64)[:, column.value]

    def ints(self, column: tl.constexpr) -> torch.Tensor:
        return self.table[:, column.value]

    def noise_keys(self) -> torch.Tensor:
        """The rows' keys as `engine.sampling.noise` uses them: int32 `[num_rows, 2]`. Waits for the
        device.
        """
        keys = self.table[:, KEY.value : KEY.value + 2].cpu().numpy().view(np.uint32)
        return row_keys(keys, self.ints(POSITION).cpu().numpy().astype(np.int64), self.table.device)
