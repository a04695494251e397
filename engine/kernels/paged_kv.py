"""PagedKV: one layer's keys and values as a kernel takes them, and the rule by which they are attended to.

Owns the two argument types that kernels and twins share. Immutable views; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """`keys` and `values` are `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous, of one dtype.

    With `key_scales` and `value_scales`, fp32 `[num_blocks, num_kv_heads, block_size]`, the slots are int8 or
    fp8 (e4m3) and each vector of a slot has its own scale: a vector is `slot * scale`. A scale per vector can
    be written with its token and never again, and one block stays as meaningful as another when it moves.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A score is `q · k * scale`, with a `soft_cap` c then `c * tanh(score / c)` (Gemma 2, arXiv 2408.00118).

    A token sees itself and the tokens before it; with a `window` w only the last w, itself included. 0 means
    no cap, no window.
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0
