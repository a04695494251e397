"""What comes with a token: logprobs of the raw logits, and how near a tie was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.engine.sampling.draws import VOCAB, random_logits, sample_one
from tests.unit.engine.sampling.reference import row


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.7, "top_p": 0.9, "logit_bias": ((9, 100.0),)}]
)
def test_logprobs_are_those_of_the_raw_logits(fields: dict[str, Any]) -> None:
    logits = random_logits(16)
    exact = torch.log_softmax(logits[0].double(), -1)
    found = sample_one(logits, row([5], [6], logprobs=5, repetition_penalty=1.3, **fields))
    assert found.logprob is not None
    assert found.logprob.token_id == found.token_id
    assert found.logprob.logprob == pytest.approx(exact[found.token_id].item(), abs=1e-5)
    order = sorted(range(VOCAB), key=lambda i: (-logits[0, i].item(), i))[:5]
    assert [token_id for token_id, _ in found.logprob.top] == order
    assert [value for _, value in found.logprob.top] == pytest.approx(exact[order].tolist(), abs=1e-5)


def test_logprobs_come_only_when_asked_for() -> None:
    logits = random_logits(17)
    assert sample_one(logits, row()).logprob is None
    none_best = sample_one(logits, row(logprobs=0)).logprob
    assert none_best is not None
    assert none_best.top == ()
    every = sample_one(logits, row(logprobs=1000)).logprob
    assert every is not None
    assert len(every.top) == VOCAB


def test_equal_logits_are_listed_by_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 60] = 1.0
    found = sample_one(logits, row(temperature=0.0, logprobs=3)).logprob
    assert found is not None
    assert [token_id for token_id, _ in found.top] == [60, 0, 1]


def test_a_greedy_gap_is_the_lead_in_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.75, 0.0]])
    assert sample_one(logits, row(temperature=0.0)).gap == pytest.approx(0.25)
    assert sample_one(logits, row(temperature=1e-6)).gap == pytest.approx(0.25, abs=1e-4)


def test_a_filter_decision_is_near_only_if_it_could_change_the_token() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.9999, -4.0, -4.0]])
    moved = torch.tensor([[3.0, 0.9999, 1.0, -4.0, -4.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.8}, {"top_k": 2, "min_p": 0.01}):
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for seed in range(300):
            found = sample_one(logits, row(seed=seed, **fields))
            is_changed = found.token_id != sample_one(moved, row(seed=seed, **fields)).token_id
            gaps[is_changed].append(found.gap)
        assert len(gaps[True]) > 10
        assert max(gaps[True]) < 1e-3, "a decision that mattered was not reported"
        assert sum(gap < 1e-3 for gap in gaps[False]) <= 6, "decisions that did not matter were reported"
