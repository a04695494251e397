"""Bias, penalties and the minimum-length mask: what changes logits before the temperature.

Works on a copy of the rows, in place, with one gather and scatter for each kind; nothing is kept between
calls, the history is counted anew from the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.row import SamplingRow

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.floating]


class _Entries:
    """Scattered (row, token id) → value, gathered on the host and moved once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._indexes: list[_Ints] = []
        self._values: list[_Floats] = []

    def add(self, row: int, token_ids: _Ints, values: _Floats | float) -> None:
        self._indexes.append(row * self._vocab_size + token_ids)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), token_ids.shape))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Flat indexes (int64) and values (float32), or None if there are none."""
        if not self._indexes:
            return None
        indexes = torch.from_numpy(np.concatenate(self._indexes))
        values = torch.from_numpy(np.concatenate(self._values).astype(np.float32))
        return indexes.to(device), values.to(device)


def adjust(logits: torch.Tensor, rows: Mapping[int, SamplingRow]) -> None:
    """Apply to `rows` of contiguous float32 logits `[num_rows, vocab]`, in place and in this order: bias,
    repetition penalty (tokens of prompt and output), presence and frequency penalty (tokens of the output),
    mask of end-of-sequence and stop ids while fewer than `min_tokens` tokens are out.

    Repetition divides a positive logit and multiplies a negative one (Keskar et al., CTRL, 2019); presence
    and frequency subtract `presence + frequency * count` as the OpenAI API defines them.
    """
    vocab_size = logits.shape[-1]
    bias, repetition, repeated, masked = (_Entries(vocab_size) for _ in range(4))
    for index, row in rows.items():
        _collect(index, row, vocab_size, bias, repetition, repeated, masked)
    flat = logits.view(-1)
    if (entries := bias.on(logits.device)) is not None:
        flat[entries[0]] += entries[1]
    if (entries := repetition.on(logits.device)) is not None:
        old = flat[entries[0]]
        flat[entries[0]] = torch.where(old > 0, old / entries[1], old * entries[1])
    if (entries := repeated.on(logits.device)) is not None:
        flat[entries[0]] -= entries[1]
    if (entries := masked.on(logits.device)) is not None:
        flat[entries[0]] = entries[1]


def _collect(
    index: int,
    row: SamplingRow,
    vocab_size: int,
    bias: _Entries,
    repetition: _Entries,
    repeated: _Entries,
    masked: _Entries,
) -> None:
    params = row.params
    if params.logit_bias:
        total: dict[int, float] = {}
        for token_id, value in params.logit_bias:
            total[token_id] = total.get(token_id, 0.0) + value
        bias.add(index, np.array(list(total), np.int64), np.array(list(total.values()), np.float64))
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array(row.token_ids, np.int64))
        repetition.add(index, seen, params.repetition_penalty)
    if (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and row.position > 0:
        output, counts = np.unique(
            np.array(row.token_ids[row.num_prompt_tokens :], np.int64), return_counts=True
        )
        repeated.add(index, output, params.presence_penalty + params.frequency_penalty * counts)
    if row.position < params.min_tokens:
        ends = sorted(row.eos_token_ids.union(params.stop_token_ids))
        masked.add(index, np.array([i for i in ends if 0 <= i < vocab_size], np.int64), -np.inf)
