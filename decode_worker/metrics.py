"""TicketMetrics: the tickets of one decode worker, by state and by end.

Written on the step thread, scraped from any. No label that a client can invent.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from core import telemetry
from core.handoff import TERMINAL_STATES, TicketState
from core.ids import Role


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
