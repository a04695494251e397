"""Pools: the workers of a simulation: they start, serve a role, change it, drain and leave.

Owns how a worker is put together, and that none of them goes while anything of it is needed: a drain takes no
new work, and waits for what there is. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.simulator.decode_site import DecodeSite
from cluster.simulator.deployment import Deployment
from cluster.simulator.dispatch import Dispatch
from cluster.simulator.events import Events, SiteClock
from cluster.simulator.fleet import Fleet
from cluster.simulator.jitter import Draws
from cluster.simulator.prefill_site import PrefillSite
from cluster.simulator.sharing import Host
from cluster.simulator.site_runner import SiteRunner
from cluster.simulator.teller import Teller
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.worker_status import Announcement

Site = PrefillSite | DecodeSite

_LOOK_S = 0.05  # how often a drain is looked after


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What one worker did in one role. `busy_s`: seconds of steps; tokens are of prompts."""

    worker_id: str
    role: str
    num_steps: int
    busy_s: float
    num_query_tokens: int
    num_hit_tokens: int


@dataclass(eq=False, slots=True)
class Member:
    """One worker. `number`: of its pool. `query_before`, `hit_before`: what its cache had counted in roles
    before. `is_leaving`: it drains, and is no replica any more.
    """

    home: Role
    number: int
    announcement: Announcement
    site: Site
    query_before: int = 0
    hit_before: int = 0
    is_leaving: bool = False

    def report(self) -> SiteReport:
        site, cache = self.site, self.site.runner.cache
        return SiteReport(
            site.ref.worker_id,
            site.ref.role.value,
            site.runner.num_steps,
            site.runner.busy_s,
            cache.num_query_tokens - self.query_before,
            cache.num_hit_tokens - self.hit_before,
        )


