"""A mix of requests tells how much longer steps take than their prices say."""

from __future__ import annotations

import math

import pytest

from cluster.loadtest.record import Outcome, RequestRecord
from cluster.simulator.fit import Measured
from cluster.simulator.mix_ratios import (
    ratios_beside,
    ratios_within,
    scaled,
    sharing_in_mix,
    times_beside,
    times_price,
    undisturbed_reads,
)
from cluster.simulator.served_calibration import features_of_prompt
from cluster.simulator.served_calls import Told
from cluster.simulator.served_mix import Mix, Mixed, OneRead, ReadElsewhere
from cluster.simulator.sharing import Sharing
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
KNOWN = Sharing(2, 1.6, 1.4)


def alone(num_tokens: int) -> Features:
    return features_of_prompt(num_tokens, 512)


def answer(due_s: float, read_s: float, pause_s: float, num: int = 60, is_local: bool = True) -> Mixed:
    """Behind 100 tokens: read in `read_s`, then `num` tokens."""
    first = due_s + 0.002 + read_s
    times = tuple(first + pause_s * i for i in range(num))
    record = RequestRecord(0, due_s, due_s, times[-1], Outcome.COMPLETED, times)
    return Mixed(record, Told(100, due_s, first, 0.0, read_s, is_local))


def sharing_in(mix: Mix) -> Sharing:
    return sharing_in_mix(mix.reading_elsewhere(alone), mix.decoding_beside(), PRICE, KNOWN)


def whole(mix: Mix) -> list[Measured]:
    return [read.whole for read in mix.reading(alone, CHUNK)]


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
    assert times_price(PRICE, apart.decoding()) == pytest.approx(1.2, rel=0.02)


def test_a_pause_for_another_ones_prompt_is_no_step_of_streams() -> None:
    # the second one's prompt is read from 0.5 to 0.6 by the same worker: one pause of the first lasts as long
    one = answer(0.0, 0.1, 0.00613, num=150)
    times = tuple(when if when < 0.5 else when + 0.1 for when in one.record.event_times_s)
    record = RequestRecord(0, 0.0, 0.0, times[-1], Outcome.COMPLETED, times)
    other = answer(0.498, 0.1, 0.00613, num=2)
    assert times_price(PRICE, Mix([Mixed(record, one.told), other]).decoding()) == pytest.approx(
        1.0, rel=0.03
    )


def test_reading_is_what_prompts_took_alone_and_with_streams() -> None:
    alone_s = PRICE.seconds(alone(100))
    lonely = [answer(1.0 * i, 1.1 * alone_s, 0.006, num=20) for i in range(8)]
    assert times_price(PRICE, whole(Mix(lonely))) == pytest.approx(1.1)
    with_streams_s = PRICE.seconds((2.0, 100.0, 5000.0, 2.0, 2 * 150.0))
    pairs = [
        both
        for i in range(10)
        for both in (
            answer(3.0 * i, alone_s, 0.02, num=60),
            answer(3.0 * i + 0.6, with_streams_s, 0.02, num=10),
        )
    ]
    assert times_price(PRICE, whole(Mix(pairs))) == pytest.approx(1.0, rel=0.01)


def test_steps_of_a_prompt_are_told_by_a_stream_beside_it() -> None:
    # 300 tokens are read in five steps, which end with a token of the stream each
    streamed = [0.01 * i for i in range(1, 101)]
    ends = [1.0 + 0.11, 1.0 + 0.19, 1.0 + 0.31, 1.0 + 0.40, 1.0 + 0.45]
    times = (*streamed, *ends, *(1.45 + 0.01 * i for i in range(1, 30)))
    stream = Mixed(
        RequestRecord(0, 0.0, 0.0, times[-1], Outcome.COMPLETED, times), Told(100, 0.0, 0.01, 0.0, 0.01, True)
    )
    first = 1.4501
    prompt = Mixed(
        RequestRecord(1, 0.99, 0.99, first + 0.1, Outcome.COMPLETED, (first, first + 0.1)),
        Told(300, 0.99, first, 0.0, 0.45, True),
    )
    others = [answer(5.0 + i, 0.1, 0.01, num=20) for i in range(8)]
    read = next(read for read in Mix([stream, prompt, *others]).reading(alone, CHUNK) if read.steps)
    assert read.whole.seconds == 0.45
    # of the first step its beginning is not told, and the last one reads 44 tokens
    assert [step.seconds for step in read.steps] == pytest.approx([0.08, 0.12, 0.09])
    tokens, pairs = zip(*((step.features[1], step.features[2]) for step in read.steps), strict=True)
    assert tokens == (64.0, 64.0, 64.0)
    assert pairs == (64 * 96.0, 64 * 160.0, 64 * 224.0)
    assert {step.features[3] for step in read.steps} == {1.0}
    within = ratios_within(PRICE, [read])
    assert sorted(within) == pytest.approx([0.83, 0.93, 1.24], rel=0.01)
    assert ratios_within(PRICE, [OneRead(read.whole, read.steps[:1])]) == []


