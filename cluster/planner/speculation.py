"""What speculative decoding is worth: tokens per verify step, and the gain in time.

Source: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", 2023, theorems
3.8 and 3.11, with the verify step's own time from the roofline. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.planner.capacity import Capacity
from core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Speculation:
    """`acceptance` (alpha) of one draft token, `num_draft_tokens` (gamma) per verify, `draft_cost` (c): time
    of a draft token as a share of a decode step (0 for n-grams).
    """

    acceptance: float = 0.8
    num_draft_tokens: int = 5
    draft_cost: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise InvalidConfig("the acceptance of a draft token must be between 0 and 1", key="spec-alpha")
        if self.num_draft_tokens < 1:
            raise InvalidConfig("a verify step has at least one draft token", key="spec-gamma")
        if not 0 <= self.draft_cost < math.inf:
            raise InvalidConfig("the cost of a draft token must not be negative, and finite", key="spec-cost")

    @property
    def tokens_per_verify(self) -> float:
        alpha, gamma = self.acceptance, self.num_draft_tokens
        return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)

    def gain(self, capacity: Capacity, num_sequences: int, context: int) -> float:
        """How many times as fast a step's tokens come; below 1 it costs more than it gives."""
        plain = capacity.decode_step_s(num_sequences, context)
        verify = capacity.decode_step_s(num_sequences, context, self.num_draft_tokens + 1)
        drafting = self.num_draft_tokens * self.draft_cost * plain
        return self.tokens_per_verify * plain / (verify + drafting)
