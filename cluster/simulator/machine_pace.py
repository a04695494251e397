"""MachinePace: how fast a running service computes now: a prompt and a stream, each alone.

The cores of a virtual machine are not equally fast all the time, and prices measured minutes ago may be those
of another machine. Owns what is timed for that, and prices at another pace. Runs on an event loop.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from cluster.simulator.front import FrontPrice
from cluster.simulator.served_calls import ServedCalls
from cluster.simulator.served_mix import scaled
from cluster.simulator.step_price import StepPrice

_NUM_TIMED = 5
_NUM_PROMPT_TOKENS, _NUM_STREAM_TOKENS = 256, 32


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a prompt of 256 tokens is read in, and those of one stream's step."""

    read_s: float
    step_s: float

    def __post_init__(self) -> None:
        for name in ("read_s", "step_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be above 0")

    def mean_with(self, other: Pace) -> Pace:
        """Of the time between the two."""
        return Pace((self.read_s + other.read_s) / 2, (self.step_s + other.step_s) / 2)

    def price(self, then: Pace, price: StepPrice) -> StepPrice:
        """`price`, measured at the pace `then`, at this one."""
        return scaled(price, self.step_s / then.step_s, self.read_s / then.read_s)

    def front(self, then: Pace, front: FrontPrice) -> FrontPrice:
        """The same, of a router."""
        ratio = self.read_s / then.read_s
        return FrontPrice(front.request_s * ratio, front.token_s * ratio, front.busy_s * ratio)

    def told_against(self, then: Pace) -> str:
        """For people."""
        reading, decoding = self.read_s / then.read_s, self.step_s / then.step_s
        return f"a prompt alone takes {reading:.2f}, a stream's step {decoding:.2f} times what it did"


async def timed_pace(service: ServedCalls) -> Pace:
    """Of a service that has nothing else to do. Raises NoAnswer."""
    reads: list[float] = []
    steps: list[float] = []
    for _ in range(_NUM_TIMED):
        reads.append((await service.read(_NUM_PROMPT_TOKENS, 1)).read_s)
        call = await service.ask(_NUM_STREAM_TOKENS, _NUM_STREAM_TOKENS)
        assert call.record is not None
        # the first pause may hold a handoff; tokens may come several at a time
        steps.append(statistics.fmean(call.record.pauses_s[1:]))
    return Pace(statistics.median(reads), statistics.median(steps))
