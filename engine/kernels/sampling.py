"""Sampling on the device: a step's logits become tokens without the host waiting.

Owns the order of the kernels and what comes back; the semantics are those of `engine.sampling`, and so is the
token of each row, near ties apart. Used on the step thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.errors import StepFailed
from core.request import TokenLogprob
from engine.kernels.sampling_adjust import adjust, adjust_reference
from engine.kernels.sampling_best import row_bests, row_bests_reference
from engine.kernels.sampling_draw import Draws, draw, draw_reference
from engine.kernels.sampling_filter import filter_cuts, filter_cuts_reference
from engine.kernels.sampling_logprobs import Logprobs, token_logprobs, token_logprobs_reference
from engine.kernels.sampling_table import NUM_TOP, SamplingBatch
from engine.sampling.sampled import SampledColumns


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """What a step sampled, on the device; `logprobs` is None if no row wants any."""

    draws: Draws
    logprobs: Logprobs | None

    def columns(self, batch: SamplingBatch) -> SampledColumns:
        """The same on the host, which waits for the device. Raises StepFailed if a row's logits have a NaN or
        no finite maximum.
        """
        draws, logprobs = self.draws, self.logprobs
        token_ids, gaps, is_finite = torch.stack(
            [draws.token_ids.double(), draws.gaps.double(), draws.is_finite.double()]
        ).cpu()
        if not bool(is_finite.all()):
            raise StepFailed("logits are not finite", row=int(is_finite.argmin()))
        found: dict[int, TokenLogprob] = {}
        if logprobs is not None:
            reports = zip(
                token_ids.int().tolist(),
                batch.ints(NUM_TOP).tolist(),
                logprobs.chosen.tolist(),
                logprobs.top_ids.tolist(),
                logprobs.top.tolist(),
                strict=True,
            )
            for row, (token_id, num, chosen, ids, values) in enumerate(reports):
                if num >= 0:
                    top = tuple(zip(ids[:num], values[:num], strict=True))
                    found[row] = TokenLogprob(token_id, chosen, top)
        return SampledColumns(token_ids.long().numpy(), gaps.numpy(), found)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> DeviceSamples:
    """One token for each row of contiguous float32 `[num_rows, vocab]`, which are left as they are."""
    scores = logits
    if batch.is_adjusted:
        scores = logits.clone()
        adjust(scores, batch)
    bests = row_bests(scores)
    cuts = filter_cuts(scores, bests, batch) if batch.num_cut > 0 else None
    draws = draw(scores, bests, cuts, batch)
    if batch.num_top < 0:
        return DeviceSamples(draws, None)
    wanted = batch.ints(NUM_TOP).contiguous()
    return DeviceSamples(draws, token_logprobs(logits, draws.token_ids, wanted, batch.num_top))


def sample_reference(logits: torch.Tensor, batch: SamplingBatch) -> DeviceSamples:
    """The twin of `sample` in plain torch."""
    scores = logits.clone()
    adjust_reference(scores, batch)
    bests = row_bests_reference(scores)
    cuts = filter_cuts_reference(scores, bests, batch) if batch.num_cut > 0 else None
    draws = draw_reference(scores, bests, cuts, batch)
    if batch.num_top < 0:
        return DeviceSamples(draws, None)
    wanted = batch.ints(NUM_TOP)
    return DeviceSamples(draws, token_logprobs_reference(logits, draws.token_ids, wanted, batch.num_top))
