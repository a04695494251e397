"""Timing: how fast the machine is now, told by a service that runs on it, again and again."""

from __future__ import annotations

import time
from itertools import count

from cluster.loadtest.calibration import find_vocabulary
from cluster.loadtest.client import Client
from cluster.loadtest.settings import Target
from cluster.simulator.machine_pace import Pace, timed_pace
from cluster.simulator.served_calls import ServedCalls

_FIRST_SEED = 1_000  # not that of a calibration, whose prompts are cached


class Timing:
    """Asks no prompt twice."""

    def __init__(self) -> None:
        self._seeds = count(_FIRST_SEED)

    async def pace(self, url: str) -> Pace:
        """Of the service there, which must have nothing else to do. Raises NoAnswer."""
        target, now = Target(url), time.perf_counter
        async with Client(target, None, now) as client:
            model = await client.first_model()
            vocabulary = await find_vocabulary(target, model, client)
            return await timed_pace(ServedCalls(client, target, model, vocabulary, now, next(self._seeds)))
