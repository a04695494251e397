"""MachinePace: how fast the machine of a running service is now, told by a prompt that is read alone.

The cores of a virtual machine are not equally fast all the time, and prices measured minutes ago may be those
of another machine. Owns what is timed for that, and prices at another pace. A stream's steps tell less: they
wait for the next step more than they compute. Runs on an event loop.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from cluster.simulator.front import FrontPrice
from cluster.simulator.served_calls import ServedCalls
from cluster.simulator.served_mix import scaled
from cluster.simulator.step_price import StepPrice

_NUM_TIMED = 8
_NUM_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Pace:
    """`read_s`: seconds in which a prompt of 256 tokens is read, alone."""

    read_s: float

    def __post_init__(self) -> None:
        if not self.read_s > 0.0:
            raise ValueError("read_s must be above 0")

    def mean_with(self, other: Pace) -> Pace:
        """Of the time between the two."""
        return Pace((self.read_s + other.read_s) / 2)

    def slower_than(self, then: Pace) -> float:
        """How many times as long everything takes."""
        return self.read_s / then.read_s

    def price(self, then: Pace, price: StepPrice) -> StepPrice:
        """`price`, measured at the pace `then`, at this one."""
        ratio = self.slower_than(then)
        return scaled(price, ratio, ratio)

    def front(self, then: Pace, front: FrontPrice) -> FrontPrice:
        """The same, of a router."""
        ratio = self.slower_than(then)
        return FrontPrice(front.request_s * ratio, front.token_s * ratio, front.busy_s * ratio)


async def timed_pace(service: ServedCalls) -> Pace:
    """Of a service that has nothing else to do. Raises NoAnswer."""
    reads = [(await service.read(_NUM_PROMPT_TOKENS, 1)).read_s for _ in range(_NUM_TIMED)]
    return Pace(statistics.median(reads))
