"""Seeded: the tokens that the documented sampler draws from the reference's logits.

Owns the comparison of sampled answers: each token must be the one drawn, with its seed, sample index and
position, from what transformers computes. Near ties of the perturbed scores and of the filters are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.request import SamplingParams
from engine.sampling.row import SamplingRow
from engine.sampling.sampler import Sampler
from tests.e2e.answers import Answer
from tests.e2e.client import Client
from tests.e2e.reference import NEAR_TIE, Ledger, Reference


@dataclass(frozen=True, slots=True)
class Settings:
    """Sampling settings of a request, as body fields and as the engine's parameters."""

    temperature: float
    top_p: float
    seed: int

    def body(self) -> dict[str, float | int]:
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=True,
        )


def ask(client: Client, ids: Sequence[int], settings: Settings, num_tokens: int) -> Answer:
    """Exactly `num_tokens`, special ones spelled out so that each can be told."""
    return client.complete(
        ids,
        max_tokens=num_tokens,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=0,
        **settings.body(),
    )


def check_sampled(
    reference: Reference,
    prompt: Sequence[int],
    output: Sequence[int],
    settings: Settings,
    ledger: Ledger,
    where: str,
    sample_index: int = 0,
) -> None:
    """Each token of `output` is the draw at its position given the tokens before it, but for near ties."""
    assert output, f"{where}: no tokens"
    logits = torch.from_numpy(reference.logits([*prompt, *output], len(output)))
    params = settings.params(len(output))
    rows = [
        SamplingRow(params, sample_index, (*prompt, *output[:position]), len(prompt), frozenset())
        for position in range(len(output))
    ]
    for position, (drawn, token_id) in enumerate(zip(Sampler().sample(logits, rows), output, strict=True)):
        if drawn.token_id != token_id:
            story = f"{where}: token {position} is {token_id}, drawn is {drawn.token_id}, gap {drawn.gap:.6f}"
            assert drawn.gap < NEAR_TIE, story
            ledger.near_ties.append(story)
    ledger.num_tokens += len(output)
    ledger.num_prompts += 1