class Pools:
    """Both pools. `chance` is for what messages suffer, `step_chance` for how steps differ."""

    def __init__(
        self,
        deployment: Deployment,
        events: Events,
        fleet: Fleet,
        router: Dispatch,
        chance: random.Random,
        step_chance: random.Random,
        host: Host | None,
    ) -> None:
        """`host`: of all workers; None: each has one of its own."""
        self._deployment = deployment
        self._events = events
        self._fleet = fleet
        self._router = router
        self._chance = chance
        self._step_chance = step_chance
        self._host = host
        self._members: dict[WorkerId, Member] = {}
        self._starting: dict[Role, list[int]] = {role: [] for role in Role}
        self._num_made: dict[Role, int] = dict.fromkeys(Role, 0)
        self._left: list[SiteReport] = []

    # ------------------------------------------------------------ what there is

    def sites(self) -> list[Site]:
        """All that live, those that drain included."""
        return [member.site for member in self._members.values()]

    def members(self, home: Role) -> list[Member]:
        """The replicas of a pool that run."""
        return [item for item in self._members.values() if item.home is home and not item.is_leaving]

    def num_target(self, home: Role) -> int:
        """Replicas that run or start."""
        return len(self.members(home)) + len(self._starting[home])

    def reports(self) -> list[SiteReport]:
        """Of all that there were, in each of their roles."""
        return self._left + [member.report() for member in self._members.values()]

    # ------------------------------------------------------------ coming and going

    def start(self, home: Role) -> None:
        """One more replica, which serves at once."""
        self._enter(home, self._next_number(home))

    def resize(self, home: Role, num_replicas: int, startup_s: float) -> None:
        """As Serve does: new replicas serve after `startup_s`; those that still start go first, then the
        youngest.
        """
        for _ in range(num_replicas - self.num_target(home)):
            number = self._next_number(home)
            self._starting[home].append(number)
            self._events.after(startup_s, self._started, home, number)
        for _ in range(self.num_target(home) - num_replicas):
            if self._starting[home]:
                self._starting[home].pop()
            else:
                self._drain(max(self.members(home), key=lambda member: member.number), None)

    def flip(self, worker_id: WorkerId, role: Role, takes_s: float) -> None:
        """Have a worker take another role: it drains, and serves that `takes_s` later. Its cache stays."""
        member = self._members.get(worker_id)
        if member is not None and not member.is_leaving and member.site.ref.role is not role:
            self._drain(member, (role, takes_s))

    # ------------------------------------------------------------ inside

    def _next_number(self, home: Role) -> int:
        number = self._num_made[home]
        self._num_made[home] += 1
        return number

    def _started(self, home: Role, number: int) -> None:
        if number in self._starting[home]:
            self._starting[home].remove(number)
            self._enter(home, number)
            self._router.freed()

    def _drain(self, member: Member, to: tuple[Role, float] | None) -> None:
        member.is_leaving = to is None
        member.site.drain()
        self._look(member, member.site, to)

    def _look(self, member: Member, site: Site, to: tuple[Role, float] | None) -> None:
        """Whether everything of it has ended."""
        if member.is_leaving and to is not None:
            return  # it was to change its role, and is to leave now
        entry = self._fleet.entry(site.ref)
        is_placed_on = entry is not None and entry.num_reserved_seqs > 0
        if site.has_work or is_placed_on:
            self._events.after(_LOOK_S, self._look, member, site, to)
            return
        self._fleet.leave(site.ref)
        self._router.remove(site)
        self._left.append(member.report())
        del self._members[site.ref.worker_id]
        if to is not None:
            role, takes_s = to
            self._events.after(takes_s, self._enter, member.home, member.number, role, member)
            self._members[site.ref.worker_id] = member

    def _enter(self, home: Role, number: int, role: Role | None = None, before: Member | None = None) -> None:
        """A worker serves, perhaps after it has had another role."""
        if before is not None and before.is_leaving:
            return
        epoch = 1 if before is None else before.site.ref.epoch + 1
        ref = WorkerRef(WorkerId(f"{home.value}-{number:03}"), role or home, Epoch(epoch), "")
        site = self._site(ref, None if before is None else before.site)
        cache, deployment = site.runner.cache, self._deployment
        announcement = Announcement(
            ref=ref,
            model=deployment.layout.model,
            layout=deployment.layout,
            max_context=deployment.max_context,
            pid=0,
            node=ref.worker_id if self._host is None else "host",
            home_pool=home.value,
            num_blocks=deployment.num_blocks,
            home_role=home,
        )
        self._members[ref.worker_id] = Member(
            home, number, announcement, site, cache.num_query_tokens, cache.num_hit_tokens
        )
        self._fleet.enter(announcement, site.teller)
        self._router.add(site)
        site.teller.publish(self._events.now(), site.loop.status())

    def _site(self, ref: WorkerRef, before: Site | None) -> Site:
        deployment, clock = self._deployment, SiteClock()
        clock.at = self._events.now()
        runner = SiteRunner(
            deployment.layout,
            deployment.num_blocks,
            deployment.max_context,
            deployment.price,
            clock,
            Draws(deployment.jitter, random.Random(self._step_chance.random())),
            self._host,
            None if before is None else before.runner.cache,
        )
        if before is None:
            chance = random.Random(self._chance.random())
            teller = Teller(ref, self._events, deployment.way, chance, self._fleet.hear)
        else:
            teller = before.teller.successor(ref)
        if ref.role is Role.PREFILL:
            return PrefillSite(
                *(ref, runner, clock, deployment.prefill, self._events, teller, deployment.link),
                targets=self._router.decodes,
            )
        return DecodeSite(
            *(ref, runner, clock, deployment.decode, self._events, teller, deployment.link),
            # a step that would repeat the last one may still take longer, if another worker has begun
            is_leaping=deployment.is_leaping and self._host is None,
        )


def check(sites: Iterable[Site], fleet: Fleet) -> None:
    """Assert that nothing is left anywhere: no ticket, no block that somebody holds."""
    for site in sites:
        site.loop.check()
        assert not site.has_work, f"{site.ref.worker_id} still has work"
        assert site.runner.cache.allocator.num_held == 0
    for entry in fleet.entries():
        assert entry.num_reserved_seqs == 0, f"{entry.ref.worker_id} is reserved"
