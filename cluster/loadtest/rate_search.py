"""RateSearch: which rate to try next, until the highest that passes is known.

Owns bracketing and bisection; knows nothing of requests. Pure: ask `next_rate`, run it, tell with `add`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.loadtest.settings import Search


@dataclass(frozen=True, slots=True)
class Bracket:
    """`passing`: the highest rate that passed with none below it failing; `failing`: the lowest that failed.
    None where there is none.
    """

    passing: float | None
    failing: float | None


class RateSearch:
    """Doubles or halves until one rate passes and a higher one fails, then halves the ratio between them.

    It ends when the two are within `precision`, at a bound of the search, or after `max_steps`. A rate that
    fails below one that has passed before counts more than that one: the higher pass was luck.
    """

    def __init__(self, search: Search, start: float) -> None:
        self._search = search
        self._lowest = min(start, search.highest) / 8 if search.lowest is None else search.lowest
        self._start = min(max(start, self._lowest), search.highest)
        self._end: str | None = None
        self._tried: list[tuple[float, bool]] = []

    def add(self, rate: float, has_passed: bool, elapsed_s: float = 0.0) -> None:
        """What became of it, and how long the search has taken so far."""
        self._tried.append((rate, has_passed))
        if elapsed_s >= self._search.max_seconds:
            self._end = f"stopped after {elapsed_s:.0f} s"

    @property
    def bracket(self) -> Bracket:
        failing = min((rate for rate, has_passed in self._tried if not has_passed), default=None)
        limit = math.inf if failing is None else failing
        passing = max((rate for rate, has_passed in self._tried if has_passed and rate < limit), default=None)
        return Bracket(passing, failing)

    @property
    def next_rate(self) -> float | None:
        """None: the search is over; `reason` says why."""
        return self._next()[0]

    @property
    def reason(self) -> str:
        """Why it is over, or what it is doing."""
        return self._next()[1]

    def _next(self) -> tuple[float | None, str]:
        search, (passing, failing) = self._search, (self.bracket.passing, self.bracket.failing)
        if passing is None and failing is None:
            return self._start, "first rate"
        if self._is_narrow(passing, failing):
            return None, f"passing and failing rate are within {search.precision:.0%}"
        if self._end is not None:
            return None, self._end
        if len(self._tried) >= search.max_steps:
            return None, f"stopped after {search.max_steps} steps"
        if failing is None:
            assert passing is not None
            if passing >= search.highest:
                return None, f"the highest rate of the search, {search.highest:g}/s, passes"
            return min(passing * 2, search.highest), "looking for a rate that fails"
        if passing is None:
            if failing <= self._lowest:
                return None, f"the lowest rate of the search, {self._lowest:.3g}/s, fails"
            return max(failing / 2, self._lowest), "looking for a rate that passes"
        return math.sqrt(passing * failing), "between the highest that passes and the lowest that fails"

    def _is_narrow(self, passing: float | None, failing: float | None) -> bool:
        if passing is None or failing is None:
            return False
        return failing <= passing * (1.0 + self._search.precision)
