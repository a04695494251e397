"""A batch of streams costs what was measured for its size, or what lies between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.simulator.step_price import BatchPrice, StepPrice

LINE = StepPrice(fixed_s=0.005, token_s=0.001, pair_s=0.0, stream_s=0.002, kv_s=1e-6)
BATCHES = (BatchPrice(1, 0.006, 1e-6), BatchPrice(2, 0.006, 3e-6), BatchPrice(4, 0.010, 2e-6))
PRICE = replace(LINE, batches=BATCHES)


@pytest.mark.parametrize(
    ("num_streams", "seconds"), [(1, 0.007), (2, 0.009), (3, 0.0105), (4, 0.012), (6, 0.016)]
)
def test_batches_cost_what_was_measured_what_lies_between_and_beyond_what_the_line_says(
    num_streams: int, seconds: float
) -> None:
    assert PRICE.seconds((1.0, 0.0, 0.0, float(num_streams), 1000.0)) == pytest.approx(seconds)


def test_steps_that_read_cost_what_the_line_says() -> None:
    for features in ((1.0, 64.0, 2048.0, 3.0, 900.0), (1.0, 64.0, 2048.0, 0.0, 0.0)):
        assert PRICE.seconds(features) == LINE.seconds(features)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batches": (BatchPrice(2, 0.1, 0.0), BatchPrice(1, 0.1, 0.0))}, "batches"),
        ({"batches": (BatchPrice(2, 0.1, 0.0), BatchPrice(2, 0.1, 0.0))}, "batches"),
        ({"token_s": -1.0}, "token_s"),
    ],
)
def test_a_price_that_cannot_be_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(LINE, **changes)


@pytest.mark.parametrize(
    ("values", "named"),
    [((0, 0.1, 0.0), "num_streams"), ((1, 0.0, 0.0), "fixed_s"), ((1, 0.1, -1.0), "kv_s")],
)
def test_a_batchs_price_that_cannot_be_is_named(values: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BatchPrice(*values)
