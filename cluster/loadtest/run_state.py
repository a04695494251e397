"""RunState: what a run is at, for whoever watches it, and the rule that ends one whose outcome is certain.

Owns the running counts; `runner` feeds them. Runs on the load test's event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from cluster.loadtest.client import Call
from cluster.loadtest.goodput import Slo
from cluster.loadtest.record import Outcome, RequestRecord

_NUM_RECENT = 200
_ROUNDING = 1e-9


@dataclass(slots=True)
class RunState:
    """`calls`: all that were due so far; `running`: those without a record. `recent_ttft_s`: of the latest
    complete answers.
    """

    elapsed_s: float = 0.0
    is_draining: bool = False
    calls: list[Call] = field(default_factory=list)
    running: dict[int, Call] = field(default_factory=dict)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_output_tokens: int = 0
    recent_ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))

    def add(self, call: Call) -> None:
        """`call` is due: from now on it counts."""
        call.index = len(self.calls)
        self.calls.append(call)
        self.running[call.index] = call

    def end(self, record: RequestRecord) -> None:
        del self.running[record.index]
        self.outcomes[record.outcome] += 1
        if record.is_completed:
            self.num_output_tokens += record.num_output_tokens
            if record.ttft_s is not None:
                self.recent_ttft_s.append(record.ttft_s)


class HopelessRule:
    """Ends an open run of about `num_planned` requests, not counting the warm-up, once the SLO cannot be kept
    any more: so many have missed it, or wait for their first token too long already.
    """

    def __init__(self, slo: Slo, num_planned: int, warm_up_s: float) -> None:
        self._slo = slo
        self._num_planned = num_planned
        self._warm_up_s = warm_up_s
        self._num_seen = 0
        self._open: list[Call] = []
        self._num_counted = 0
        self._num_bad = 0

    def is_hopeless(self, state: RunState) -> bool:
        new = [call for call in state.calls[self._num_seen :] if call.due_s >= self._warm_up_s]
        self._num_seen = len(state.calls)
        self._num_counted += len(new)
        self._open += new
        ended = [call.record for call in self._open if call.record is not None]
        self._open = [call for call in self._open if call.record is None]
        self._num_bad += sum(not self._slo.is_met_by(record) for record in ended)
        num_late = sum(self._is_late(call, state.elapsed_s) for call in self._open)
        share = 1.0 - self._slo.attainment + _ROUNDING
        num_allowed = int(share * max(self._num_planned, self._num_counted))
        return self._num_bad + num_late > num_allowed + 1

    def _is_late(self, call: Call, now_s: float) -> bool:
        limit = self._slo.ttft_s
        return limit is not None and not call.has_first_token and now_s - call.due_s > limit
