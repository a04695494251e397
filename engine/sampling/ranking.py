"""Ranking with a total order: by value descending, then by id ascending.

`torch.topk` leaves the order of equal values open; here a value and its id become one integer.
"""

from __future__ import annotations

import torch


def top_ids(values: torch.Tensor, num: int) -> torch.Tensor:
    """Ids of the `num` first entries of each row of float32 `[num_rows, n]`, in order: int64 `[num_rows,
    num]`.

    No NaN. Positive and negative zero are equal.
    """
    n = values.shape[-1]
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    # a negative float grows with falling bits; flipping all but the sign makes integers sort as the floats do
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(n - 1, -1, -1, device=values.device)
    keys = (ordered.to(torch.int64) << 32) | reversed_ids
    best = keys.sort(-1, descending=True).values if num == n else keys.topk(num, dim=-1).values
    return (n - 1) - (best & 0xFFFFFFFF)
