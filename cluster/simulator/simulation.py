"""Simulation: a deployment serves a workload in virtual time.

Owns how the parts are put together, and what must hold afterwards: each request has ended, nothing is held
anywhere. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulator.choosing import Chooser
from cluster.simulator.decode_site import DecodeSite
from cluster.simulator.deployment import Deployment
from cluster.simulator.dispatch import Dispatch
from cluster.simulator.events import Events, SiteClock
from cluster.simulator.fleet import Fleet
from cluster.simulator.handoff import Receiving
from cluster.simulator.prefill_site import PrefillSite
from cluster.simulator.record import Record
from cluster.simulator.sharing import Host
from cluster.simulator.site_runner import SiteRunner
from cluster.simulator.teller import Teller
from cluster.simulator.workload import Arrival
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import Announcement

_MAX_TOKENS = 2048
_REPEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What one worker did. `busy_s`: seconds of steps; tokens are of prompts."""

    worker_id: str
    role: str
    num_steps: int
    busy_s: float
    num_query_tokens: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests in the order of their arrival, all workers by name. `ended_s`: when the last one ended.
    `num_pages`: told to mend views of blocks; `num_events`: that the simulation took."""

    records: list[Record]
    sites: list[SiteReport]
    ended_s: float
    num_pages: int
    num_events: int


class Simulation:
    """One run: `play` once. The same seed plays the same."""

    def __init__(self, deployment: Deployment, seed: int = 0, chooser: Chooser | None = None) -> None:
        self.events = Events()
        self._deployment = deployment
        self._chance = random.Random(seed)
        self._last_s = 0.0
        self._host = Host(deployment.sharing) if deployment.sharing is not None else None
        message_s = deployment.link.latency_s
        self.fleet = Fleet(deployment.router, self.events, message_s)
        self.router = Dispatch(
            deployment.router,
            self.fleet,
            self.events,
            random.Random(seed + 1),
            message_s,
            chooser,
            deployment.front,
        )
        for number in range(deployment.num_decode):
            self._add_decode(number)
        targets: dict[WorkerId, Receiving] = dict(self.router.decodes.items())
        for number in range(deployment.num_prefill):
            self._add_prefill(number, targets)

    def play(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve all of `arrivals`, in their order."""
        records = [
            Record(item.number, item.arrival_s, item.record.num_prompt_tokens, item.record.num_output_tokens)
            for item in arrivals
        ]
        for site in self._sites():
            site.teller.publish(0.0, site.loop.status())
        if arrivals:
            self._last_s = arrivals[-1].arrival_s
            self.events.at(arrivals[0].arrival_s, self._arrive, arrivals, records, 0)
        self.events.after(_REPEAT_S, self._repeat)
        self.events.run()
        self.check()
        sites = [_report(site) for site in self._sites()]
        ended_s = max((record.ended_s for record in records), default=0.0)
        return Outcome(records, sites, ended_s, self.fleet.num_pages, self.events.num_made)

    def check(self) -> None:
        """Assert that nothing is left anywhere: no request, no ticket, no block that somebody holds."""
        assert self.router.num_open == 0, f"{self.router.num_open} requests have not ended"
        for site in self._sites():
            site.loop.check()
            assert not site.has_work, f"{site.ref.worker_id} still has work"
            assert site.runner.cache.allocator.num_held == 0
        for entry in self.fleet.entries():
            assert entry.num_reserved_seqs == 0, f"{entry.ref.worker_id} is reserved"

    def _repeat(self) -> None:
        """Workers without work are heard, too."""
        for site in self._sites():
            if not site.has_work:
                site.teller.repeat()
        if self.events.now() < self._last_s or self.router.num_open:
            self.events.after(_REPEAT_S, self._repeat)

    def _arrive(self, arrivals: Sequence[Arrival], records: Sequence[Record], index: int) -> None:
        item = arrivals[index]
        if index + 1 < len(arrivals):
            self.events.at(arrivals[index + 1].arrival_s, self._arrive, arrivals, records, index + 1)
        max_tokens = 1 if self._deployment.is_length_known else _MAX_TOKENS
        self.router.serve(item.request(max_tokens), records[index], self._deployment.timeout_s)

    def _sites(self) -> list[PrefillSite | DecodeSite]:
        return [*self.router.prefills.values(), *self.router.decodes.values()]

    def _add_prefill(self, number: int, targets: dict[WorkerId, Receiving]) -> None:
        ref = WorkerRef(WorkerId(f"prefill-{number:03}"), Role.PREFILL, Epoch(1), "")
        runner, clock, teller = self._parts(ref)
        deployment = self._deployment
        site = PrefillSite(
            *(ref, runner, clock, deployment.prefill, self.events, teller, deployment.link, targets)
        )
        self.router.prefills[ref.worker_id] = site
        self._enter(ref, teller)

    def _add_decode(self, number: int) -> None:
        ref = WorkerRef(WorkerId(f"decode-{number:03}"), Role.DECODE, Epoch(1), "")
        runner, clock, teller = self._parts(ref)
        deployment = self._deployment
        site = DecodeSite(
            *(ref, runner, clock, deployment.decode, self.events, teller, deployment.link),
            # a step that would repeat the last one may still take longer, if another worker has begun
            is_leaping=deployment.is_leaping and self._host is None,
        )
        self.router.decodes[ref.worker_id] = site
        self._enter(ref, teller)

    def _parts(self, ref: WorkerRef) -> tuple[SiteRunner, SiteClock, Teller]:
        deployment, clock = self._deployment, SiteClock()
        runner = SiteRunner(
            deployment.layout,
            deployment.num_blocks,
            deployment.max_context,
            deployment.price,
            clock,
            self._host,
        )
        chance = random.Random(self._chance.random())
        return runner, clock, Teller(ref, self.events, deployment.way, chance, self.fleet.hear)

    def _enter(self, ref: WorkerRef, teller: Teller) -> None:
        deployment = self._deployment
        announcement = Announcement(
            ref=ref,
            model=deployment.layout.model,
            layout=deployment.layout,
            max_context=deployment.max_context,
            pid=0,
            node=ref.worker_id if self._host is None else "host",
            home_pool=ref.role.value,
            num_blocks=deployment.num_blocks,
        )
        self.fleet.enter(announcement, teller)


def _report(site: PrefillSite | DecodeSite) -> SiteReport:
    cache, runner = site.runner.cache, site.runner
    return SiteReport(
        site.ref.worker_id,
        site.ref.role.value,
        runner.num_steps,
        runner.busy_s,
        cache.num_query_tokens,
        cache.num_hit_tokens,
    )
