"""Bias, penalties and the mask until min_tokens are out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.sampling.draws import random_logits, sample_one
from tests.unit.engine.sampling.reference import adjusted_logits, row


def test_a_bias_of_a_hundred_forces_and_bans() -> None:
    logits = random_logits(13)
    best = int(logits.argmax())
    for fields in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.9}):
        assert sample_one(logits, row(logit_bias=((77, 100.0),), **fields)).token_id == 77
        banned = row(logit_bias=((best, -100.0),), **fields)
        assert all(sample_one(logits, replace(banned, sample_index=i)).token_id != best for i in range(50))


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_end_and_stop_ids_are_masked_until_min_tokens_are_out(
    fields: dict[str, Any], ignore_eos: bool
) -> None:
    logits = random_logits(14)
    bias = ((2, 100.0), (50, 99.0))
    for num_output in range(5):
        item = row(
            [1],
            [1] * num_output,
            min_tokens=3,
            stop_token_ids=(50,),
            logit_bias=bias,
            ignore_eos=ignore_eos,
            **fields,
        )
        token_id = sample_one(logits, item).token_id
        assert (token_id in (2, 50)) == (num_output >= 3)


def test_penalties_count_each_token_where_they_should() -> None:
    logits = random_logits(15)
    prompt, output = [1, 1, 2, 3], [3, 4, 4, 4]
    for fields in (
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.3,
            "logit_bias": ((4, 3.0),),
        },
    ):
        wanted = adjusted_logits(logits[0].tolist(), row(prompt, output, **fields))
        # seen through the eyes of a greedy choice: lift each token until it just wins
        for token_id in (1, 2, 3, 4, 5):
            best_other = max(value for i, value in enumerate(wanted.tolist()) if i != token_id)
            for shift, wins in ((0.01, True), (-0.01, False)):
                lifted = logits.clone()
                raw = best_other + shift
                bias = dict(fields.get("logit_bias", ()))  # type: ignore[call-overload]
                bias[token_id] = bias.get(token_id, 0.0)
                lifted[0, token_id] = solve(raw, token_id, prompt, output, fields)
                item = row(prompt, output, temperature=0.0, **fields)
                assert (sample_one(lifted, item).token_id == token_id) == wins


def solve(
    target: float, token_id: int, prompt: list[int], output: list[int], fields: dict[str, Any]
) -> float:
    """The raw logit that bias and penalties turn into `target`."""
    value = target
    if token_id in output:
        value += fields.get("presence_penalty", 0.0) + fields.get("frequency_penalty", 0.0) * output.count(
            token_id
        )
    if token_id in prompt + output:
        penalty = fields.get("repetition_penalty", 1.0)
        value = value * penalty if value > 0 else value / penalty
    return value - dict(fields.get("logit_bias", ())).get(token_id, 0.0)