def test_prompts_that_were_read_elsewhere_or_together_say_nothing_of_reading() -> None:
    remote = [answer(1.0 * i, 0.3, 0.006, num=20, is_local=False) for i in range(10)]
    assert times_price(PRICE, whole(Mix(remote))) == 1.0
    together = [answer(2.0 * i + late, 0.3, 0.006, num=20) for i in range(10) for late in (0.0, 0.1)]
    assert times_price(PRICE, whole(Mix(together))) == 1.0


def remote_beside_streams(times_reading: float, pause_s: float, num: int = 10) -> Mix:
    """Prompts of 100 tokens that are read elsewhere beside a stream, `num` of them, one after the other."""
    alone_s = PRICE.seconds(alone(100))
    found = []
    for i in range(num):
        stream = answer(10.0 * i, alone_s, pause_s, num=100)
        found += [
            stream,
            answer(10.0 * i + 0.2, times_reading * alone_s, 0.006, num=2, is_local=False),
        ]
    return Mix(found)


def test_sharing_is_what_prompts_and_steps_beside_each_other_take_in_the_mix() -> None:
    step_s = 1.5 * PRICE.seconds((1.0, 0.0, 0.0, 1.0, 130.0))
    found = sharing_in(remote_beside_streams(1.8, step_s))
    assert found.reading == pytest.approx(1.8, rel=0.01)
    assert found.decoding == pytest.approx(1.5, rel=0.02)
    assert found.num_cores == 2


def test_a_prompt_counts_as_far_as_streams_ran_beside_it() -> None:
    alone_s = PRICE.seconds(alone(100))
    # half of its time beside a stream, which makes that half twice as long: 2/3 of it is done then
    read_s = alone_s * 4.0 / 3.0
    reads = [ReadElsewhere(Measured(alone(100), read_s), 0.5)] * 8
    assert times_beside(PRICE, reads) == pytest.approx(2.0)
    assert ratios_beside(PRICE, reads, 2.0) == pytest.approx([1.0] * 8)
    assert math.isinf(times_beside(PRICE, [ReadElsewhere(Measured(alone(100), 3.0 * alone_s), 0.1)]))


def test_how_long_somebody_streams_beside_a_prompt_is_told() -> None:
    alone_s = PRICE.seconds(alone(100))
    found = []
    for i in range(8):
        # it streams from 0.002 + alone_s on, for half of the other one's time, and another one beside it
        begins = 10.0 * i + 0.002 + alone_s
        found += [
            answer(10.0 * i, alone_s, 0.01, num=11),
            answer(10.0 * i, alone_s, 0.01, num=6),
            answer(begins - 0.002, 0.2, 0.01, num=2, is_local=False),
        ]
    assert [read.beside for read in Mix(found).reading_elsewhere(alone)] == pytest.approx([0.5] * 8)


def test_a_prompt_that_another_worker_reads_while_nobody_streams_tells_what_prompts_take() -> None:
    apart = [answer(1.0 * i, 0.1, 0.006, num=20, is_local=False) for i in range(10)]
    beside = remote_beside_streams(1.8, 0.01)
    found = Mix(apart).reading_elsewhere(alone)
    undisturbed = undisturbed_reads(found)
    assert [read.features for read in undisturbed] == [alone(100)] * 10
    assert [read.seconds for read in undisturbed] == pytest.approx([0.1] * 10)
    assert undisturbed_reads(beside.reading_elsewhere(alone)) == []
    assert undisturbed_reads(found[:3]) == []


def test_what_a_mix_does_not_tell_stays_as_it_was_known() -> None:
    few = remote_beside_streams(1.8, 0.01, num=3)
    assert sharing_in(few) == KNOWN
    local = Mix([answer(1.0 * i, 0.1, 0.006, num=20) for i in range(10)])
    assert sharing_in(local) == KNOWN
    # nobody is quicker for it
    quick = sharing_in(remote_beside_streams(0.8, 0.004))
    assert (quick.reading, quick.decoding) == (1.0, 1.0)


def test_too_few_steps_or_prompts_say_nothing() -> None:
    few = Mix([answer(1.0 * i, 0.3, 0.1, num=10) for i in range(3)])
    assert times_price(PRICE, few.decoding()) == 1.0
    assert times_price(PRICE, whole(few)) == 1.0


def test_those_who_came_while_others_streamed_are_found() -> None:
    first, second = answer(0.0, 0.1, 0.01), answer(0.3, 0.1, 0.01)
    assert Mix([first, second, answer(9.0, 0.1, 0.01)]).beside() == [second.told]


def test_a_scaled_price_is_longer_by_as_much() -> None:
    longer = scaled(PRICE, decoding=1.2, reading=1.1)
    streams, prompt = (1.0, 0.0, 0.0, 2.0, 500.0), (1.0, 64.0, 2048.0, 2.0, 500.0)
    assert longer.seconds(streams) == pytest.approx(1.2 * PRICE.seconds(streams))
    assert longer.seconds(prompt) == pytest.approx(1.1 * PRICE.seconds(prompt))
