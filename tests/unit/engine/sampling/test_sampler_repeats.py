"""A token depends on its own row alone: not on neighbours, tiles or earlier calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from core.ids import RequestId
from core.request import Request
from engine.sampling import Sampler, SamplingRow, row_of
from engine.sequence import new_sequence
from tests.unit.engine.sampling.draws import random_logits, sample_one
from tests.unit.engine.sampling.reference import EOS, params, row


def mixed_rows() -> list[SamplingRow]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"top_k": 50},
        {"top_k": 5, "top_p": 0.8, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_p": 0.99, "min_p": 0.01, "temperature": 1.7},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
        {"frequency_penalty": 0.5, "logit_bias": ((11, 5.0),), "min_tokens": 30},
        {"top_p": 0.95, "presence_penalty": 1.0, "logprobs": 0},
    ]
    return [
        row(list(range(i, 2 * i)), list(range(i)), i % 3, seed=1000 + i, **kind)
        for i, kind in enumerate(kinds * 2)
    ]


@pytest.mark.parametrize("vocab", [1001, 49152])
def test_a_token_does_not_depend_on_its_neighbours_bit_for_bit(vocab: int) -> None:
    rows = mixed_rows()
    logits = random_logits(3, len(rows), vocab, scale=3.0)
    alone = [sample_one(logits[i : i + 1], item) for i, item in enumerate(rows)]
    assert Sampler().sample(logits, rows) == alone
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()[:13]
    assert Sampler().sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    assert Sampler().sample(logits, rows) == alone, "a second call differs"


def test_rows_that_are_worked_on_together_give_the_same_tokens() -> None:
    rows = mixed_rows()
    logits = random_logits(4, len(rows), 1001, scale=3.0)
    alone, together = Sampler(1).sample(logits, rows), Sampler(100).sample(logits, rows)
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    assert [token.gap for token in together] == pytest.approx([token.gap for token in alone], abs=1e-5)


def test_the_logits_are_left_as_they_are() -> None:
    rows = mixed_rows()
    logits = random_logits(5, len(rows), 1001)
    before = logits.clone()
    Sampler().sample(logits, rows)
    Sampler().sample(logits[:1], [row(temperature=0.0, logit_bias=((5, 100.0),))])
    Sampler().sample(logits[:1], [row(temperature=0.0)])
    assert torch.equal(logits, before)


def test_seed_sample_and_position_each_change_the_draws_and_nothing_else_does() -> None:
    logits = random_logits(6, vocab=5000, scale=0.1)
    base = row(output=[1] * 5, seed=42)
    token = sample_one(logits, base).token_id
    others = [
        replace(base, params=params(seed=43)),
        replace(base, params=params(seed=42 + 2**40)),
        replace(base, params=params(seed=-42)),
        replace(base, sample_index=1),
        replace(base, token_ids=[1] * 6),
    ]
    assert len({sample_one(logits, item).token_id for item in others} | {token}) == 6
    same_place = SamplingRow(params(seed=42), 0, [9, 9, 7, 7, 7, 7, 7], 2, EOS)
    assert sample_one(logits, same_place).token_id == token, (
        "prompt length and history are not part of the noise"
    )


def test_samples_of_one_request_differ_and_repeat() -> None:
    logits = random_logits(7, vocab=2000, scale=1.0).expand(4, -1).contiguous()
    rows = [row(sample=i, seed=7) for i in range(4)]
    found = [token.token_id for token in Sampler().sample(logits, rows)]
    assert len(set(found)) == 4
    assert [token.token_id for token in Sampler().sample(logits, rows)] == found


def test_a_row_of_a_sequence_counts_its_position_from_the_output() -> None:
    request = Request(RequestId("r"), (5, 6, 7), params(seed=3))
    sequence = new_sequence(request, 2, (8, 9), 100)
    item = row_of(sequence, EOS)
    assert (item.position, item.sample_index, item.num_prompt_tokens) == (2, 2, 3)
    assert row_of(sequence, EOS, sample_index=4).sample_index == 4
    sequence.append(1)
    assert item.position == 3, "the row reads the sequence's tokens and copies none"
