"""WorkerRates: what the router itself learns of one worker, beside what the worker reports.

Owns how far predictions were from what came: cached tokens, the time to read a prompt, and the handoff to
each decode worker. One per incarnation of a worker; used on the event loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from core.ids import WorkerId
from core.running_line import RunningLine
from router.speeds import Handoff

_WEIGHT = 0.1  # of the newest observation
_MIN_PREDICTED_TOKENS = 16  # fewer say nothing about the credit
_MAX_LOG_PACE = math.log(1.5)
_TYPICAL_BYTES = 1e7
_SEED_BYTES = 1e7
# so many handoffs to others count for a pair as one that took what is assumed
_HANDOFFS_OF_OTHERS = 8


@dataclass(slots=True)
class _Pair:
    """`assumed` is what its handoffs are thought to cost where nothing is known."""

    line: RunningLine
    assumed: Handoff
    num_of_others: int = 0

    def pass_over(self, num_bytes: int) -> bool:
        """A handoff went to another worker; returns whether that changed the price. One that was dear once,
        in a bad moment, would otherwise never be tried again.
        """
        self.num_of_others += 1
        if self.num_of_others % _HANDOFFS_OF_OTHERS:
            return False
        self.line.observe(num_bytes, self.assumed.fixed + self.assumed.per_byte * num_bytes)
        return True


class WorkerRates:
    """`credit`: the share of predicted cached tokens that was found. `pace`: actual by predicted time of
    reading, 2/3 to 3/2.
    """

    def __init__(self) -> None:
        self.credit = 1.0
        self._log_pace = 0.0
        self._pairs: dict[WorkerId, _Pair] = {}
        self._handoffs: dict[WorkerId, Handoff] = {}
        self.handoffs = MappingProxyType(self._handoffs)

    @property
    def pace(self) -> float:
        return math.exp(self._log_pace)

    def observe_hit(self, num_predicted: int, num_actual: int) -> None:
        """So many tokens were thought to be cached, and so many were."""
        if num_predicted >= _MIN_PREDICTED_TOKENS:
            share = min(1.0, num_actual / num_predicted)
            self.credit += _WEIGHT * (share - self.credit)

    def observe_reading(self, predicted_ms: float, actual_ms: float) -> None:
        """Waiting and reading took `actual_ms`. `predicted_ms` contains the pace of that time; a prediction
        that was far off (a hiccup, a burst) counts no more than one that was off by half.
        """
        if predicted_ms > 0.0 and actual_ms > 0.0:
            error = max(-0.5, min(0.5, math.log(actual_ms / predicted_ms)))
            log_pace = self._log_pace + _WEIGHT * error
            self._log_pace = max(-_MAX_LOG_PACE, min(_MAX_LOG_PACE, log_pace))

    def observe_handoff(self, decode: WorkerId, num_bytes: int, actual_ms: float, assumed: Handoff) -> None:
        """A handoff of `num_bytes` to `decode` held the second token up by `actual_ms`; `assumed` is what the
        first one is weighed against.
        """
        pair = self._pairs.get(decode)
        if pair is None:
            seed = (_SEED_BYTES, assumed.fixed + assumed.per_byte * _SEED_BYTES)
            line = RunningLine(_TYPICAL_BYTES, decay=0.9, seed=seed)
            pair = self._pairs[decode] = _Pair(line, assumed)
        expected = pair.line.at(num_bytes)
        pair.line.observe(num_bytes, min(actual_ms, 4.0 * expected + 20.0))
        self._handoffs[decode] = Handoff(*pair.line.coefficients)
        for worker, other in self._pairs.items():
            if other is not pair and other.pass_over(num_bytes):
                self._handoffs[worker] = Handoff(*other.line.coefficients)
