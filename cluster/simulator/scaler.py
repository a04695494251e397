"""Scaler: the real autoscaler decides for simulated pools, from what the workers and the router report.

Owns what stands for Serve: reports once a second, and replicas that start, drain and change roles as decided.
Meter, controller and log are the real ones. One thread.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.controller import Controller
from cluster.autoscaler.decision import State
from cluster.autoscaler.decision_log import DecisionEvent, DecisionLog
from cluster.autoscaler.meter import Fleet as Reporters
from cluster.autoscaler.meter import Report
from cluster.autoscaler.stats import worker_stats
from cluster.simulator.dispatch import Dispatch
from cluster.simulator.events import Events
from cluster.simulator.fleet import Fleet
from cluster.simulator.pools import Pools
from core.ids import Role, WorkerId


class Scaler:
    """One per simulation. Raises ValueError for pools that may have no worker: waking is not simulated."""

    def __init__(
        self, config: AutoscalingConfig, events: Events, fleet: Fleet, router: Dispatch, pools: Pools
    ) -> None:
        for role in Role:
            if config.min_workers(role) < 1:
                raise ValueError(f"autoscaling.min_{role.value}_workers must be at least 1 in a simulation")
        self._config = config
        self._events = events
        self._fleet = fleet
        self._router = router
        self._pools = pools
        self._controller = Controller(config, 0.0, self._tell)
        self._log = None if config.log_file is None else DecisionLog(config.log_file, config)
        self._is_going_on: Callable[[], bool] = lambda: False
        self.decisions: list[DecisionEvent] = []

    def begin(self, is_going_on: Callable[[], bool]) -> None:
        """Decide each `period_s`, as long as there is something to serve. Raises OSError for the log."""
        self._is_going_on = is_going_on
        self._decide()

    def _decide(self) -> None:
        now, config = self._events.now(), self._config
        if not self._is_going_on():
            if self._log is not None:
                self._log.close()
            return
        router = Reporters(1, 1, [Report("router", now, self._router.work.stats())])
        wanted = self._controller.answer(
            {role: self._reporters(role, now) for role in Role}, router, now, now
        )
        for role, num_replicas in wanted.items():
            self._pools.resize(role, num_replicas, config.startup_s)
        self._controller.applied({role: self._pools.num_target(role) for role in Role})
        self._events.after(config.period_s, self._decide)

    def _reporters(self, home: Role, now: float) -> Reporters:
        members = self._pools.members(home)
        reports = []
        for member in members:
            entry = self._fleet.entry(member.site.ref)
            # who is between two roles says nothing
            if entry is not None:
                stats = worker_stats(entry.status, member.announcement)
                reports.append(Report(f"{member.number:03}", now, stats))
        return Reporters(len(members), self._pools.num_target(home), reports)

    def _tell(self, event: DecisionEvent, state: State) -> None:
        self.decisions.append(event)
        if self._log is not None:
            self._log.write(event, state)
        for flip in event.decision.flips:
            self._pools.flip(WorkerId(flip.worker_id), flip.role, self._config.flip_s)
