"""TicketMetrics: the tickets of one prefill worker, by state and by end; PrefillSeries: all its metrics.

Written on the step thread, scraped from any. No label that a client can invent.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from core import telemetry
from core.handoff import TicketState
from core.ids import Role
from engine.metrics import EngineMetrics
from kv_transfer.metrics import TransferMetrics
from prefill_worker.outbox import ENDED_STATES


class TicketMetrics:
    """Gauge of tickets under way, counter of tickets that ended as committed, aborted or expired."""

    def __init__(self, registry: CollectorRegistry) -> None:
        role = Role.PREFILL.value
        states = Gauge(telemetry.TICKETS, "Tickets under way, by state", ("role", "state"), registry=registry)
        ended = Counter(
            telemetry.TICKETS_TOTAL, "Tickets that ended, by state", ("role", "state"), registry=registry
        )
        self._states = {state: states.labels(role, state.value) for state in TicketState}
        self._ended = {state: ended.labels(role, state.value) for state in ENDED_STATES}
        self._num_ended = dict.fromkeys(ENDED_STATES, 0)

    def observe(self, num_by_state: Mapping[TicketState, int], num_ended: Mapping[TicketState, int]) -> None:
        """Set the gauges; raise the counters to the outbox's own totals."""
        for state, series in self._states.items():
            series.set(num_by_state.get(state, 0))
        for state, counter in self._ended.items():
            total = num_ended.get(state, 0)
            counter.inc(total - self._num_ended[state])
            self._num_ended[state] = total

    def rest(self) -> None:
        """The outbox is gone; the next one counts from 0."""
        self._num_ended = dict.fromkeys(ENDED_STATES, 0)
        for series in self._states.values():
            series.set(0)


class PrefillSeries:
    """What a process counts while it prefills, in one registry; counters go on when it does so again."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineMetrics(self.registry, Role.PREFILL, model)
        self.transfer = TransferMetrics(self.registry)
        self.tickets = TicketMetrics(self.registry)

    def rest(self) -> None:
        """Nothing runs in this role any more."""
        self.engine.rest()
        self.tickets.rest()
