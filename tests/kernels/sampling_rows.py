"""Rows with all kinds of parameters, and the comparison with the sampler that defines their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.request import SamplingParams
from engine.kernels.sampling import sample
from engine.kernels.sampling_pack import pack
from engine.kernels.sampling_table import SamplingBatch
from engine.sampling import SampledToken, Sampler, SamplingRow, columns_of

NEAR = 1e-3  # design: below this gap rounding may decide

_CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-6, 0.3, 0.9, 1.0, 2.0],
    "top_p": [1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999],
    "top_k": [0, 0, 1, 2, 5, 40, 10**9],
    "min_p": [0.0, 0.0, 0.02, 0.3, 1.0],
    "repetition_penalty": [1.0, 1.0, 0.7, 1.3],
    "presence_penalty": [0.0, 0.0, -1.0, 1.5],
    "frequency_penalty": [0.0, 0.0, 0.4, -0.2],
    "logit_bias": [(), (), ((3, 100.0),), ((3, -100.0), (4, 2.5), (3, 1.0)), ((2, 50.0),)],
    "min_tokens": [0, 0, 3, 50],
    "stop_token_ids": [(), (3, 7), (10**6,)],
    "logprobs": [None, None, None, 0, 3, 20],
}


def row(prompt: list[int], output: list[int], sample: int = 0, **fields: Any) -> SamplingRow:
    params = SamplingParams(**{"max_tokens": 100, "seed": 1, **fields})
    return SamplingRow(params, sample, [*prompt, *output], len(prompt), frozenset({2}))


def random_rows(seed: int, num: int, vocab_size: int) -> list[SamplingRow]:
    """Rows whose parameters are drawn one by one; histories of up to 19 + 19 tokens with repetitions."""
    draw = random.Random(seed)
    return [
        row(
            [draw.randrange(vocab_size // 9) for _ in range(draw.randrange(20))],
            [draw.randrange(vocab_size // 9) for _ in range(draw.randrange(20))],
            draw.randrange(3),
            seed=draw.getrandbits(64) - 2**63,
            **{name: draw.choice(values) for name, values in _CHOICES.items()},
        )
        for _ in range(num)
    ]


def normal_logits(
    seed: int, num_rows: int, vocab_size: int, scale: float, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(device)


def packed(rows: Sequence[SamplingRow], logits: torch.Tensor) -> SamplingBatch:
    return pack(columns_of(rows), logits.shape[1], logits.device)


def sampled(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """By the kernels."""
    batch = packed(rows, logits)
    columns = sample(logits, batch).columns(batch)
    return [columns.token(index, item.sample_index) for index, item in enumerate(rows)]


@dataclass(frozen=True)
class Comparison:
    """Tokens of the kernels and of the definition, and in which rows they differ at a near tie."""

    found: list[SampledToken]
    wanted: list[SampledToken]
    near_ties: list[int]


def compared(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Comparison:
    """Fails if a token differs without a near tie; who calls decides how many near ties are too many."""
    found, wanted = sampled(logits, rows), Sampler().sample(logits.cpu(), rows)
    near_ties = []
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.token_id != other.token_id:
            assert other.gap < NEAR, f"row {index}: {one} instead of {other}, {rows[index].params}"
            near_ties.append(index)
    return Comparison(found, wanted, near_ties)
