"""Log-probabilities on the device against their twin: chosen and best tokens, ties, rows that want none."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels.sampling_logprobs import token_logprobs, token_logprobs_reference
from tests.kernels.sampling_rows import normal_logits


def check(logits: torch.Tensor, wanted: list[int], num_top: int) -> None:
    device = logits.device
    token_ids = torch.arange(len(logits), dtype=torch.int32, device=device) * 7 % logits.shape[1]
    numbers = torch.tensor(wanted, dtype=torch.int32, device=device)
    found = token_logprobs(logits, token_ids, numbers, num_top)
    twin = token_logprobs_reference(logits, token_ids, numbers, num_top)
    for i, num in enumerate(wanted):
        if num >= 0:
            torch.testing.assert_close(found.chosen[i], twin.chosen[i], rtol=1e-5, atol=1e-5)
            assert found.top_ids[i, :num].tolist() == twin.top_ids[i, :num].tolist()
            torch.testing.assert_close(found.top[i, :num], twin.top[i, :num], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (19, 1.0), (5001, 3.0), (5001, 0.001), (9000, 100.0)])
def test_chosen_and_best_tokens_are_the_twins(device: torch.device, vocab: int, scale: float) -> None:
    logits = normal_logits(1, 4, vocab, scale, device)
    check(logits, [min(vocab, 20), 0, 1, min(vocab, 5)], min(vocab, 20))


def test_equal_logits_are_listed_by_id(device: torch.device) -> None:
    logits = (normal_logits(2, 3, 9001, 1.0, device) * 2).round() / 2
    logits[2] = 0.0
    check(logits, [20, 7, 20], 20)


def test_masked_logits_are_listed_last(device: torch.device) -> None:
    logits = torch.full((1, 5000), -math.inf, device=device)
    logits[0, [4999, 0, 17]] = torch.tensor([3.0, 1.0, 2.0], device=device)
    check(logits, [6], 6)


def test_rows_of_a_wider_tensor_are_read_in_place(device: torch.device) -> None:
    wide = torch.full((3, 600), math.nan, device=device)
    wide[:, :555] = normal_logits(3, 3, 555, 2.0, device)
    check(wide[:, :555], [3, 2, 1], 3)


def test_a_row_that_wants_nothing_is_not_looked_at(device: torch.device) -> None:
    logits = normal_logits(4, 3, 555, 2.0, device)
    logits[1] = math.nan
    check(logits, [3, -1, 0], 3)
    check(logits, [0, -1, 0], 0)


def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit(device: torch.device) -> None:
    logits = normal_logits(5, 5, 9000, 3.0, device)
    token_ids = torch.tensor([1, 2, 3, 4, 8999], dtype=torch.int32, device=device)
    wanted = torch.tensor([5, 0, 20, -1, 3], dtype=torch.int32, device=device)
    together = token_logprobs(logits, token_ids, wanted, 20)
    for i in (0, 2, 4):
        own = slice(i, i + 1)
        num = int(wanted[i])
        alone = token_logprobs(logits[own], token_ids[own], wanted[own], num)
        assert torch.equal(alone.chosen, together.chosen[own])
        assert torch.equal(alone.top_ids, together.top_ids[own, :num])
        assert torch.equal(alone.top, together.top[own, :num])
