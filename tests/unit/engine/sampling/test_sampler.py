"""The sampler against its definition, and its draws against the exact distribution."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.sampling import Sampler, SamplingRow
from tests.unit.engine.sampling.draws import VOCAB, random_logits, sample_one
from tests.unit.engine.sampling.reference import params, reference, row

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
settings_of_a_request = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.9, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.9, 0.999]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, VOCAB, 10**9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -0.2]),
        "logit_bias": st.sampled_from([(), ((3, 100.0),), ((3, -100.0), (4, 2.5)), ((2, 50.0),)]),
        "min_tokens": st.sampled_from([0, 0, 3, 50]),
        "stop_token_ids": st.sampled_from([(), (3, 7), (10**6,)]),
        "ignore_eos": st.booleans(),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    logits_seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.5, 3.0]),
    prompt=tokens,
    output=tokens,
    sample=st.integers(0, 3),
    fields=settings_of_a_request,
)
def test_each_token_is_the_one_that_the_definition_names(
    logits_seed: int, scale: float, prompt: list[int], output: list[int], sample: int, fields: dict[str, Any]
) -> None:
    logits = random_logits(logits_seed, scale=scale)
    item = row(prompt, output, sample, **fields)
    found = sample_one(logits, item)
    wanted = reference(logits[0].tolist(), item)
    if found.token_id != wanted.token_id:
        assert found.gap < 1e-4, "another token without a near tie"
    assert not math.isnan(found.gap)
    assert found.gap >= 0.0
    assert found.sample_index == sample


@settings(max_examples=100, deadline=None)
@given(
    logits_seed=st.integers(0, 10**6),
    noise_seed=st.integers(0, 10**6),
    fields=settings_of_a_request,
    scale=st.sampled_from([0.5, 3.0]),
)
def test_logits_that_move_by_less_than_the_gap_give_the_same_token(
    logits_seed: int, noise_seed: int, fields: dict[str, Any], scale: float
) -> None:
    logits = random_logits(logits_seed, scale=scale)
    item = row([1, 2], [3], **{**fields, "repetition_penalty": 1.0})
    found = sample_one(logits, item)
    step = min(found.gap, 1.0) / 4 - 1e-5
    if step <= 0:
        return
    moved = logits + (torch.rand(VOCAB, generator=torch.Generator().manual_seed(noise_seed)) * 2 - 1) * step
    assert sample_one(moved, item).token_id == found.token_id


@pytest.mark.parametrize(
    ("along", "fields"),
    [
        ("position", {}),
        ("position", {"temperature": 0.6}),
        ("position", {"top_k": 7}),
        ("position", {"top_p": 0.8}),
        ("position", {"min_p": 0.1}),
        ("position", {"logit_bias": ((5, 2.0), (6, -100.0)), "top_p": 0.95}),
        ("seed", {}),
        ("seed", {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2}),
    ],
)
def test_20000_draws_match_the_exact_distribution(along: str, fields: dict[str, Any]) -> None:
    num = 20_000
    logits = random_logits(8, vocab=40, scale=1.5)
    if along == "position":
        rows = [SamplingRow(params(**fields), 0, range(1000, 1000 + i), 0, frozenset()) for i in range(num)]
    else:
        rows = [SamplingRow(params(**{**fields, "seed": i}), 0, [], 0, frozenset()) for i in range(num)]
    found = Sampler(tile_rows=num).sample(logits.expand(num, -1), rows)
    exact = reference(logits[0].tolist(), rows[0])
    counts = Counter(token.token_id for token in found)
    assert set(counts) <= set(exact.kept), "a token was drawn that the filters drop"
    wanted = [probability * num for probability in exact.probabilities]
    # classes with few expected draws are merged, as the test needs
    common = [i for i, value in enumerate(wanted) if value >= 5]
    observed = [float(counts[exact.kept[i]]) for i in common]
    expected = [wanted[i] for i in common]
    if len(common) < len(wanted):
        observed.append(num - sum(observed))
        expected.append(num - sum(expected))
    assert stats.chisquare(observed, expected).pvalue > 0.001
