"""Random logits and single draws, for the sampler's tests."""

from __future__ import annotations

import torch

from engine.sampling import Sampler, SamplingRow
from engine.step import SampledToken

VOCAB = 97


def random_logits(seed: int, num_rows: int = 1, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: torch.Tensor, item: SamplingRow, tile_rows: int | None = None) -> SampledToken:
    return Sampler(tile_rows).sample(logits, [item])[0]
