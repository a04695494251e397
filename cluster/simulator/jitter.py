"""Jitter: steps that are alike do not take the same time each. How they differ, and a draw from that.

Owns the distribution, as measured: no law is assumed. Pure but for the draws, which are seeded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.step import StepPlan

_NUM_QUANTILES = 101


@dataclass(frozen=True, slots=True)
class Jitter:
    """How many times its price a step takes, by size, from the smallest to the largest in equal shares; the
    mean is 1. `streaming`: of steps that only decode; `reading`: of all the steps of a prompt; `chunk`: how
    many times as long as the prompt's steps on the average one of them. Empty: as the price says.
    """

    streaming: tuple[float, ...] = ()
    reading: tuple[float, ...] = ()
    chunk: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("streaming", "reading", "chunk"):
            values = getattr(self, name)
            if any(not value >= 0.0 for value in values) or list(values) != sorted(values):
                raise ValueError(f"{name} must not be negative, and in the order of size")
            if len(values) == 1:
                raise ValueError(f"{name} needs two values at least")


class Draws:
    """Of one worker."""

    def __init__(self, jitter: Jitter, chance: random.Random) -> None:
        self._jitter = jitter
        self._chance = chance
        self._prompt: object = None
        self._of_prompt = 1.0

    def step(self, plan: StepPlan) -> float:
        """How many times its price this step takes; the steps of one prompt have a part in common."""
        if not plan.chunks:
            return self.streaming()
        prompt = plan.chunks[0].sequence
        if prompt is not self._prompt:
            self._prompt = prompt
            self._of_prompt = self._drawn(self._jitter.reading)
        return self._of_prompt * self._drawn(self._jitter.chunk)

    def streaming(self) -> float:
        """The same, of a step that only decodes."""
        return self._drawn(self._jitter.streaming)

    def _drawn(self, values: tuple[float, ...]) -> float:
        if not values:
            return 1.0
        position = self._chance.random() * (len(values) - 1)
        below = int(position)
        return values[below] + (position - below) * (values[below + 1] - values[below])


def spread_of(ratios: Sequence[float]) -> tuple[float, ...]:
    """The values of a `Jitter`, from how many times its price each step took; none of less than two."""
    if len(ratios) < 2:
        return ()
    quantiles = np.quantile(ratios, np.linspace(0.0, 1.0, min(_NUM_QUANTILES, len(ratios))))
    mean = float(np.mean(0.5 * (quantiles[1:] + quantiles[:-1])))  # of what is drawn
    return tuple(round(float(value) / mean, 4) for value in quantiles)
