"""What a mix of requests tells of prices: how far from them steps were, what workers cost each other.

Owns the arithmetic on what `served_mix` has found. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cluster.simulator.fit import Measured
from cluster.simulator.served_mix import OneRead, ReadElsewhere
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import StepPrice

_MIN_ALONE = 4
_HARDLY = 0.05  # of a prompt's time
_MIN_BESIDE = 4.0  # prompts that were read beside streams all the time, or as much of several


def ratios(price: StepPrice, measured: Sequence[Measured]) -> list[float]:
    """How many times its price each took."""
    return [item.seconds / price.seconds(item.features) for item in measured]


def times_price(price: StepPrice, measured: Sequence[Measured]) -> float:
    """How many times their price they took on the whole; 1 if there are none."""
    if not measured:
        return 1.0
    return sum(item.seconds for item in measured) / sum(price.seconds(item.features) for item in measured)


def undisturbed_reads(reads: Sequence[ReadElsewhere]) -> list[Measured]:
    """Those beside which nobody streamed; none if there were too few."""
    found = [read.whole for read in reads if read.beside < _HARDLY]
    return found if len(found) >= _MIN_ALONE else []


def times_beside(price: StepPrice, reads: Sequence[ReadElsewhere]) -> float:
    """How many times as long prompts take while there are streams beside them, if they take their price
    otherwise; infinity if that cannot be.
    """
    beside_s = sum(read.whole.seconds * read.beside for read in reads)
    left_s = sum(
        price.seconds(read.whole.features) - read.whole.seconds * (1.0 - read.beside) for read in reads
    )
    return beside_s / left_s if left_s > 0.0 else math.inf


def ratios_beside(price: StepPrice, reads: Sequence[ReadElsewhere], reading: float) -> list[float]:
    """How many times its price each took, if streams beside it make that `reading` times as long."""
    return [
        read.whole.seconds * (1.0 - read.beside + read.beside / reading) / price.seconds(read.whole.features)
        for read in reads
    ]


def sharing_in_mix(
    reads: Sequence[ReadElsewhere], steps: Sequence[Measured], price: StepPrice, known: Sharing
) -> Sharing:
    """What workers of one host cost each other, from prompts that another worker read and steps of streams
    beside such prompts, by the prices that a simulation charges; what is `known` where they say too little.
    """
    reading = times_beside(price, reads) if sum(read.beside for read in reads) >= _MIN_BESIDE else math.inf
    return Sharing(
        known.num_cores,
        known.reading if math.isinf(reading) else max(1.0, reading),
        max(1.0, times_price(price, steps)) if steps else known.decoding,
    )


def ratios_within(price: StepPrice, reads: Sequence[OneRead]) -> list[float]:
    """How many times as long as its prompt's steps on the average each step took, by its price."""
    found: list[float] = []
    for read in reads:
        if len(read.steps) > 1:
            average = times_price(price, read.steps)
            found += [ratio / average for ratio in ratios(price, read.steps)]
    return found


def scaled(price: StepPrice, decoding: float, reading: float) -> StepPrice:
    """`price`, of steps of streams alone `decoding` times, of all others `reading` times."""
    return replace(
        price,
        fixed_s=price.fixed_s * reading,
        token_s=price.token_s * reading,
        pair_s=price.pair_s * reading,
        stream_s=price.stream_s * reading,
        kv_s=price.kv_s * reading,
        batches=tuple(
            replace(batch, fixed_s=batch.fixed_s * decoding, kv_s=batch.kv_s * decoding)
            for batch in price.batches
        ),
    )
