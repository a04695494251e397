"""Open loop: requests that come at their times, however the service fares, and what became of each.

Owns arrivals (Poisson, by a seed), one thread for each request under way, and goodput: answers that were
whole before their deadline, a second. Blocking; used from the test's thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.e2e import wire
from tests.e2e.client import COMPLETIONS, Client


@dataclass(frozen=True, slots=True)
class Call:
    """One request's end. `status` 0: the connection broke or nothing came in time."""

    sent_at: float
    seconds: float
    status: int
    has_retry_after: bool
    is_whole: bool


@dataclass(slots=True)
class Outcome:
    """What came of a stretch of load that began at `start`. The first `settle_s` fill the service."""

    rate: float
    seconds: float
    settle_s: float
    start: float
    calls: list[Call] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Whole answers a second while the load lasted. What waited then, and came after it, is not counted:
        in a short stretch of overload that would be a good part more than the service can do.
        """
        first, last = self.start + self.settle_s, self.start + self.seconds
        ends = (call.sent_at + call.seconds for call in self.calls if call.is_whole)
        return sum(first <= end <= last for end in ends) / (last - first)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(call.status for call in self.calls)

    def __str__(self) -> str:
        return (
            f"{self.rate:.1f}/s offered, {self.goodput:.2f}/s in time, {dict(sorted(self.statuses.items()))}"
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What each request is like: `prompt` by its number, tokens of the answer, seconds it may take."""

    prompt: Callable[[int], list[int]]
    max_tokens: int
    timeout_s: float


class OpenLoop:
    """Load on one service."""

    def __init__(self, client: Client, shape: Shape, seed: int) -> None:
        self._client = client
        self._shape = shape
        self._chance = random.Random(seed)
        self._number = 0

    def run(self, rate: float, seconds: float, settle_s: float) -> Outcome:
        """`rate` requests a second for so long; returns when each has ended or should have long ago."""
        outcome = Outcome(rate, seconds, settle_s, start=time.monotonic())
        lock, threads = threading.Lock(), []

        def one(number: int) -> None:
            call = self._send(number)
            with lock:
                outcome.calls.append(call)

        due = outcome.start
        while due < outcome.start + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            self._number += 1
            threads.append(threading.Thread(target=one, args=(self._number,), daemon=True))
            threads[-1].start()
            due += self._chance.expovariate(rate)
        limit = time.monotonic() + self._shape.timeout_s + 10.0
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))
        assert len(outcome.calls) == len(threads), f"{len(threads) - len(outcome.calls)} requests hang"
        return outcome

    def _send(self, number: int) -> Call:
        shape, start = self._shape, time.monotonic()
        body = {"prompt": shape.prompt(number), "max_tokens": shape.max_tokens, "ignore_eos": True}
        headers = {**self._client.headers, "X-Request-Timeout": str(shape.timeout_s)}
        try:
            with wire.RawConnection(self._client.port, timeout_s=shape.timeout_s + 5.0) as connection:
                connection.send("POST", COMPLETIONS, self._client.encode(body), headers=headers)
                response = connection.read_all()
        except OSError:
            return Call(start, time.monotonic() - start, 0, False, False)
        seconds = time.monotonic() - start
        is_whole = response.status == 200 and seconds <= shape.timeout_s
        if response.status == 200:
            is_whole &= response.json()["usage"]["completion_tokens"] == shape.max_tokens
        return Call(start, seconds, response.status, "retry-after" in response.headers, is_whole)
