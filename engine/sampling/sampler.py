"""Sampler: logits to tokens.

Owns the order of the steps and how rows are grouped. On a CPU each sampled row is worked on by itself: that
is quicker, since a row fits the cache, and it makes a token independent of its neighbours bit for bit; on a
GPU rows with the same shape of work go together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from core.errors import StepFailed
from core.request import SamplingParams, TokenLogprob
from engine.sampling.adjust import adjust
from engine.sampling.filters import Candidates, num_listed, sorted_candidates, unsorted_candidates
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import key_tensor, log_exponential, row_key
from engine.sampling.row import SamplingRow
from engine.step import SampledToken

_GREEDY, _UNSORTED = -1, 0  # kinds of work; a positive kind is the number of candidates to list
_MIN_TEMPERATURE = 1e-30  # still a normal float32
_Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # token ids, gaps and best logits, each [num_rows]
_WIDER = 16  # a nucleus that does not end among the listed: list that many times more


class Sampler:
    """Stateless; `sample` may be called with any rows in any order.

    `tile_rows` is how many sampled rows are worked on together at most (default: one on a CPU, all on a GPU).
    """

    def __init__(self, tile_rows: int | None = None) -> None:
        self._tile_rows = tile_rows

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token for each row of float32 logits `[num_rows, vocab]`, which are left as they are.

        A `gap` is the least change of logits that could have led to another token, as far as near ties are
        concerned: the gap of the two best perturbed scores and, where a filter decision matters, its margin.
        Scores are in units of scaled logits; below temperature 1 they are scaled back, so that the gap joins
        the greedy one, which is of logits. Raises StepFailed if a row has a NaN or no finite maximum.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(rows)
        token_ids, gaps = [0] * len(rows), [0.0] * len(rows)
        for kind, indexes in self._group(rows, logits).items():
            for tile in self._tiles(kind, indexes, logits.device):
                for index, (token_id, gap) in zip(tile, self._run(kind, tile, logits, rows), strict=True):
                    token_ids[index], gaps[index] = token_id, gap
        logprobs = self._logprobs(logits, rows, token_ids)
        return [
            SampledToken(row.sample_index, token_id, logprob, gap)
            for row, token_id, logprob, gap in zip(rows, token_ids, logprobs, gaps, strict=True)
        ]

    def _group(self, rows: Sequence[SamplingRow], logits: torch.Tensor) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            kind = _GREEDY if row.is_greedy else num_listed(row.params, logits.shape[-1])
            groups.setdefault(kind, []).append(index)
        return groups

    def _tiles(self, kind: int, indexes: list[int], device: torch.device) -> list[list[int]]:
        if kind == _GREEDY:  # only comparisons: no neighbour can matter
            return [indexes]
        size = self._tile_rows or (1 if device.type == "cpu" else len(indexes))
        return [indexes[start : start + size] for start in range(0, len(indexes), size)]

    def _run(
        self, kind: int, tile: list[int], logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[tuple[int, float]]:
        chosen = [rows[index] for index in tile]
        is_all = len(tile) == len(rows)
        x = logits if is_all else logits[tile]
        if any(row.is_adjusted for row in chosen):
            x = x.clone(memory_format=torch.contiguous_format) if is_all else x
            adjust(x, chosen)
        token_ids, gaps, best = _greedy(x) if kind == _GREEDY else _drawn(x, chosen, kind)
        # one transfer for all; float64 holds ids and float32 exactly
        columns = torch.stack([token_ids.double(), gaps.double(), best.double()], dim=1).tolist()
        for index, (_, gap, maximum) in zip(tile, columns, strict=True):
            if not math.isfinite(maximum) or math.isnan(gap):
                raise StepFailed("logits are not finite", row=index)
        return [(int(token_id), gap) for token_id, gap, _ in columns]

    def _logprobs(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
    ) -> list[TokenLogprob | None]:
        found: list[TokenLogprob | None] = []
        for index, row in enumerate(rows):
            num_top = row.params.logprobs
            here = slice(index, index + 1)
            found += [None] if num_top is None else token_logprobs(logits[here], token_ids[here], num_top)
        return found


def _greedy(x: torch.Tensor) -> _Chosen:
    """The best token of each row of `[num_rows, vocab]`, ties to the lowest id, and its lead."""
    token_ids = x.argmax(-1)  # the first of equals
    best = x.gather(-1, token_ids[:, None])
    if x.shape[-1] == 1:
        return token_ids, torch.full(token_ids.shape, math.inf, device=x.device), best[:, 0]
    x.scatter_(-1, token_ids[:, None], -math.inf)
    second = x.amax(-1, keepdim=True)
    x.scatter_(-1, token_ids[:, None], best)
    return token_ids, (best - second)[:, 0], best[:, 0]


def _drawn(x: torch.Tensor, rows: Sequence[SamplingRow], kind: int) -> _Chosen:
    """A token of each row of `[num_rows, vocab]` by the Gumbel-max trick over what the filters keep."""
    best = x.amax(-1)
    params = [row.params for row in rows]
    temperatures = [max(item.temperature, _MIN_TEMPERATURE) for item in params]
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=x.device)
    # shifted first, so that no temperature overflows and the best tokens keep their precision
    x = (x - best[:, None]) / temperature[:, None]
    keys = key_tensor([row_key(row.params.seed, row.sample_index, row.position) for row in rows], x.device)
    if kind == _UNSORTED:
        token_ids, gaps = _draw(unsorted_candidates(x, params), keys)
    else:
        token_ids, gaps = _draw_sorted(x, params, keys, kind)
    return token_ids, gaps * temperature.clamp(max=1.0), best


def _draw_sorted(
    x: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_draw` over the `num` best tokens, over more of them for the rows that need it."""
    candidates, is_open = sorted_candidates(x, params, num)
    token_ids, gaps = _draw(candidates, keys)
    again = is_open.nonzero()[:, 0]
    if len(again):
        wider = min(x.shape[-1], num * _WIDER)
        token_ids[again], gaps[again] = _draw_sorted(
            x[again], [params[index] for index in again.tolist()], keys[again], wider
        )
    return token_ids, gaps


def _draw(candidates: Candidates, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """argmax of x − log E over the kept candidates, ties to the lowest id, and the gap."""
    ids, cut = candidates.ids, candidates.cut
    scores = candidates.values - log_exponential(ids.to(torch.int32), keys)
    kept = scores if cut is None else scores.masked_fill(~cut.is_kept, -math.inf)
    best = kept.amax(-1, keepdim=True)
    token_ids = ids.masked_fill(kept != best, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
    is_winner = ids == token_ids
    second = kept.masked_fill(is_winner, -math.inf).amax(-1, keepdim=True)
    gaps = (best - second)[:, 0]
    if cut is not None:
        # a dropped token matters only if it would have won, or nearly so, and was nearly kept
        dropped = torch.maximum(cut.margin, (best - scores).clamp(min=0.0)).masked_fill(cut.is_kept, math.inf)
        winner = cut.margin.masked_fill(~is_winner, math.inf)
        gaps = gaps.minimum(dropped.amin(-1)).minimum(winner.amin(-1)).minimum(cut.floor)
    return token_ids[:, 0], gaps
