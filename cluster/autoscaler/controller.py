"""Controller: asked again and again how many replicas there shall be, it decides once a period and answers.

Owns the state between decisions and what becomes of them: each goes out as an event once Serve has applied
it. Runs inside Serve's control loop: it does not block, and whoever calls it sees to it that nothing is
raised. Knows no Ray; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decide import decide
from cluster.autoscaler.decision import Decision, State
from cluster.autoscaler.decision_log import DecisionEvent
from cluster.autoscaler.load import Load
from cluster.autoscaler.meter import Fleet, Meter
from core.ids import Role

Tell = Callable[[DecisionEvent, State], None]
"""Hears of a decision, with the state before it."""


class Controller:
    """One per service. `tell` must not block."""

    def __init__(self, config: AutoscalingConfig, gpus_per_worker: float, tell: Tell) -> None:
        self._config = config
        self._meter = Meter(config, gpus_per_worker)
        self._tell = tell
        self._state = State()
        self._decided_at: float | None = None
        self._untold: tuple[float, float, Load, Decision, State] | None = None

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next decision."""
        return self._decided_at is None or now - self._decided_at >= self._config.period_s

    def answer(
        self, pools: Mapping[Role, Fleet], routers: Fleet, now: float, wall_time: float
    ) -> dict[Role, int]:
        """Decide; how many replicas each pool is to have. `now` goes on evenly, `wall_time` is for people."""
        self.applied({role: fleet.num_target for role, fleet in pools.items()})
        load = self._meter.load(pools, routers, now)
        before = self._state
        decision, self._state = decide(load, self._config, before, now)
        self._decided_at = now
        self._untold = (wall_time, now, load, decision, before)
        return {role: decision.pool(role).num_replicas for role in Role}

    def applied(self, targets: Mapping[Role, int]) -> None:
        """What Serve aims at since the last answer."""
        if self._untold is None:
            return
        wall_time, now, load, decision, before = self._untold
        self._untold = None
        event = DecisionEvent(wall_time, now, load, decision, targets[Role.PREFILL], targets[Role.DECODE])
        self._tell(event, before)
