"""Bucket: a number of tokens of which each that is taken comes back after a fixed time, or when it is given
back.

A bucket of L tokens that come back after a minute lets no minute pass with more than L taken, whenever that
minute begins, and all of L can be taken at any moment of it. (A bucket that is filled by a steady stream lets
through twice as much in its first minute.) Buckets can be split: tokens may be added and, while they are
free, removed, so the parts of a limit that several replicas hold let through together what one bucket would.
Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Take:
    """Tokens taken together; `back_at` is when those that were not given back come back by themselves."""

    amount: int
    back_at: float


class Bucket:
    """`held` tokens, of which some are out. `period_s` infinite: they come back only when given back."""

    def __init__(self, period_s: float, held: int = 0) -> None:
        assert period_s > 0
        assert held >= 0
        self.period_s = period_s
        self.held = held
        self._num_out = 0
        self._out: deque[Take] = deque()

    def num_free(self, now: float) -> int:
        """Tokens that can be taken now."""
        while self._out and self._out[0].back_at <= now:
            self._num_out -= self._out[0].amount
            self._out.popleft().amount = 0
        return self.held - self._num_out

    def try_take(self, amount: int, now: float) -> Take | None:
        """All of `amount`, or None."""
        assert amount >= 0
        if amount > self.num_free(now):
            return None
        take = Take(amount, now + self.period_s)
        self._num_out += amount
        if amount and math.isfinite(self.period_s):
            self._out.append(take)
        return take

    def give_back(self, take: Take, amount: int) -> int:
        """Tokens of `take` that were not needed after all; returns how many are still out and so come back
        now. Those that came back by themselves do not come back twice.
        """
        back = min(amount, take.amount)
        take.amount -= back
        self._num_out -= back
        return back

    def wait_s(self, amount: int, now: float, late_s: float = 0.0) -> float:
        """Seconds until `amount` tokens could be taken if nobody takes any before; infinite for more than
        come back at all. More than `held` counts as several rounds: somebody takes all in between, `late_s`
        after it has come back.
        """
        missing = amount - self.num_free(now)
        if missing <= 0:
            return 0.0
        if self.held == 0 or not math.isfinite(self.period_s):
            return math.inf
        rounds, missing = divmod(missing - 1, self.held)
        wait_s = self.period_s
        for take in self._out:
            missing -= take.amount
            if missing < 0:
                wait_s = take.back_at - now
                break
        return rounds * (self.period_s + late_s) + wait_s

    def can_spare(self, amount: int, kept: Iterable[tuple[float, float]], now: float) -> bool:
        """Whether `amount` can be taken now and at each moment of `kept`, in order, there is still as much as
        was promised up to then, going by when tokens come back by themselves.
        """
        left = float(self.num_free(now) - amount)
        if left < 0:
            return False
        coming = iter([*self._out, Take(amount, now + self.period_s)])
        next_back: Take | None = next(coming)
        for due_at, promised in kept:
            while next_back is not None and next_back.back_at <= due_at:
                left += next_back.amount
                next_back = next(coming, None)
            left -= promised
            if left < 0:
                return False
        return True

    def add(self, amount: int) -> None:
        self.held += amount

    def remove(self, amount: int, now: float) -> int:
        """Up to `amount` free tokens leave the bucket; returns how many."""
        removed = max(0, min(amount, self.num_free(now)))
        self.held -= removed
        return removed
