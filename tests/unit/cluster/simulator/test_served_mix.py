"""A mix of requests tells how much longer steps take than their prices say."""

from __future__ import annotations

import pytest

from cluster.loadtest.record import Outcome, RequestRecord
from cluster.simulator.served_calibration import features_of_prompt
from cluster.simulator.served_calls import Told
from cluster.simulator.served_mix import Mix, Mixed, scaled, times_price
from cluster.simulator.step_price import BatchPrice, Features, StepPrice

PRICE = StepPrice(
    fixed_s=0.005,
    token_s=0.001,
    pair_s=0.0,
    stream_s=0.002,
    kv_s=1e-6,
    batches=(BatchPrice(1.0, 0.006, 1e-6), BatchPrice(2.0, 0.008, 2e-6)),
)
CHUNK = 64


def alone(num_tokens: int) -> Features:
    return features_of_prompt(num_tokens, 512)


def answer(due_s: float, read_s: float, pause_s: float, num: int = 60, is_local: bool = True) -> Mixed:
    """Behind 100 tokens: read in `read_s`, then `num` tokens."""
    first = due_s + 0.002 + read_s
    times = tuple(first + pause_s * i for i in range(num))
    record = RequestRecord(0, due_s, due_s, times[-1], Outcome.COMPLETED, times)
    return Mixed(record, Told(100, due_s, first, 0.0, read_s, is_local))


def test_streams_are_counted_with_what_each_has_by_then() -> None:
    mix = Mix([answer(0.0, 0.1, 0.01), answer(0.2, 0.1, 0.01)])
    assert mix.streams_at(0.05)[3] == 0.0
    _, _, _, num_streams, num_kv = mix.streams_at(0.103)
    assert (num_streams, num_kv) == (1.0, 101.0)
    _, _, _, num_streams, num_kv = mix.streams_at(0.3025)
    assert (num_streams, num_kv) == (2.0, 100 + 21 + 100 + 1)


def test_decoding_is_what_steps_without_prompts_took_by_their_price() -> None:
    # one stream at a time, some 125 tokens of KV each: 6.13 ms
    apart = Mix([answer(1.0 * i, 0.1, 1.2 * 0.00613) for i in range(4)])
    assert times_price(apart.decoding(PRICE)) == pytest.approx(1.2, rel=0.02)


def test_a_pause_for_another_ones_prompt_is_no_step_of_streams() -> None:
    # the second one's prompt is read from 0.5 to 0.6 by the same worker: one pause of the first lasts as long
    one = answer(0.0, 0.1, 0.00613, num=150)
    times = tuple(when if when < 0.5 else when + 0.1 for when in one.record.event_times_s)
    record = RequestRecord(0, 0.0, 0.0, times[-1], Outcome.COMPLETED, times)
    other = answer(0.498, 0.1, 0.00613, num=2)
    assert times_price(Mix([Mixed(record, one.told), other]).decoding(PRICE)) == pytest.approx(1.0, rel=0.03)


def test_reading_is_what_prompts_took_alone_and_with_streams() -> None:
    alone_s = PRICE.seconds(alone(100))
    lonely = [answer(1.0 * i, 1.1 * alone_s, 0.006, num=20) for i in range(8)]
    assert times_price(Mix(lonely).reading(PRICE, alone, CHUNK)) == pytest.approx(1.1)
    with_streams_s = PRICE.seconds((2.0, 100.0, 5000.0, 2.0, 2 * 150.0))
    pairs = [
        both
        for i in range(10)
        for both in (
            answer(3.0 * i, alone_s, 0.02, num=60),
            answer(3.0 * i + 0.6, with_streams_s, 0.02, num=10),
        )
    ]
    assert times_price(Mix(pairs).reading(PRICE, alone, CHUNK)) == pytest.approx(1.0, rel=0.01)


def test_prompts_that_were_read_elsewhere_or_together_say_nothing_of_reading() -> None:
    remote = [answer(1.0 * i, 0.3, 0.006, num=20, is_local=False) for i in range(10)]
    assert times_price(Mix(remote).reading(PRICE, alone, CHUNK)) == 1.0
    together = [answer(2.0 * i + late, 0.3, 0.006, num=20) for i in range(10) for late in (0.0, 0.1)]
    assert times_price(Mix(together).reading(PRICE, alone, CHUNK)) == 1.0


def test_too_few_steps_or_prompts_say_nothing() -> None:
    few = Mix([answer(1.0 * i, 0.3, 0.1, num=10) for i in range(3)])
    assert times_price(few.decoding(PRICE)) == 1.0
    assert times_price(few.reading(PRICE, alone, CHUNK)) == 1.0


def test_those_who_came_while_others_streamed_are_found() -> None:
    first, second = answer(0.0, 0.1, 0.01), answer(0.3, 0.1, 0.01)
    assert Mix([first, second, answer(9.0, 0.1, 0.01)]).beside() == [second.told]


def test_a_scaled_price_is_longer_by_as_much() -> None:
    longer = scaled(PRICE, decoding=1.2, reading=1.1)
    streams, prompt = (1.0, 0.0, 0.0, 2.0, 500.0), (1.0, 64.0, 2048.0, 2.0, 500.0)
    assert longer.seconds(streams) == pytest.approx(1.2 * PRICE.seconds(streams))
    assert longer.seconds(prompt) == pytest.approx(1.1 * PRICE.seconds(prompt))
