"""Stamps: where one prompt's time went, from its arrival to its end.

Owns the parts of its time to first token, the wait for its KV and its stalls, as they are told in answers,
metrics and traces. Moments are those of the router's clock; what a worker did is a duration by its own. One
per prompt; used on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.jobs import Reading
from core.telemetry import StallCause, TTFTPart


@dataclass(frozen=True, slots=True)
class Stall:
    """A pause of one sample: why, how long (seconds, from the token before it), and when it ended."""

    cause: StallCause
    seconds: float
    ended_at: float


class Stamps:
    """`tokenize_s`: how long it took to find out what the body means."""

    def __init__(self, arrived_at: float, tokenize_s: float) -> None:
        self.arrived_at = arrived_at
        self.first_token_at: float | None = None
        self.transfer_wait_s: float | None = None
        self.stalls: list[Stall] = []
        self.parts: dict[TTFTPart, float] = {TTFTPart.TOKENIZE: tokenize_s}
        self.num_attempts = 0
        self._since = arrived_at
        self._lost: set[int] = set()
        self._last_at: dict[int, float] = {}

    @property
    def ttft_s(self) -> float | None:
        """None before the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    def admitted(self, now: float) -> None:
        """Let in: whatever went before, and was not tokenizing, was admission."""
        self._spend(TTFTPart.ADMIT, now - self.arrived_at - self.parts[TTFTPart.TOKENIZE])
        self._since = now

    def placed(self, now: float) -> None:
        """Workers are chosen, for the first time or again."""
        self.num_attempts += 1
        if self.first_token_at is None:
            self._spend(TTFTPart.PLACE, now - self._since)
            self._since = now

    def pulled(self, now: float) -> None:
        """The prompt's reader has got what another worker has cached, or will not get it."""
        if self.first_token_at is None:
            self._spend(TTFTPart.PULL, now - self._since)
            self._since = now

    def lost(self, samples: Iterable[int], now: float) -> None:
        """What ran for these samples is gone; they are placed again."""
        if self.first_token_at is None:
            self._spend(TTFTPart.RETRY, now - self._since)
            self._since = now
        self._lost.update(sample for sample in samples if sample in self._last_at)

    def token(self, sample_index: int, reading: Reading | None, now: float) -> float | None:
        """A sample has new tokens, with what the worker tells of them. Returns the seconds since the last
        ones, None for its first.
        """
        if self.first_token_at is None:
            self._first(reading or Reading(), now)
        elif reading is not None and reading.cause is None and reading.wait_s:
            self.transfer_wait_s = max(self.transfer_wait_s or 0.0, reading.wait_s)
        last_at = self._last_at.get(sample_index)
        self._last_at[sample_index] = now
        if last_at is None:
            return None
        cause = None if reading is None else reading.cause
        if sample_index in self._lost:
            self._lost.discard(sample_index)
            cause = StallCause.RESUME
        if cause is not None:
            self.stalls.append(Stall(cause, now - last_at, now))
        return now - last_at

    def _first(self, reading: Reading, now: float) -> None:
        """The worker's durations lie within the call; what of it they leave is the way to and from it."""
        self.first_token_at = now
        total = max(0.0, now - self._since)
        queue = min(reading.queue_s, total)
        prefill = min(reading.compute_s, total - queue)
        self._spend(TTFTPart.QUEUE, queue)
        self._spend(TTFTPart.PREFILL, prefill)
        self._spend(TTFTPart.FIRST_TOKEN, total - queue - prefill)

    def _spend(self, part: TTFTPart, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + max(0.0, seconds)
