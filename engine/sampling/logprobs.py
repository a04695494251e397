"""Reported log-probabilities: of the raw logits, whatever the sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.request import TokenLogprob
from engine.sampling.ranking import top_ids


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-softmax of float32 logits `[num_rows, vocab]` at one token for each row, and at the `num_top` best.

    `top` is by logit descending, then id ascending, so a greedy token comes first; the chosen token is always
    reported and need not be among them. Also for prompt tokens.
    """
    assert logits.shape[0] == len(token_ids)
    if not token_ids:
        return []
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    chosen_logprobs = logprobs.gather(-1, chosen)[:, 0].tolist()
    num_top = min(num_top, logits.shape[-1])
    if num_top == 0:
        return [TokenLogprob(i, value) for i, value in zip(token_ids, chosen_logprobs, strict=True)]
    top = top_ids(logits, num_top)
    columns = zip(token_ids, chosen_logprobs, top.tolist(), logprobs.gather(-1, top).tolist(), strict=True)
    return [
        TokenLogprob(token_id, value, tuple(zip(ids, values, strict=True)))
        for token_id, value, ids, values in columns
    ]
