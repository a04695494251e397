"""Every fault, when a ticket is in each of its states, at either end: the stream is whole and all is freed.

The states are those that last a while where they are looked for. In a storm, which outlasts what a request
survives of failures, the stream may also end by a typed error.
"""

from __future__ import annotations

import pytest

from core.handoff import TicketState
from core.ids import Role
from tests.simulation.chain_model import Oracle
from tests.simulation.scenario import TroubleKind, at_state
from tests.simulation.world import play

PLACES = [
    (Role.PREFILL, TicketState.OFFERED),
    (Role.PREFILL, TicketState.SENDING),
    (Role.DECODE, TicketState.RESERVED),
    (Role.DECODE, TicketState.SENDING),
    (Role.DECODE, TicketState.COMMITTED),
    (Role.DECODE, TicketState.CLAIMED),
]
SEEDS = range(8)


@pytest.mark.parametrize("kind", list(TroubleKind))
@pytest.mark.parametrize(("role", "state"), PLACES)
def test_the_stream_is_whole_whatever_happens_when_its_ticket_is(
    role: Role, state: TicketState, kind: TroubleKind
) -> None:
    oracle = Oracle()
    reports = [play(at_state(role, state, kind, seed), oracle) for seed in SEEDS]
    assert not [report.broken for report in reports if report.broken]
    assert sum(report.num_troubles for report in reports) > 0, "no ticket came to that state"
    num_complete = sum(report.num_complete for report in reports)
    assert num_complete == len(SEEDS) or kind is TroubleKind.STORM
