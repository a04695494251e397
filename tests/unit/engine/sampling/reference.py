"""The sampler's definition, written naively for one row and in float64 but for the noise's place in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from core.request import SamplingParams
from engine.sampling import SamplingRow
from engine.sampling.noise import key_tensor, log_exponential, row_key

EOS = frozenset({2})


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 1, **fields})


def row(
    prompt: list[int] | None = None, output: list[int] | None = None, sample: int = 0, **fields: Any
) -> SamplingRow:
    prompt, output = prompt or [], output or []
    return SamplingRow(params(**fields), sample, [*prompt, *output], len(prompt), EOS)


@dataclass(frozen=True)
class Reference:
    """Adjusted logits, the ids that may be drawn, their probabilities, and the token."""

    adjusted: np.ndarray[Any, np.dtype[np.float64]]
    kept: list[int]
    probabilities: list[float]
    token_id: int


def adjusted_logits(logits: list[float], item: SamplingRow) -> np.ndarray[Any, np.dtype[np.float64]]:
    x = np.array(logits, np.float64)
    wanted = item.params
    for token_id, value in wanted.logit_bias:
        x[token_id] += value
    output = list(item.token_ids[item.num_prompt_tokens :])
    for token_id in set(item.token_ids):
        x[token_id] = (
            x[token_id] / wanted.repetition_penalty
            if x[token_id] > 0
            else x[token_id] * wanted.repetition_penalty
        )
    for token_id in set(output):
        x[token_id] -= wanted.presence_penalty + wanted.frequency_penalty * output.count(token_id)
    if len(output) < wanted.min_tokens:
        for token_id in item.eos_token_ids | set(wanted.stop_token_ids):
            if token_id < len(x):
                x[token_id] = -math.inf
    return x


def reference(logits: list[float], item: SamplingRow) -> Reference:
    """What a sampler does that follows the order bias, penalties, mask, temperature, top-k, top-p, min-p."""
    wanted = item.params
    adjusted = adjusted_logits(logits, item)
    order = sorted(range(len(adjusted)), key=lambda i: (-adjusted[i], i))
    if wanted.temperature == 0:
        return Reference(adjusted, order[:1], [1.0], order[0])
    x = (adjusted - adjusted.max()) / wanted.temperature
    kept = order[: wanted.top_k] if wanted.top_k > 0 else order
    if wanted.top_p < 1.0:
        masses = np.exp(x[kept])
        masses /= masses.sum()
        total, nucleus = 0.0, []
        for token_id, mass in zip(kept, masses, strict=True):
            nucleus.append(token_id)
            total += mass
            if total >= wanted.top_p:
                break
        kept = nucleus
    if wanted.min_p > 0:
        kept = [i for i in kept if math.exp(x[i]) >= wanted.min_p]
    probabilities = np.exp(x[kept])
    probabilities /= probabilities.sum()
    key = key_tensor([row_key(wanted.seed, item.sample_index, item.position)], torch.device("cpu"))
    noise = log_exponential(torch.tensor([kept], dtype=torch.int32), key)[0].tolist()
    scores = {i: x[i] - value for i, value in zip(kept, noise, strict=True)}
    token_id = min(kept, key=lambda i: (-scores[i], i))
    return Reference(adjusted, kept, probabilities.tolist(), token_id)
