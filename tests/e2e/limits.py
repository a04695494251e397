"""Limits: calls at a steady rate by a tenant with a limit, and how many were let in, when.

Two kinds of client: one that never minds what it is told, one that comes back when it was told to, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.e2e.client import COMPLETIONS, Client

# no longer than a person's program would be late
_LATE_S = 0.05


class Flood:
    """The calls of one tenant. `let_in` is (sent, answered) in seconds since the start: a call was let in at
    some moment between.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.let_in: list[tuple[float, float]] = []
        self.num_refused = 0
        self.num_returns = 0
        self.num_let_in_returns = 0

    def insist(self, rate: float, seconds: float) -> None:
        """`rate` calls a second, whatever they are told."""
        self._run(rate, seconds, lambda number, start: self._call(number, start))

    def come_back(self, rate: float, seconds: float) -> None:
        """Like `insist`, but who is refused comes once more when told, on a connection of its own."""

        def one(number: int, start: float) -> None:
            told = self._call(number, start)
            if told is None:
                return
            time.sleep(told + _LATE_S)
            has_come_in = self._call(number, start) is None
            with self._lock:
                self.num_returns += 1
                self.num_let_in_returns += has_come_in

        self._run(rate, seconds, one)

    def _run(self, rate: float, seconds: float, one: Callable[[int, float], object]) -> None:
        start, threads = time.monotonic(), []
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
            threads.append(threading.Thread(target=one, args=(number, start), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(300.0)
            assert not thread.is_alive(), "a call hangs"

    def _call(self, number: int, start: float) -> float | None:
        """None if it was let in, else the seconds after which to come back."""
        sent_at = time.monotonic() - start
        response = self._client.post(COMPLETIONS, {"prompt": [500 + number], "max_tokens": 1})
        answered_at = time.monotonic() - start
        with self._lock:
            if response.status == 200:
                self.let_in.append((sent_at, answered_at))
                return None
            self.num_refused += 1
        assert response.status == 429, response.body
        return float(response.headers["retry-after"])

    def num_let_in(self, until: float) -> int:
        return sum(sent < until for sent, _ in self.let_in)

    def most_in_a_minute(self) -> int:
        """Calls that surely were let in within one minute: they were sent and answered in it."""
        starts = [sent for sent, _ in self.let_in]
        return max(sum(at <= sent and end < at + 60.0 for sent, end in self.let_in) for at in starts)

    def share_of_returns(self) -> float:
        return self.num_let_in_returns / max(1, self.num_returns)

    def __str__(self) -> str:
        told = f"; {self.num_let_in_returns} of {self.num_returns} who came back" if self.num_returns else ""
        return (
            f"{len(self.let_in)} let in, {self.num_refused} refused, most in a minute "
            f"{self.most_in_a_minute()}{told}"
        )
