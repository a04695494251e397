"""Simulation: a deployment serves a workload in virtual time.

Owns how the parts are put together, and what must hold afterwards: each request has ended, nothing is held
anywhere. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decision_log import DecisionEvent
from cluster.simulator.choosing import Chooser
from cluster.simulator.deployment import Deployment
from cluster.simulator.dispatch import Dispatch
from cluster.simulator.events import Events
from cluster.simulator.fleet import Fleet
from cluster.simulator.front import Front
from cluster.simulator.pools import Pools, SiteReport, check
from cluster.simulator.record import Record
from cluster.simulator.scaler import Scaler
from cluster.simulator.sharing import Host
from cluster.simulator.workload import Arrival
from core.ids import Role

_MAX_TOKENS = 2048
_REPEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests in the order of their arrival, all workers by name. `ended_s`: when the last one ended.
    `num_pages`: told to mend views of blocks; `num_events`: that the simulation took. `decisions`:
    the autoscaler's.
    """

    records: list[Record]
    sites: list[SiteReport]
    ended_s: float
    num_pages: int
    num_events: int
    decisions: tuple[DecisionEvent, ...] = ()


class Simulation:
    """One run: `play` once. The same seed plays the same."""

    def __init__(
        self,
        deployment: Deployment,
        seed: int = 0,
        chooser: Chooser | None = None,
        scaling: AutoscalingConfig | None = None,
    ) -> None:
        """`scaling`: the autoscaler decides, beginning with the deployment's workers. Raises ValueError for
        pools that may have no worker.
        """
        self.events = Events()
        self._deployment = deployment
        self._last_s = 0.0
        message_s = deployment.link.latency_s
        self.fleet = Fleet(deployment.router, self.events, message_s)
        host = None if deployment.sharing is None else Host(deployment.sharing, self.events)
        self.router = Dispatch(
            deployment.router,
            self.fleet,
            self.events,
            random.Random(seed + 1),
            message_s,
            chooser,
            Front(deployment.front, host),
        )
        self.pools = Pools(
            *(deployment, self.events, self.fleet, self.router),
            chance=random.Random(seed),
            step_chance=random.Random(seed + 2),
            host=host,
        )
        for _ in range(deployment.num_decode):
            self.pools.start(Role.DECODE)
        for _ in range(deployment.num_prefill):
            self.pools.start(Role.PREFILL)
        self._scaler = None
        if scaling is not None:
            self._scaler = Scaler(scaling, self.events, self.fleet, self.router, self.pools)

    def play(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve all of `arrivals`, in their order."""
        records = [
            Record(item.number, item.arrival_s, item.record.num_prompt_tokens, item.record.num_output_tokens)
            for item in arrivals
        ]
        if arrivals:
            self._last_s = arrivals[-1].arrival_s
            self.events.at(arrivals[0].arrival_s, self._arrive, arrivals, records, 0)
        self.events.after(_REPEAT_S, self._repeat)
        if self._scaler is not None:
            self._scaler.begin(lambda: self._is_going_on)
        self.events.run()
        self.check()
        sites = sorted(self.pools.reports(), key=lambda site: (site.role != "prefill", site.worker_id))
        ended_s = max((record.ended_s for record in records), default=0.0)
        decisions = () if self._scaler is None else tuple(self._scaler.decisions)
        return Outcome(records, sites, ended_s, self.fleet.num_pages, self.events.num_made, decisions)

    def check(self) -> None:
        """Assert that nothing is left anywhere: no request, no ticket, no block that somebody holds."""
        assert self.router.num_open == 0, f"{self.router.num_open} requests have not ended"
        check(self.pools.sites(), self.fleet)

    @property
    def _is_going_on(self) -> bool:
        return self.events.now() < self._last_s or self.router.num_open > 0

    def _repeat(self) -> None:
        """Workers without work are heard, too: a real one's step thread tells its load once a second."""
        now = self.events.now()
        for site in self.pools.sites():
            if site.clock.at <= now and not site.has_work:
                site.teller.publish(now, site.loop.status())
        if self._is_going_on:
            self.events.after(_REPEAT_S, self._repeat)

    def _arrive(self, arrivals: Sequence[Arrival], records: Sequence[Record], index: int) -> None:
        item = arrivals[index]
        if index + 1 < len(arrivals):
            self.events.at(arrivals[index + 1].arrival_s, self._arrive, arrivals, records, index + 1)
        max_tokens = 1 if self._deployment.is_length_known else _MAX_TOKENS
        self.router.serve(item.request(max_tokens), records[index], self._deployment.timeout_s)
