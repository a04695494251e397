"""Fit: the price of steps that was most likely paid, given what some of them took. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.simulator.step_price import BatchPrice, Features, StepPrice


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
    fixed_s, token_s, pair_s, stream_s, kv_s = map(float, found)
    price = StepPrice(fixed_s, token_s, pair_s, stream_s, kv_s)
    errors = [abs(price.seconds(step.features) / step.seconds - 1.0) for step in steps]
    return price, float(np.median(errors))


def batch_prices(steps: Sequence[Measured]) -> tuple[BatchPrice, ...]:
    """For each number of streams that was measured without prompts, a line over their KV. Two steps of it at
    least; their KV costs nothing if the longer ones took less.
    """
    by_size: dict[float, list[Measured]] = {}
    for step in steps:
        _, tokens, _, streams, _ = step.features
        if streams and not tokens:
            by_size.setdefault(streams, []).append(step)
    found = []
    for streams, some in sorted(by_size.items()):
        if len(some) < 2:
            continue
        kv_tokens = np.array([step.features[4] for step in some])
        seconds = np.array([step.seconds for step in some])
        slope, level = np.polyfit(kv_tokens, seconds, 1)
        if slope < 0.0 or level <= 0.0:
            slope, level = 0.0, seconds.mean()
        found.append(BatchPrice(streams, float(level), float(slope)))
    return tuple(found)
