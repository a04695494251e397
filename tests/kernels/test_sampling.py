"""Sampling on the device against the sampler that defines it: the same tokens, whatever runs beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import StepFailed
from engine.kernels.sampling import sample, sample_reference
from engine.kernels.sampling_pack import ResidentHistory, pack
from engine.sampling import SamplingRow, columns_of
from tests.kernels.sampling_rows import compared, normal_logits, packed, random_rows, row, sampled


@pytest.mark.parametrize(("seed", "scale"), [(1, 3.0), (2, 0.5)])
def test_each_token_is_the_samplers_for_any_mix_of_parameters(
    device: torch.device, seed: int, scale: float
) -> None:
    rows = random_rows(seed, 25, 1000)
    logits = normal_logits(seed, len(rows), 1000, scale, device)
    before = logits.clone()
    comparison = compared(logits, rows)
    assert len(comparison.near_ties) <= 1
    assert torch.equal(logits, before), "the logits are changed"
    for found, wanted in zip(comparison.found, comparison.wanted, strict=True):
        assert (found.logprob is None) == (wanted.logprob is None)
        if found.logprob is not None and wanted.logprob is not None:
            assert [i for i, _ in found.logprob.top] == [i for i, _ in wanted.logprob.top]
            assert [value for _, value in found.logprob.top] == pytest.approx(
                [value for _, value in wanted.logprob.top], abs=2e-5
            )
            if found.token_id == wanted.token_id:
                assert found.logprob.logprob == pytest.approx(wanted.logprob.logprob, abs=2e-5)


def test_each_token_is_the_samplers_at_the_vocabulary_of_a_real_model(device: torch.device) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"top_k": 50, "logprobs": 5},
        {"top_k": 1000, "top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.05, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "min_tokens": 30, "top_p": 0.5},
    ]
    rows = [row([5, 900, 40_000], [7, 7, 49_151], seed=i, **kind) for i, kind in enumerate(kinds)]
    assert not compared(normal_logits(3, len(rows), 49_152, 3.0, device), rows).near_ties


def test_the_twin_gives_the_same_tokens(device: torch.device) -> None:
    rows = random_rows(4, 12, 500)
    logits = normal_logits(4, len(rows), 500, 2.0, device)
    batch = packed(rows, logits)
    found, wanted = sample(logits, batch).columns(batch), sample_reference(logits, batch).columns(batch)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.gaps.tolist() == pytest.approx(wanted.gaps.tolist(), abs=1e-3)
    assert found.logprobs.keys() == wanted.logprobs.keys()


def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit(device: torch.device) -> None:
    rows = random_rows(5, 6, 5000)
    logits = normal_logits(5, len(rows), 5000, 2.0, device)
    together = sampled(logits, rows)
    order = [5, 0, 3]
    assert sampled(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    for i in (2, 4):
        assert sampled(logits[i : i + 1], [rows[i]]) == [together[i]]


def test_what_lies_around_the_logits_is_not_read(device: torch.device) -> None:
    poisoned = torch.full((5, 999), math.nan, device=device)
    rows = random_rows(6, 3, 999)
    logits = poisoned[1:4]
    logits.copy_(normal_logits(6, 3, 999, 2.0, device))
    assert not compared(logits, rows).near_ties


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_rows_are_told_and_harm_no_other(device: torch.device, bad: float) -> None:
    rows = [row([], [], seed=i, top_k=5 * (i % 2), top_p=0.9, temperature=float(i % 3)) for i in range(6)]
    logits = normal_logits(7, 6, 600, 1.0, device)
    good = sampled(logits, rows)
    if math.isinf(bad) and bad < 0:
        logits[[1, 3]] = bad
    else:
        logits[1, 599] = logits[3, 0] = bad
    batch = packed(rows, logits)
    with np.errstate(invalid="ignore"):  # the interpreter tells of NaN
        samples = sample(logits, batch)
    assert samples.draws.is_finite.tolist() == [1, 0, 1, 0, 1, 1]
    assert [samples.draws.token_ids[i].item() for i in (0, 2, 4, 5)] == [
        good[i].token_id for i in (0, 2, 4, 5)
    ]
    assert samples.draws.token_ids[[1, 3]].tolist() == [0, 0], "an id that any embedding has"
    with pytest.raises(StepFailed) as failure:
        samples.columns(batch)
    assert failure.value.details["row"] == 1


# ---------------------------------------------------------------- corner values


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "top_p": 0.1, "top_k": 7, "min_p": 1.0},
        {"top_p": 0.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 1e-6, "top_p": 0.9, "top_k": 10, "min_p": 0.1},
        {"temperature": 5e-324, "top_k": 3},
    ],
)
def test_degenerate_settings_are_greedy(device: torch.device, fields: dict[str, Any]) -> None:
    logits = normal_logits(8, 4, 97, 2.0, device)
    rows = [row([], [1] * i, seed=i, **fields) for i in range(4)]
    assert [token.token_id for token in sampled(logits, rows)] == logits.argmax(-1).tolist()


def test_large_logits_at_a_tiny_temperature_do_not_overflow(device: torch.device) -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38, 0.0]], device=device).expand(4, -1).contiguous()
    rows = [row([], [], temperature=t, top_k=k) for t, k in ((0.0, 0), (1e-6, 0), (1.0, 0), (1e-6, 2))]
    with np.errstate(over="ignore"):  # the interpreter tells of depths that become infinite
        found = sampled(logits, rows)
    assert [token.token_id for token in found] == [0, 0, 0, 0]
    assert not any(math.isnan(token.gap) for token in found)


def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(5, 9000, device=device)
    logits[3:, [8000, 8999]] = 2.5
    logits[3:, 13] = -0.0
    rows = [
        row([], [], seed=i, **kind)
        for i, kind in enumerate(({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}))
    ]
    rows += [row([], [], temperature=0.0, logprobs=4), row([], [], top_k=2, top_p=0.5, logprobs=4)]
    found = sampled(logits, rows)
    assert [token.token_id for token in found] == [0, 0, 0, 8000, 8000]
    assert found[3].gap == 0.0
    for token in found[3:]:
        assert token.logprob is not None
        assert [token_id for token_id, _ in token.logprob.top] == [8000, 8999, 0, 1]


def test_a_vocabulary_of_one_token_works(device: torch.device) -> None:
    rows = [
        row([], [], **fields)
        for fields in ({"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5, "logprobs": 2})
    ]
    found = sampled(torch.zeros(3, 1, device=device), rows)
    assert [(token.token_id, token.gap) for token in found] == [(0, math.inf)] * 3


def test_masked_logits_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((15, 97), -math.inf, device=device)
    logits[:, [5, 6]] = torch.tensor([1.0, 1.5], device=device)
    fields: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.9999},
        {"min_p": 0.001},
        {"temperature": 0.0},
    ]
    rows = [row([], [], seed=i, logprobs=4 if i == 0 else None, **fields[i % 5]) for i in range(15)]
    comparison = compared(logits, rows)
    assert not comparison.near_ties
    assert {token.token_id for token in comparison.found} == {5, 6}


def test_a_history_on_the_device_counts_like_one_that_is_sent(device: torch.device) -> None:
    rows = [
        row([3, 4, 4], [5, 5], repetition_penalty=1.4, temperature=0.0),
        row([9], [3] * 20, frequency_penalty=0.3, presence_penalty=0.2),
        row([1, 2], []),
    ]
    logits = normal_logits(10, 3, 12, 2.0, device)
    tokens = torch.full((3, 40), 2**30, dtype=torch.int32)  # beyond a row's tokens is rubbish
    for slot, item in zip((2, 0, 1), rows, strict=True):
        tokens[slot, : len(item.token_ids)] = torch.tensor(list(item.token_ids))
    unseen = [
        SamplingRow(r.params, 0, range(len(r.token_ids)), r.num_prompt_tokens, r.eos_token_ids) for r in rows
    ]
    history = ResidentHistory(tokens.to(device).view(-1), [80, 0, 40])
    batch = pack(columns_of(unseen), 12, device, history)
    found = sample(logits, batch).columns(batch)
    wanted = sampled(logits, rows)
    assert found.token_ids.tolist() == [token.token_id for token in wanted]
    assert found.gaps.tolist() == [token.gap for token in wanted]
