"""ModelShape: what of a model costs memory and time: parameters, KV per token, arithmetic.

Owns the counting, not the reading of configurations (`model_config`). Pure values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a mixture. `num_params` of one expert in one layer."""

    num_layers: int
    num_experts: int
    num_per_token: int
    num_params: int

    @property
    def total(self) -> int:
        return self.num_layers * self.num_experts * self.num_params

    @property
    def active(self) -> int:
        return self.num_layers * self.num_per_token * self.num_params

    def num_read(self, num_tokens: int) -> float:
        """Parameters that a step of `num_tokens` touches, if each token draws its experts independently."""
        missed = (1 - self.num_per_token / self.num_experts) ** num_tokens
        return self.total * (1 - missed)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model in numbers.

    `dense` are the parameters that each step reads (attention, dense feed-forward, router, head);
    `embedding` those of an input table of its own, which are stored and looked up, not read.
    `windows` has, for each layer, how many tokens its KV spans at most (None: all). `kv_values` are the
    values that one layer keeps per token, `kv_parts` how many GPUs can share them without a copy: its heads,
    or 1 of latent attention. `attention_values`: the widths of a query and a value vector, over all heads,
    that one layer multiplies per pair of tokens. `notes` say what was assumed or left out.
    """

    name: str
    kind: str
    num_layers: int
    windows: tuple[int | None, ...]
    kv_values: int
    kv_parts: int
    attention_values: int
    dense: int
    embedding: int
    experts: Experts | None
    max_context: int | None
    weight_bits: float
    kv_bits: float = 16
    notes: tuple[str, ...] = ()

    @property
    def num_params(self) -> int:
        return self.dense + self.embedding + (self.experts.total if self.experts else 0)

    @property
    def num_active_params(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.dense + (self.experts.active if self.experts else 0)

    @property
    def weight_bytes(self) -> float:
        return self.num_params * self.weight_bits / 8

    def bytes_read(self, num_tokens: int) -> float:
        """Weights that a step of `num_tokens` streams from memory."""
        experts = self.experts.num_read(num_tokens) if self.experts else 0.0
        return (self.dense + experts) * self.weight_bits / 8

    @cached_property
    def _layers_by_window(self) -> Mapping[int | None, int]:
        return Counter(self.windows)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of a token that all layers still hold."""
        return self.num_layers * self.kv_values * self.kv_bits / 8

    def kv_bytes(self, num_tokens: int) -> float:
        """KV of one sequence of `num_tokens`; layers with a window keep no more than it."""
        spans = sum(
            count * (num_tokens if window is None else min(num_tokens, window))
            for window, count in self._layers_by_window.items()
        )
        return spans * self.kv_values * self.kv_bits / 8

    def flops(self, num_tokens: int, num_before: int = 0) -> float:
        """Arithmetic of reading `num_tokens` after `num_before` others of the same sequence.

        Two operations for each active parameter; causal attention costs two for each pair of tokens and each
        value of query and value vectors.
        """
        pairs = 0.0
        for window, count in self._layers_by_window.items():
            seen = num_before + (num_tokens + 1) / 2
            pairs += count * num_tokens * (seen if window is None else min(seen, window))
        return 2.0 * self.num_active_params * num_tokens + 2.0 * pairs * self.attention_values

    def with_num_params(self, num_params: float) -> ModelShape:
        """The nominal count that people calculate with (70e9), all of it read in each step.

        Raises InvalidConfig for a mixture: its count says nothing of what is read.
        """
        if self.experts is not None:
            raise InvalidConfig("a parameter count can be given for dense models only", key="params")
        if not 0 < num_params < math.inf:
            raise InvalidConfig("the parameter count must be above 0, and finite", key="params")
        note = (
            f"{num_params / 1e9:.4g} B parameters as given; config.json counts {self.num_params / 1e9:.4g} B"
        )
        return replace(self, dense=round(num_params), embedding=0, notes=(*self.notes, note))

    def with_bits(self, weight_bits: float | None, kv_bits: float | None) -> ModelShape:
        return replace(self, weight_bits=weight_bits or self.weight_bits, kv_bits=kv_bits or self.kv_bits)
