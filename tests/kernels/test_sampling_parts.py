"""The kernels that sampling is made of, one by one against their twins: noise, penalties, filters, draw."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from scipy import stats

from engine.kernels.jit import kernel
from engine.kernels.sampling_adjust import adjust, adjust_reference
from engine.kernels.sampling_best import row_bests, row_bests_reference
from engine.kernels.sampling_draw import draw, draw_reference
from engine.kernels.sampling_filter import filter_cuts, filter_cuts_reference
from engine.kernels.sampling_noise import FAST_ERROR, log_exponential, log_exponential_fast, token_hash
from engine.kernels.sampling_table import ROW_WORDS
from engine.sampling import Sampler, SamplingRow
from engine.sampling.adjust import adjust as definition_of_adjust
from engine.sampling.noise import log_exponential as definition_of_noise
from engine.sampling.noise import token_hash as definition_of_hash
from tests.kernels.sampling_rows import normal_logits, packed, random_rows, row

# ---------------------------------------------------------------- noise


@kernel()
def _noise(
    words: tl.pointer_type,
    hashes: tl.pointer_type,
    exact: tl.pointer_type,
    fast: tl.pointer_type,
    first: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    lanes = tl.arange(0, block)
    h = token_hash(first + lanes, words + row * ROW_WORDS)
    tl.store(hashes + row * block + lanes, h.to(tl.int32, bitcast=True))
    tl.store(exact + row * block + lanes, log_exponential(h))
    tl.store(fast + row * block + lanes, log_exponential_fast(h))


@kernel()
def _noise_of(
    hashes: tl.pointer_type, exact: tl.pointer_type, fast: tl.pointer_type, block: tl.constexpr
) -> None:
    lanes = tl.arange(0, block)
    h = tl.load(hashes + lanes).to(tl.uint32, bitcast=True)
    tl.store(exact + lanes, log_exponential(h))
    tl.store(fast + lanes, log_exponential_fast(h))


@pytest.mark.parametrize("first", [0, 150_000])
def test_the_hash_is_the_definitions_bit_for_bit(device: torch.device, first: int) -> None:
    rows = [
        row([], [1] * i, i, seed=seed) for i, seed in enumerate((0, 1, -1, 2**63 - 1, -(2**63), 12345678901))
    ]
    batch = packed(rows, torch.zeros(len(rows), 9, device=device))
    hashes = torch.empty(len(rows), 4096, dtype=torch.int32, device=device)
    exact, fast = torch.empty(len(rows), 4096, device=device), torch.empty(len(rows), 4096, device=device)
    _noise[(len(rows),)](batch.table, hashes, exact, fast, first=first, block=4096, enable_fp_fusion=False)
    ids = torch.arange(first, first + 4096, dtype=torch.int32, device=device)[None, :]
    assert torch.equal(hashes, definition_of_hash(ids, batch.noise_keys()))
    wanted = definition_of_noise(ids, batch.noise_keys())
    torch.testing.assert_close(exact, wanted, rtol=2e-7, atol=1e-12)
    assert (exact == wanted).float().mean() > 0.999
    assert (fast - wanted).abs().max() < FAST_ERROR / 10


def test_the_estimate_of_the_noise_holds_at_both_ends(device: torch.device) -> None:
    steps = np.unique(np.geomspace(1, 2**31, 2040).astype(np.int64))
    u = np.concatenate(
        [[0], steps, 2**32 - 1 - steps, [2**32 - 1, 2**28 - 1, 2**28]]
    )  # 2^28: where u is 1/16
    u = np.resize(u, 4096).astype(np.uint32)
    hashes = torch.from_numpy((u ^ np.uint32(1 << 31)).view(np.int32)).to(device)
    exact, fast = torch.empty(4096, device=device), torch.empty(4096, device=device)
    _noise_of[(1,)](hashes, exact, fast, block=4096, enable_fp_fusion=False)
    wanted = np.log(-np.log1p(-(u.astype(np.float64) + 0.5) * 2.0**-32))
    assert np.abs(exact.cpu().numpy() - wanted).max() < 2e-6
    assert np.abs(fast.cpu().numpy() - wanted).max() < FAST_ERROR / 10


# ---------------------------------------------------------------- penalties


def test_bias_penalties_and_mask_are_the_definitions_bit_for_bit(device: torch.device) -> None:
    rows = random_rows(1, 24, 300)
    rows += [
        row(
            [4] * 3000,
            [5] * 1100 + [6, 4],
            repetition_penalty=1.7,
            presence_penalty=0.1,
            frequency_penalty=0.013,
        ),
        row([1], [1], logit_bias=tuple((i, i / 7 - 5) for i in range(300)), frequency_penalty=1.1),
        row([], [], min_tokens=1, stop_token_ids=tuple(range(4, 250)), logit_bias=((7, 100.0),)),
    ]
    logits = normal_logits(1, len(rows), 300, 3.0, device)
    batch = packed(rows, logits)
    found, twin, wanted = logits.clone(), logits.clone(), logits.clone()
    adjust(found, batch)
    adjust_reference(twin, batch)
    definition_of_adjust(wanted, dict(enumerate(rows)))
    assert torch.equal(found, wanted)
    assert torch.equal(twin, wanted)


# ---------------------------------------------------------------- filters


def kept_tokens(cuts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Which tokens of scaled logits (maximum 0) `cuts` lets through: bool `[num_rows, vocab]`."""
    depth, border = x.abs().view(torch.int32).long(), cuts[:, :1].long() & 0xFFFFFFFF
    ids = torch.arange(x.shape[1], device=x.device)[None, :]
    return (depth < border) | ((depth == border) & (ids <= cuts[:, 1:]))


CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2, "temperature": 0.05},
    {"top_k": 40, "temperature": 1.9},
    {"top_k": 4095},
    {"top_p": 0.0},
    {"top_p": 0.3, "temperature": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"top_k": 3, "top_p": 0.6},
    {"top_k": 500, "top_p": 0.97, "temperature": 1.2},
    {"temperature": 0.0, "top_k": 3},
    {},
]


@pytest.mark.parametrize(
    ("vocab", "scale", "grid"),
    [
        (5003, 3.0, 0.0),
        (5003, 3.0, 0.5),  # many equal logits
        (5003, 0.01, 0.0),  # flat: no horizon holds a nucleus
        (97, 2.0, 0.25),
    ],
)
def test_filters_keep_what_sorting_keeps(device: torch.device, vocab: int, scale: float, grid: float) -> None:
    logits = normal_logits(2, len(CUTS), vocab, scale, device)
    if grid:
        logits = (logits / grid).round() * grid
    rows = [row([], [], **fields) for fields in CUTS]
    batch = packed(rows, logits)
    found = filter_cuts(logits, row_bests(logits), batch)
    wanted = filter_cuts_reference(logits, row_bests_reference(logits), batch)
    temperature = torch.tensor([fields.get("temperature", 1.0) or 1.0 for fields in CUTS], device=device)
    x = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    kept, wanted_kept = kept_tokens(found, x), kept_tokens(wanted, x)
    differs = kept != wanted_kept
    for i, fields in enumerate(CUTS):
        if fields.get("top_p", 1.0) in (0.0, 1.0) or fields.get("temperature") == 0.0:
            assert not differs[i].any(), fields
        else:  # the mass may be rounded otherwise: only tokens whose mass before them is p, all but equal
            mass = torch.softmax(x[i].double(), 0)
            assert mass[differs[i]].sum() < 1e-5, fields


