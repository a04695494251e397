"""Packing: the sampler's columns become the arrays of a `SamplingBatch`, in one copy to the device.

Row by row only where bias, penalties or the mask change the logits. Decides nothing about tokens. Used on the
step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.sampling_table import ROW, ROW_WORDS, SamplingBatch
from engine.sampling.row import SamplingRow
from engine.sampling.settings import SamplingColumns

_MIN_TEMPERATURE = 1e-30  # still a normal float32

_Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ResidentHistory:
    """Token ids that are on the device already: int32 `tokens`, in which the prompt of row i starts at
    `starts[i]` and its output follows.

    With it, no token ids of the rows are read: the newest may still be on its way.
    """

    tokens: torch.Tensor
    starts: Sequence[int] | NDArray[np.int64]


def pack(
    columns: SamplingColumns,
    vocab_size: int,
    device: torch.device,
    resident: ResidentHistory | None = None,
) -> SamplingBatch:
    """The rows as one copy to `device`, which the host does not wait for."""
    table = _numbers(columns, vocab_size)
    lists = _Lists()
    for index, row in columns.adjusted.items():
        _adjust(table[index : index + 1], row, lists, vocab_size, resident is None)
    if resident is not None:
        table["history"] = resident.starts
    is_counted = table["count_slot"] >= 0
    table["count_slot"] = _slots(is_counted)
    parts = [table.view(np.int32), *(part.joined() for part in lists.all)]
    words, bias_ids, bias_values, mask_ids, history = _moved(parts, device)
    return SamplingBatch(
        vocab_size=vocab_size,
        table=words.view(len(columns), ROW_WORDS.value),
        bias_ids=bias_ids,
        bias_values=bias_values.view(torch.float32),
        mask_ids=mask_ids,
        history=history if resident is None else resident.tokens,
        is_adjusted=len(columns.adjusted) > 0,
        num_counted=int(is_counted.sum()),
        num_cut=int((table["cut_slot"] >= 0).sum()),
        num_top=int(table["num_top"].max(initial=-1)),
    )


class _Ragged:
    """Lists of int32, one behind the other."""

    def __init__(self) -> None:
        self._parts: list[_Words] = []
        self._size = 0

    def add(self, part: _Words) -> tuple[int, int]:
        """Where `part` starts and ends."""
        start = self._size
        self._parts.append(part)
        self._size += len(part)
        return start, self._size

    def joined(self) -> _Words:
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.int32)


class _Lists:
    """What rows point to."""

    def __init__(self) -> None:
        self.bias_ids, self.bias_values, self.mask_ids, self.history = (_Ragged() for _ in range(4))

    @property
    def all(self) -> tuple[_Ragged, ...]:
        return self.bias_ids, self.bias_values, self.mask_ids, self.history


def _numbers(columns: SamplingColumns, vocab_size: int) -> NDArray[np.void]:
    """The table, all but what concerns adjusted rows."""
    settings = columns.settings
    table = np.zeros(len(columns), ROW)
    is_greedy = settings["temperature"] == 0.0
    top_k, top_p = settings["top_k"], settings["top_p"]
    table["temperature"] = np.where(is_greedy, 0.0, np.maximum(settings["temperature"], _MIN_TEMPERATURE))
    table["top_k"] = np.where((top_k > 0) & (top_k < vocab_size), top_k, 0)
    table["top_p"] = np.where(top_p < 1.0, top_p, np.inf)
    table["depth"] = np.where(is_greedy, np.inf, -settings["log_min_p"])
    table["key"] = settings["key"]
    table["position"] = columns.positions
    table["num_top"] = np.minimum(settings["num_logprobs"], vocab_size)
    table["count_slot"] = -1
    table["cut_slot"] = _slots(~is_greedy & ((table["top_k"] > 0) | (top_p < 1.0)))
    return table


def _adjust(
    record: NDArray[np.void], row: SamplingRow, lists: _Lists, vocab_size: int, is_history_moved: bool
) -> None:
    """Write what changes the logits of `row` into its `record` (an array of one) and into `lists`."""
    params, position = row.params, int(record["position"][0])
    total: dict[int, float] = {}
    for token_id, value in params.logit_bias:
        total[token_id] = total.get(token_id, 0.0) + value
    record["bias_start"], record["bias_end"] = lists.bias_ids.add(np.array(list(total), np.int32))
    lists.bias_values.add(np.array(list(total.values()), np.float32).view(np.int32))
    if position < params.min_tokens:
        ends = sorted(row.eos_token_ids.union(params.stop_token_ids))
        masked = np.array([i for i in ends if 0 <= i < vocab_size], np.int32)
        record["mask_start"], record["mask_end"] = lists.mask_ids.add(masked)
    has_counts = position > 0 and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0)
    if params.repetition_penalty != 1.0 or has_counts:
        record["count_slot"] = 0
        record["num_prompt"] = row.num_prompt_tokens
        record["presence"], record["frequency"] = params.presence_penalty, params.frequency_penalty
        record["repetition"] = params.repetition_penalty
        if is_history_moved:
            record["history"], _ = lists.history.add(np.array(row.token_ids, np.int32))


def _slots(is_wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers from 0 on for the rows that want one, -1 for the others."""
    return np.where(is_wanted, np.cumsum(is_wanted) - 1, -1)


def _moved(parts: Sequence[_Words], device: torch.device) -> list[torch.Tensor]:
    """All parts in one transfer, from pinned memory where there is a device to wait for."""
    joined = torch.from_numpy(np.concatenate(parts))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return [joined[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]
