"""LimitTable: which router replica holds how many tokens of each tenant's limits.

Owns the rule that the replicas' parts never come to more than the limit, which makes the limits hold over all
of them. Soft state: a replica's report is the truth about what it holds, so a new owner knows everything
once each replica has reported. Knows no Ray and no time of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.clock import Clock
from router.limits import Holding, LimitName, Order, Orders, PromisedCall, Report

LAPSE_S = 5.0


@dataclass(slots=True)
class _Part:
    """What one replica holds of one limit; `kept_until`: when a silent replica's tokens are surely back."""

    num_held: int = 0
    num_free: int = 0
    num_asked: int = 0
    kept_until: float = 0.0


@dataclass(slots=True)
class _Limit:
    size: int = 0
    parts: dict[str, _Part] = field(default_factory=dict)


class LimitTable:
    """One for the whole service. `lapse_s`: after so long a silence a replica counts as dead."""

    def __init__(self, clock: Clock, lapse_s: float = LAPSE_S) -> None:
        self._clock = clock
        self._lapse_s = lapse_s
        self._settled_at = clock.now() + lapse_s
        self._limits: dict[LimitName, _Limit] = {}
        self._replicas: dict[str, tuple[int, float]] = {}
        self._promised: dict[str, list[PromisedCall]] = {}
        self._claimed: dict[str, list[PromisedCall]] = {}

    def exchange(self, report: Report) -> Orders:
        """Take a replica's report, and answer what it gets and what it shall return."""
        now = self._clock.now()
        number, _ = self._replicas.get(report.replica, (0, 0.0))
        is_late = report.number <= number
        self._replicas[report.replica] = (max(number, report.number), now)
        self._replicas = {
            name: heard for name, heard in self._replicas.items() if heard[1] > now - self._lapse_s
        }
        is_settled = now >= self._settled_at
        # what was late was given up by the replica: it says nothing that is still true, and gets nothing
        holdings = () if is_late else report.holdings
        orders = tuple(self._order(report.replica, holding, now, is_settled) for holding in holdings)
        claimed = self._share_promises(report)
        promised = tuple(
            promise
            for name, promises in self._promised.items()
            if name != report.replica
            for promise in promises
        )
        return Orders(orders, len(self._replicas), is_settled, promised, claimed)

    def _share_promises(self, report: Report) -> tuple[PromisedCall, ...]:
        """Note what the replica keeps and what it claims; the claims of others on what it keeps."""
        for table in (self._promised, self._claimed):
            for name in [name for name in table if name not in self._replicas]:
                del table[name]
        claimed = self._claimed.pop(report.replica, [])
        kept = self._promised[report.replica] = list(report.promised)
        for claim in claimed:
            _take_out(kept, claim)
        for claim in report.claims:
            for name, promises in self._promised.items():
                if name != report.replica and _take_out(promises, claim):
                    self._claimed.setdefault(name, []).append(claim)
                    break
        return tuple(claimed)

    def _order(self, replica: str, holding: Holding, now: float, is_settled: bool) -> Order:
        limit = self._limits.setdefault(holding.name, _Limit())
        limit.size = holding.size
        self._forget_the_dead(limit, now)
        back_s = holding.back_s if holding.back_s < float("inf") else 0.0
        part = limit.parts[replica] = _Part(
            holding.num_held, holding.num_free, holding.num_asked, now + self._lapse_s + back_s
        )
        others = [other for name, other in limit.parts.items() if name != replica]
        pool = limit.size - sum(item.num_held for item in limit.parts.values())
        # tokens are kept ahead of use only as far as no call waits for them elsewhere
        num_asked_elsewhere = sum(other.num_asked for other in others)
        granted = min(holding.num_wanted, max(holding.num_asked, pool - num_asked_elsewhere), max(0, pool))
        granted = granted if is_settled else 0
        part.num_held += granted
        part.num_free += granted
        part.num_asked = max(0, part.num_asked - granted)
        pool -= granted
        # what others lack beyond the pool, or what is out too much
        lacking = num_asked_elsewhere - pool
        recalled = max(0, min(holding.num_free, lacking)) if is_settled else 0
        elsewhere = max(0, pool - num_asked_elsewhere) + sum(other.num_free for other in others)
        return Order(holding.name, granted, recalled, elsewhere)

    def _forget_the_dead(self, limit: _Limit, now: float) -> None:
        """A dead replica wants nothing; its tokens are nobody's once they have had the time to come back."""
        for name, part in list(limit.parts.items()):
            if name not in self._replicas:
                part.num_free = part.num_asked = 0
                if part.kept_until <= now:
                    del limit.parts[name]


def _take_out(promises: list[PromisedCall], claim: PromisedCall) -> bool:
    """Take out the first that is for the claimed call; whether there was one."""
    for index, promise in enumerate(promises):
        if (promise.scope, promise.call) == (claim.scope, claim.call):
            del promises[index]
            return True
    return False
