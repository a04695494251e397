"""Fit: the price of steps that was most likely paid, given what some of them took. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.simulator.step_price import Features, StepPrice


@dataclass(frozen=True, slots=True)
class Measured:
    """A kind of step, and what it took."""

    features: Features
    seconds: float


def fit_price(steps: Sequence[Measured]) -> tuple[StepPrice, float]:
    """The price by least squares of relative errors, none of its parts below 0; and the median of what is
    left, as a share of what was measured.

    A part that would be below 0 is left out and the others are fitted again: Lawson and Hanson's active set,
    without its way back, which five parts do not need. Raises ValueError for fewer steps than parts.
    """
    num_parts = 5
    if len(steps) < num_parts:
        raise ValueError(f"{num_parts} kinds of steps are needed at least, not {len(steps)}")
    seconds = np.array([step.seconds for step in steps])
    # each row divided by what it took: a long step counts as much as a short one
    rows = np.array([step.features for step in steps]) / seconds[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    kept = [part for part in range(num_parts) if np.abs(rows[:, part]).max() > 0.0]
    found = np.zeros(num_parts)
    while kept:
        solved, *_ = np.linalg.lstsq(rows[:, kept] / scales[kept], np.ones(len(steps)), rcond=None)
        if (solved >= 0.0).all():
            found[kept] = solved / scales[kept]
            break
        del kept[int(np.argmin(solved))]
    price = StepPrice(*(float(value) for value in found))
    errors = [abs(price.seconds(step.features) / step.seconds - 1.0) for step in steps]
    return price, float(np.median(errors))
