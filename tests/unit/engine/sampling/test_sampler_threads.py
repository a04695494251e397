"""Tokens and their log-probabilities do not depend on how many threads the step has."""

from __future__ import annotations

import torch

from core.request import SamplingParams
from engine.sampling import Sampler, SamplingRow


def test_any_number_of_threads_gives_the_same_bits() -> None:
    logits = 4.0 * torch.randn(16, 49_152, generator=torch.Generator().manual_seed(3))
    rows = [
        SamplingRow(
            SamplingParams(max_tokens=4, seed=seed, top_p=0.3 + seed / 40, logprobs=3),
            0,
            (1, 2),
            2,
            frozenset(),
        )
        for seed in range(16)
    ]
    before = torch.get_num_threads()
    found = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        found.append(Sampler().sample(logits, rows))
        assert torch.get_num_threads() == num_threads
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