def test_filters_of_rows_that_want_none_let_all_through(device: torch.device) -> None:
    logits = normal_logits(3, 3, 70, 1.0, device)
    rows = [row([], [], top_k=3), row([], []), row([], [], temperature=0.0, top_k=3)]
    cuts = filter_cuts(logits, row_bests(logits), packed(rows, logits))
    x = logits - logits.amax(-1, keepdim=True)
    assert kept_tokens(cuts, x).sum(-1).tolist() == [3, 70, 70]


# ---------------------------------------------------------------- draw


def test_the_best_of_each_part_is_found_and_a_nan_is_infinite(device: torch.device) -> None:
    logits = normal_logits(4, 3, 9000, 1.0, device)
    logits[1, 8999] = torch.nan
    found = row_bests(logits)
    assert found.shape == (3, 3)
    assert torch.equal(found.amax(-1, keepdim=True), row_bests_reference(logits))


def test_estimates_and_definition_choose_the_same_tokens(device: torch.device) -> None:
    rows = [row([], [], seed=i, temperature=0.5 + i / 4, top_k=(i % 3) * 40) for i in range(12)]
    logits = normal_logits(5, len(rows), 9000, 2.0, device)
    batch, bests = packed(rows, logits), row_bests(logits)
    cuts = filter_cuts(logits, bests, batch)
    quick, exact = draw(logits, bests, cuts, batch), draw(logits, bests, cuts, batch, margin=float("inf"))
    twin = draw_reference(logits, bests, cuts, batch)
    assert quick.token_ids.tolist() == exact.token_ids.tolist() == twin.token_ids.tolist()
    torch.testing.assert_close(quick.gaps, twin.gaps, rtol=0, atol=2 * FAST_ERROR)


@pytest.mark.parametrize("distance", [0, 4096])
def test_scores_that_only_the_definition_tells_apart_are_told_apart(
    device: torch.device, distance: int
) -> None:
    """Two tokens, in one part or in two, whose scores differ by 1e-6 to 1e-5: less than the estimate errs."""
    num, vocab, first = 16, 9000, 100
    second = first + 1 + distance
    rows = [row([], [], seed=1000 + i) for i in range(num)]
    logits = torch.full((num, vocab), -1e4, device=device)
    batch = packed(rows, logits)
    ids = torch.tensor([[first, second]], dtype=torch.int32, device=device)
    noise = definition_of_noise(ids, batch.noise_keys())
    lead = torch.logspace(-6, -5, num, device=device) * torch.tensor([1.0, -1.0], device=device).repeat(
        num // 2
    )
    logits[:, first], logits[:, second] = noise[:, 0], noise[:, 1] + lead
    found = draw(logits, row_bests(logits), None, batch).token_ids.tolist()
    assert found == [token.token_id for token in Sampler().sample(logits.cpu(), rows)]
    assert set(found) == {first, second}


@pytest.mark.parametrize("fields", [{}, {"top_k": 4, "top_p": 0.95, "temperature": 1.3}])
def test_draws_along_the_positions_match_the_exact_distribution(
    device: torch.device, fields: dict[str, Any]
) -> None:
    num = 20_000 if device.type == "cuda" else 150  # the interpreter is slow
    logits = normal_logits(6, 1, 6, 0.7, device)
    rows = [SamplingRow(row([], [], **fields).params, 0, range(i), 0, frozenset()) for i in range(num)]
    bests = row_bests(logits)
    cuts = filter_cuts(logits, bests, packed(rows[:1], logits))
    many = [part.expand(num, -1).contiguous() for part in (logits, bests, cuts)]
    counts = Counter(draw(*many, packed(rows, logits)).token_ids.tolist())
    exact = torch.softmax(logits[0].double() / fields.get("temperature", 1.0), dim=0)
    if fields:
        exact[exact.argsort()[:2]] = 0.0  # top-k; top-p 0.95 keeps the four that are left
        exact /= exact.sum()
    kept = exact.nonzero()[:, 0].tolist()
    assert set(counts) <= set(kept)
    assert stats.chisquare([counts[i] for i in kept], [exact[i].item() * num for i in kept]).pvalue > 0.001
