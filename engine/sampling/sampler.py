"""Sampler: logits to tokens.

Owns the order of the steps and how rows are grouped. On a CPU each sampled row is worked on by itself: that
is quicker, since a row fits the cache, and it makes a token independent of its neighbours bit for bit; on a
GPU rows with the same shape of work go together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from core.errors import StepFailed
from core.request import TokenLogprob
from engine.sampling.adjust import adjust
from engine.sampling.filters import (
    Candidates,
    Filters,
    column,
    num_listed,
    sorted_candidates,
    tiled_filters,
    unsorted_candidates,
)
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import log_exponential, row_keys
from engine.sampling.one_thread import one_thread
from engine.sampling.row import SamplingRow
from engine.sampling.sampled import SampledColumns, SampledToken
from engine.sampling.settings import Ints, Records, SamplingColumns, columns_of

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

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """`draw` for rows given one by one."""
        drawn = self.draw(logits, columns_of(rows))
        return [drawn.token(index, row.sample_index) for index, row in enumerate(rows)]

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, columns: SamplingColumns) -> SampledColumns:
        """One token for each row of float32 logits `[num_rows, vocab]`, which are left as they are.

        A `gap` is the least change of logits that could have led to another token, as far as near ties are
        concerned: the gap of the two best perturbed scores and, where a filter decision matters, its margin.
        Scores are in units of scaled logits; below temperature 1 they are scaled back, so that the gap joins
        the greedy one, which is of logits. Raises StepFailed if a row has a NaN or no finite maximum.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(columns)
        with one_thread():
            return self._draw_all(logits, columns)

    def _draw_all(self, logits: torch.Tensor, columns: SamplingColumns) -> SampledColumns:
        found = np.empty((3, len(columns)))  # token ids, gaps, best logits: float64 holds all of them exactly
        for kind, indexes in _groups(columns.settings, logits.shape[-1]):
            # one transfer for all rows of a kind
            found[:, indexes] = torch.cat(self._run(kind, indexes, logits, columns), dim=1).cpu().numpy()
        gaps, best = found[1], found[2]
        is_broken = ~np.isfinite(best) | np.isnan(gaps)
        if is_broken.any():
            raise StepFailed("logits are not finite", row=int(is_broken.argmax()))
        token_ids: Ints = found[0].astype(np.int64)
        return SampledColumns(token_ids, gaps, _logprobs(logits, columns, token_ids))

    def _run(
        self, kind: int, indexes: Ints, logits: torch.Tensor, columns: SamplingColumns
    ) -> list[torch.Tensor]:
        """`[3, num_rows]` for each tile of the rows `indexes`."""
        if kind == _GREEDY:  # only comparisons: no neighbour can matter
            return [_joined(_greedy(_adjusted(logits, indexes, columns)))]
        size = self._tile_rows or (1 if logits.device.type == "cpu" else len(indexes))
        settings, positions, device = columns.settings[indexes], columns.positions[indexes], logits.device
        temperatures = column(np.maximum(settings["temperature"], _MIN_TEMPERATURE), device)
        tiles = zip(
            range(0, len(indexes), size),
            torch.split(temperatures, size),
            torch.split(row_keys(settings["key"], positions, device), size),
            tiled_filters(settings, logits.shape[-1], size, device),
            strict=True,
        )
        return [
            _joined(
                _drawn(_adjusted(logits, indexes[first : first + size], columns), kind, heat, keys, filters)
            )
            for first, heat, keys, filters in tiles
        ]


def _joined(chosen: _Chosen) -> torch.Tensor:
    return torch.stack([column.double() for column in chosen])


def _groups(settings: Records, vocab_size: int) -> list[tuple[int, Ints]]:
    """Rows by kind of work."""
    is_greedy = settings["temperature"] == 0.0
    if is_greedy.all():
        return [(_GREEDY, np.arange(len(settings)))]
    kinds = np.where(is_greedy, _GREEDY, num_listed(settings, vocab_size))
    return [(kind, np.flatnonzero(kinds == kind)) for kind in dict.fromkeys(kinds.tolist())]


def _adjusted(logits: torch.Tensor, tile: Ints, columns: SamplingColumns) -> torch.Tensor:
    """The rows `tile`, with bias, penalties and mask; `logits` themselves or a view where nothing changes."""
    rows: dict[int, SamplingRow] = {}
    if columns.adjusted:
        places = enumerate(tile.tolist())
        rows = {place: columns.adjusted[index] for place, index in places if index in columns.adjusted}
    if len(tile) == len(columns):
        x = logits
    elif len(tile) == 1:
        x = logits[int(tile[0]) : int(tile[0]) + 1]
    else:
        x = logits[torch.from_numpy(tile).to(logits.device)]
    if rows:
        x = x.clone(memory_format=torch.contiguous_format)
        adjust(x, rows)
    return x


def _logprobs(logits: torch.Tensor, columns: SamplingColumns, token_ids: Ints) -> dict[int, TokenLogprob]:
    """For the rows that ask for them."""
    found: dict[int, TokenLogprob] = {}
    num_logprobs = columns.settings["num_logprobs"]
    for index in np.flatnonzero(num_logprobs >= 0).tolist():
        here = slice(index, index + 1)
        (found[index],) = token_logprobs(logits[here], token_ids[here].tolist(), int(num_logprobs[index]))
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


def _drawn(
    x: torch.Tensor, kind: int, temperature: torch.Tensor, keys: torch.Tensor, filters: Filters
) -> _Chosen:
    """A token of each row of `[num_rows, vocab]` by the Gumbel-max trick over what the filters keep.

    `temperature` is `[num_rows, 1]`, `keys` are the rows' noise.
    """
    best = x.amax(-1)
    # shifted first, so that no temperature overflows and the best tokens keep their precision
    x = (x - best[:, None]) / temperature
    if kind == _UNSORTED:
        token_ids, gaps = _draw(unsorted_candidates(x, filters), keys)
    else:
        token_ids, gaps = _draw_sorted(x, filters, keys, kind)
    return token_ids, gaps * temperature[:, 0].clamp(max=1.0), best


def _draw_sorted(
    x: torch.Tensor, filters: Filters, keys: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_draw` over the `num` best tokens, over more of them for the rows that need it."""
    candidates, is_open = sorted_candidates(x, filters, num)
    token_ids, gaps = _draw(candidates, keys)
    again = is_open.nonzero()[:, 0]
    if len(again):
        wider = min(x.shape[-1], num * _WIDER)
        token_ids[again], gaps[again] = _draw_sorted(x[again], filters.at(again), keys[again], wider)
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
