"""MachinePace: how fast the machine of a running service is now, told by a prompt that is read alone.

The cores of a virtual machine are not equally fast all the time, and prices measured minutes ago may be those
of another machine. Owns what is timed to see that. Prices are not taken times what it tells: prompts that
a load had read alone took followed it in some loads and in others not. Runs on an event loop.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from cluster.simulator.served_calls import ServedCalls

_NUM_TIMED = 8
_NUM_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Pace:
    """`read_s`: seconds in which a prompt of 256 tokens is read, alone."""

    read_s: float

    def __post_init__(self) -> None:
        if not self.read_s > 0.0:
            raise ValueError("read_s must be above 0")

    def slower_than(self, then: Pace) -> float:
        """How many times as long everything takes."""
        return self.read_s / then.read_s


async def timed_pace(service: ServedCalls) -> Pace:
    """Of a service that has nothing else to do. Raises NoAnswer."""
    reads = [(await service.read(_NUM_PROMPT_TOKENS, 1)).read_s for _ in range(_NUM_TIMED)]
    return Pace(statistics.median(reads))
