"""Top-k, top-p and min-p: which tokens may be drawn, and how near each was to the other side.

Works on scaled logits x whose row maximum is 0, so that a probability ratio to the best token is exp(x).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.ranking import top_ids
from engine.sampling.settings import Ints, Records

_NUCLEUS_GUESS = 512  # enough for nearly all nuclei, and still below what topk does with a heap
_MARGIN_TOKENS = 8  # candidates listed behind a top-k cut, to see how near they were


@dataclass(frozen=True, slots=True)
class Cut:
    """What filters decided about the listed tokens, `[num_rows, m]`: `is_kept` may be drawn.

    `margin` is how far the decision to keep or drop a token was from falling the other way: a logit gap for
    top-k and min-p; for top-p the lesser of the cumulative mass against p and the logit gap to the border,
    since two tokens near the border may also swap places. `floor` `[num_rows]` is the least margin of the
    tokens that are not listed.
    """

    is_kept: torch.Tensor
    margin: torch.Tensor
    floor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """`ids` (int64) and `values` (x), both `[num_rows, m]`, of the listed tokens; `cut` is None if all are
    kept.
    """

    ids: torch.Tensor
    values: torch.Tensor
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of some rows, all `[num_rows, 1]` on the device of their logits."""

    top_k: torch.Tensor  # int64, size of the vocabulary: off
    top_p: torch.Tensor  # float32, infinite: off
    log_min_p: torch.Tensor  # float32, -inf: off
    has_min_p: bool  # whether it is on for any row

    def at(self, rows: torch.Tensor) -> Filters:
        """Those of some of the rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.log_min_p[rows], self.has_min_p)


def tiled_filters(settings: Records, vocab_size: int, size: int, device: torch.device) -> list[Filters]:
    """From records of SETTINGS, `size` rows at a time."""
    top_k, top_p, log_min_p = settings["top_k"], settings["top_p"], settings["log_min_p"]
    limits = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    has_min_p = (log_min_p > -math.inf).tolist()
    columns = zip(
        torch.split(torch.from_numpy(limits).to(device)[:, None], size),
        torch.split(column(np.where(top_p < 1.0, top_p, math.inf), device), size),
        torch.split(column(log_min_p, device), size),
        range(0, len(settings), size),
        strict=True,
    )
    return [Filters(k, p, log_p, any(has_min_p[first : first + size])) for k, p, log_p, first in columns]


def unsorted_candidates(x: torch.Tensor, filters: Filters) -> Candidates:
    """All tokens of `[num_rows, vocab]`, filtered by min-p alone."""
    ids = torch.arange(x.shape[-1], device=x.device).expand_as(x)
    if not filters.has_min_p:
        return Candidates(ids, x, None)
    is_kept, margin = _min_p(x, filters.log_min_p)
    floor = torch.full((x.shape[0],), math.inf, device=x.device)
    return Candidates(ids, x, Cut(is_kept, margin, floor))


def num_listed(settings: Records, vocab_size: int) -> Ints:
    """How many best tokens to list at first, for each of the records of SETTINGS; 0 if no filter needs an
    order. Depends on the row's parameters only.
    """
    top_k = settings["top_k"]
    nucleus = np.where(settings["top_p"] < 1.0, min(vocab_size, _NUCLEUS_GUESS), 0)
    listed = np.minimum(vocab_size, top_k + _MARGIN_TOKENS)
    return np.where((top_k > 0) & (top_k < vocab_size), listed, nucleus)


def sorted_candidates(x: torch.Tensor, filters: Filters, num: int) -> tuple[Candidates, torch.Tensor]:
    """The `num` best tokens of `[num_rows, vocab]` in order, filtered by top-k, top-p and min-p in this
    order.

    Top-p keeps the smallest set of best tokens whose mass, of what top-k left, is at least p, and at least
    one token. Also returns which rows (bool `[num_rows]`) have a nucleus that does not end among the listed:
    they need a longer list.
    """
    vocab_size = x.shape[-1]
    ids = top_ids(x, num)
    values = x.gather(-1, ids)
    rank = torch.arange(num, device=x.device)[None, :]  # [1, num]
    in_k, margin_k = _top_k(values, rank, filters.top_k)
    in_p, margin_p, is_open = _top_p(x, values, in_k, filters.top_p)
    in_m, margin_m = _min_p(values, filters.log_min_p)
    is_kept = in_k & in_p & in_m
    margin = torch.where(
        is_kept,
        torch.minimum(margin_k, margin_p).minimum(margin_m),
        # to come in, a token must change sides at each filter that drops it
        margin_k.masked_fill(in_k, 0.0)
        .maximum(margin_p.masked_fill(in_p, 0.0))
        .maximum(margin_m.masked_fill(in_m, 0.0)),
    )
    floor = margin[:, -1] if num < vocab_size else torch.full_like(margin[:, -1], math.inf)
    return Candidates(ids, values, Cut(is_kept, margin, floor)), is_open & (num < vocab_size)


def _top_k(
    values: torch.Tensor, rank: torch.Tensor, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    in_k = rank < limits
    return in_k, _border_gap(values, in_k)


def _border_gap(values: torch.Tensor, is_in: torch.Tensor) -> torch.Tensor:
    """Logit gap of each token of a sorted row to the nearest one beyond the cut; infinite without a cut in
    sight.
    """
    num_in = is_in.sum(-1, keepdim=True)
    last_in = values.gather(-1, num_in - 1)
    first_out = values.gather(-1, num_in.clamp(max=values.shape[-1] - 1))
    has_cut = num_in < values.shape[-1]
    gap = torch.where(is_in, values - first_out, last_in - values)
    return torch.where(has_cut & ~gap.isnan(), gap, math.inf)  # masked tokens: -inf - -inf


def _top_p(
    x: torch.Tensor, values: torch.Tensor, in_k: torch.Tensor, p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mass = _mass_before(x, values, in_k)  # [num_rows, num + 1]
    before = mass[:, :-1]
    before[:, 0] = -math.inf  # the best token is always in
    in_p = before < p
    margin = torch.minimum((before - p).abs(), _border_gap(values, in_p))
    is_open = (mass[:, -1:] < p) & (p < math.inf) & in_k[:, -1:]
    return in_p, margin, is_open[:, 0]


def _mass_before(x: torch.Tensor, values: torch.Tensor, in_k: torch.Tensor) -> torch.Tensor:
    """Cumulative mass before each listed token and after the last, in float32: `[num_rows, num + 1]`."""
    listed = values.masked_fill(~in_k, -math.inf)
    is_cut = ~in_k.all(-1, keepdim=True)  # top-k ends among the listed: its tokens alone make up the mass
    total = torch.logsumexp(listed, dim=-1, keepdim=True)
    if not bool(is_cut.all()):
        total = torch.where(is_cut, total, torch.logsumexp(x, dim=-1, keepdim=True))
    mass = torch.cumsum(torch.exp(listed - total), dim=-1)
    return torch.cat([torch.zeros_like(mass[:, :1]), mass], dim=-1)


def _min_p(values: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_best = values == 0.0
    second = values.masked_fill(is_best, -math.inf).amax(-1, keepdim=True)
    lead = torch.where(is_best.sum(-1, keepdim=True) > 1, 0.0, -second)
    # the best token can only be dropped by one that overtakes it
    margin = torch.where(is_best, lead - threshold, (values - threshold).abs())
    return values >= threshold, torch.where(threshold == -math.inf, math.inf, margin)


def column(values: NDArray[np.float64], device: torch.device) -> torch.Tensor:
    """As float32 `[num_rows, 1]`."""
    return torch.from_numpy(values.astype(np.float32)).to(device)[:, None]
