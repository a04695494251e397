"""Corner values: degenerate settings, ties, masked and broken logits, tiny and huge vocabularies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from core.errors import StepFailed
from engine.sampling import Sampler
from tests.unit.engine.sampling.draws import VOCAB, random_logits, sample_one
from tests.unit.engine.sampling.reference import row


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": 0.0, "top_p": value} for value in (0.0, 0.1)),
        *({"temperature": 0.0, "top_k": value} for value in (0, 1, VOCAB, 10**9)),
        *({"temperature": 0.0, "min_p": value} for value in (0.0, 1.0)),
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1e-6},
        {"temperature": 1e-6, "top_p": 0.9, "top_k": 10, "min_p": 0.1},
        {"temperature": 1e-50},
        {"temperature": 5e-324, "top_k": 3},
    ],
)
def test_degenerate_settings_are_greedy(fields: dict[str, Any]) -> None:
    logits = random_logits(9, 20)
    rows = [row(output=[1] * i, seed=i, **fields) for i in range(20)]
    found = Sampler().sample(logits, rows)
    assert [token.token_id for token in found] == logits.argmax(-1).tolist()


def test_large_logits_at_a_tiny_temperature_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, 0.0]])
    for temperature in (0.0, 1e-6, 1.0):
        found = sample_one(logits, row(temperature=temperature))
        assert found.token_id == 0
        assert not math.isnan(found.gap)


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 10**9])
@pytest.mark.parametrize("vocab", [VOCAB, 2000])
def test_a_top_k_of_the_whole_vocabulary_drops_nothing(top_k: int, vocab: int) -> None:
    logits = random_logits(10, vocab=vocab, scale=0.01)
    rows = [row(seed=i, top_k=max(top_k, vocab)) for i in range(50)]
    off = [row(seed=i) for i in range(50)]
    sampler, many = Sampler(), logits.expand(50, -1)
    assert sampler.sample(many, rows) == sampler.sample(many, off)


@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.9999])
def test_a_nucleus_wider_than_what_is_listed_at_first_is_whole(top_p: float) -> None:
    logits = random_logits(11, vocab=20_000, scale=0.01)
    rows = [row(seed=i, top_p=top_p) for i in range(30)]
    found = [token.token_id for token in Sampler().sample(logits.expand(30, -1), rows)]
    order = torch.sort(logits[0], descending=True, stable=True).indices.tolist()
    rank = {token_id: i for i, token_id in enumerate(order)}
    assert max(rank[token_id] for token_id in found) < top_p * 20_000 * 1.01
    assert max(rank[token_id] for token_id in found) > top_p * 20_000 * 0.5, "the tail is never drawn"


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample_one(logits, row(temperature=0.0)).token_id == 0
    assert sample_one(logits, row(top_k=1)).token_id == 0
    assert sample_one(logits, row(top_p=0.0)).token_id == 0
    logits[0, [13, 40]] = 2.5
    assert sample_one(logits, row(temperature=0.0)).token_id == 13
    assert sample_one(logits, row(temperature=0.0)).gap == 0.0
    drawn = {sample_one(logits, row(seed=i, top_k=3)).token_id for i in range(200)}
    assert drawn == {0, 13, 40}


def test_negative_zero_ties_with_zero() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert sample_one(logits, row(top_k=1)).token_id == 1
    assert sample_one(logits, row(temperature=0.0, logprobs=4)).token_id == 1
    found = sample_one(logits, row(temperature=0.0, logprobs=4)).logprob
    assert found is not None
    assert [token_id for token_id, _ in found.top] == [1, 2, 3, 0]


def test_a_vocabulary_of_one_token_works() -> None:
    for fields in ({"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5, "min_p": 0.5}):
        found = sample_one(torch.zeros(1, 1), row(**fields))
        assert (found.token_id, found.gap) == (0, math.inf)


def test_masked_logits_are_never_drawn_and_never_nan() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [5, 6]] = torch.tensor([1.0, 1.5])
    for fields in ({}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 0.001}, {"temperature": 0.0}):
        for seed in range(20):
            found = sample_one(logits, row(seed=seed, logprobs=4, **fields))
            assert found.token_id in (5, 6)
            assert not math.isnan(found.gap)
            assert found.logprob is not None
            assert not any(math.isnan(value) for _, value in found.logprob.top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_broken_logits_are_an_error_and_not_a_token(bad: float, fields: dict[str, Any]) -> None:
    logits = random_logits(12, 2)
    logits[1, 50] = bad
    with pytest.raises(StepFailed):
        Sampler().sample(logits, [row(), row(**fields)])
    with pytest.raises(StepFailed):
        Sampler().sample(torch.full((1, VOCAB), -math.inf), [row(**fields)])


def test_no_rows_are_no_tokens() -> None:
    assert Sampler().sample(torch.zeros(0, VOCAB), []) == []
