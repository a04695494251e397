"""The price that steps were charged is found again from what they took."""

from __future__ import annotations

import itertools
import random

import pytest

from cluster.simulator.fit import Measured, batch_prices, fit_price
from cluster.simulator.step_price import Features, StepPrice

PRICE = StepPrice(fixed_s=0.006, token_s=30e-6, pair_s=1e-9, stream_s=20e-6, kv_s=50e-9)


def _grid() -> list[Features]:
    decode = [
        (1.0, 0.0, 0.0, n, n * c) for n, c in itertools.product((1.0, 4.0, 16.0), (64.0, 512.0, 4096.0))
    ]
    prompts = itertools.product((16.0, 256.0, 2048.0), (0.0, 1024.0, 16_384.0))
    return decode + [(1.0, n, n * (c + n / 2), 0.0, 0.0) for n, c in prompts]


def test_each_part_of_the_price_is_found() -> None:
    price, error = fit_price([Measured(found, PRICE.seconds(found)) for found in _grid()])
    for name in ("fixed_s", "token_s", "pair_s", "stream_s", "kv_s"):
        assert getattr(price, name) == pytest.approx(getattr(PRICE, name), rel=1e-6)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_noise_of_five_percent_leaves_typical_steps_within_five_percent() -> None:
    chance = random.Random(3)
    steps = [Measured(found, PRICE.seconds(found) * chance.uniform(0.95, 1.05)) for found in _grid()]
    price, error = fit_price(steps)
    assert 0.0 < error < 0.05
    for found in _grid():
        assert price.seconds(found) == pytest.approx(PRICE.seconds(found), rel=0.1)


def test_a_part_that_costs_nothing_is_not_negative() -> None:
    free = StepPrice(0.006, 30e-6, 0.0, 0.0, 50e-9)
    chance = random.Random(5)
    steps = [Measured(found, free.seconds(found) * chance.uniform(0.97, 1.03)) for found in _grid()]
    price, _ = fit_price(steps)
    assert min(price.fixed_s, price.token_s, price.pair_s, price.stream_s, price.kv_s) >= 0.0
    assert price.stream_s < 20e-6


def test_too_few_kinds_of_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 kinds of steps"):
        fit_price([Measured((1.0, 0.0, 0.0, 1.0, 64.0), 0.01)])


def test_batches_that_follow_no_line_are_priced_one_by_one() -> None:
    lines = {1.0: (0.006, 1e-6), 2.0: (0.0061, 3e-6), 4.0: (0.012, 2e-6)}
    steps = [
        Measured((1.0, 0.0, 0.0, streams, kv_tokens), level + slope * kv_tokens)
        for streams, (level, slope) in lines.items()
        for kv_tokens in (100.0 * streams, 700.0 * streams)
    ]
    prompt = Measured((1.0, 64.0, 2048.0, 0.0, 0.0), 0.05)
    single = Measured((1.0, 0.0, 0.0, 8.0, 800.0), 0.02)  # nothing tells its KV from the rest
    found = batch_prices([*steps, prompt, single])
    assert [price.num_streams for price in found] == [1.0, 2.0, 4.0]
    for price in found:
        level, slope = lines[price.num_streams]
        assert price.fixed_s == pytest.approx(level)
        assert price.kv_s == pytest.approx(slope)


def test_kv_that_seems_to_save_time_costs_nothing() -> None:
    steps = [
        Measured((1.0, 0.0, 0.0, 1.0, 50.0), 0.0062),
        Measured((1.0, 0.0, 0.0, 1.0, 600.0), 0.0060),
    ]
    (found,) = batch_prices(steps)
    assert found.fixed_s == pytest.approx(0.0061)
    assert found.kv_s == 0.0
