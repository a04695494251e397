"""TicketMetrics: the tickets of one decode worker, by state and by end; DecodeSeries: all its metrics.

Written on the step thread, scraped from any. No label that a client can invent.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from core import telemetry
from core.handoff import TERMINAL_STATES, TicketState
from core.ids import Role
from engine.metrics import EngineMetrics
from kv_transfer.metrics import TransferMetrics


class TicketMetrics:
    """Gauge of live tickets by state, counter of tickets that ended as released, aborted or expired."""

    def __init__(self, registry: CollectorRegistry) -> None:
        names, role = ("role", "state"), Role.DECODE.value
        states = Gauge(telemetry.TICKETS, "Tickets under way, by state", names, registry=registry)
        ended = Counter(telemetry.TICKETS_TOTAL, "Tickets that ended, by state", names, registry=registry)
        live_states = [state for state in TicketState if state not in TERMINAL_STATES]
        self._states = {state: states.labels(role, state.value) for state in live_states}
        self._ended = {state: ended.labels(role, state.value) for state in TERMINAL_STATES}

    def observe_states(self, num_by_state: Mapping[TicketState, int]) -> None:
        """Set the gauges of all states at once."""
        for state, series in self._states.items():
            series.set(num_by_state.get(state, 0))

    def observe_end(self, state: TicketState) -> None:
        """A ticket became terminal."""
        self._ended[state].inc()


class DecodeSeries:
    """What a process counts while it decodes, in one registry; counters go on when it does so again."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineMetrics(self.registry, Role.DECODE, model)
        self.transfer = TransferMetrics(self.registry)
        self.tickets = TicketMetrics(self.registry)

    def rest(self) -> None:
        """Nothing runs in this role any more."""
        self.engine.rest()
        self.tickets.observe_states({})
