"""The controller between Serve's calls: one decision a period, told with what Serve made of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.contexts import fleet_of
from cluster.autoscaler.controller import Controller
from cluster.autoscaler.decision import State
from cluster.autoscaler.decision_log import DecisionEvent
from cluster.autoscaler.meter import Fleet, Report
from core.ids import Role

CONFIG = AutoscalingConfig(is_enabled=True, min_decode_workers=0, max_prefill_workers=2, period_s=1.0)
ASKED = {"arrived": 3.0, "arrived_tokens": 30.0, "open": 3.0, "waiting": 3.0, "waiting_tokens": 30.0}


def pools(prefill: int, decode: int) -> dict[Role, Fleet]:
    return {Role.PREFILL: Fleet(prefill, prefill), Role.DECODE: Fleet(decode, decode)}


def test_a_decision_is_told_with_what_serve_made_of_it() -> None:
    told: list[tuple[DecisionEvent, State]] = []
    controller = Controller(CONFIG, 0.0, lambda event, state: told.append((event, state)))
    routers = Fleet(1, 1, [Report("r", 5.0, ASKED)])
    assert controller.is_due(10.0)
    assert controller.answer(pools(1, 0), routers, 10.0, 1e9) == {Role.PREFILL: 1, Role.DECODE: 1}
    assert not controller.is_due(10.9)
    assert told == []
    controller.applied({Role.PREFILL: 1, Role.DECODE: 1})
    controller.applied({Role.PREFILL: 2, Role.DECODE: 2})
    ((event, state),) = told
    assert (event.applied_prefill, event.applied_decode, event.time, event.now) == (1, 1, 1e9, 10.0)
    assert event.inputs.decode.num_target == 0
    assert state == State()


def test_a_call_that_comes_late_tells_of_the_decision_before_first() -> None:
    told: list[DecisionEvent] = []
    controller = Controller(CONFIG, 0.0, lambda event, state: told.append(event))
    for second in range(3):
        controller.answer(pools(1, 1), Fleet(1, 1), float(second), 1e9 + second)
    assert [event.now for event in told] == [0.0, 1.0]


@dataclass(frozen=True)
class Named:
    """A replica's id, as Serve has it."""

    unique_id: str


def points(*pairs: tuple[float, float]) -> list[SimpleNamespace]:
    return [SimpleNamespace(timestamp=at, value=value) for at, value in pairs]


def test_serves_contexts_become_fleets_with_the_last_point_of_each_series() -> None:
    one, two = Named("a"), Named("b")
    context = SimpleNamespace(
        current_num_replicas=2,
        target_num_replicas=3,
        raw_metrics={
            "role": {one: points((1.0, 0.0), (2.0, 1.0)), two: []},
            "num_running": {one: points((1.5, 4.0)), two: points((1.0, 7.0))},
        },
    )
    assert fleet_of(context) == Fleet(
        2,
        3,
        [Report("a", 2.0, {"role": 1.0, "num_running": 4.0}), Report("b", 1.0, {"num_running": 7.0})],
    )
    nobody = SimpleNamespace(current_num_replicas=0, target_num_replicas=0, raw_metrics=None)
    assert fleet_of(nobody) == Fleet(0, 0, [])
