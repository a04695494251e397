"""World: a scenario played: the real router and the real workers under it, and what must hold afterwards.

Each stream is a prefix of the oracle's answer, the whole of it if it ended well; otherwise it ended by a
ServingError, no later than its deadline. When everything is calm again, nothing is held anywhere: no block,
no ticket, no call, no reservation, and the router knows what the workers have cached.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.clock import Deadline
from core.errors import ServingError
from core.ids import Role, WorkerRef
from core.jobs import GenerateEvent
from core.telemetry import KV_LEAK_DIFFERENCE
from core.worker_status import Announcement
from decode_worker.worker import DecodeWorker
from router.config import RouterConfig
from router.decision import Decision
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.role_watch import RoleWatch
from router.worker_table import WorkerTable
from router.workers import Worker
from tests.simulation.chain_model import Oracle
from tests.simulation.network import Network, Weather
from tests.simulation.process import Process
from tests.simulation.roles import SimRoles
from tests.simulation.scenario import Client, Scenario, Trouble, TroubleKind
from tests.simulation.virtual_time import LoopClock, VirtualLoop, run_virtually
from tests.simulation.workers import Directory, SimWorker, Site, SiteMaker

GRACE_S = 1.0
"""What a request may take beyond its deadline, in virtual seconds: its cancels are on their way."""

WAIT_FOR_STATE_S = 5.0
"""How long a trouble waits for a ticket in its state."""

STORM = Weather(slow=0.2, broken=0.3, repeated=0.3, corrupt=0.5, slow_s=0.5)

CALM_S = 16.0
"""After the last request: every silence of the bridge, every replay and every tombstone's use is over."""


@dataclass
class Report:
    """What came of a scenario. `broken` lists every promise that did not hold."""

    broken: list[str] = field(default_factory=list)
    num_complete: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_troubles: int = 0
    plans: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0


class _Reader:
    """Takes one request's tokens and holds them against the oracle."""

    def __init__(self, client: Client, oracle: Oracle, loop: VirtualLoop) -> None:
        request = client.request
        self.expected = [oracle.answer(request, index) for index in range(request.num_samples)]
        self.tokens: list[list[int]] = [[] for _ in self.expected]
        self.broken: list[str] = []
        self.longest_pause_s = 0.0
        self._has_ended = [False] * len(self.expected)
        self.plans: Counter[str] = Counter()
        self._enough_after = client.enough_after
        self._loop = loop
        self._heard_at: float | None = None

    def placed(self, decision: Decision) -> None:
        """Where it runs does not matter, but is counted."""
        self.plans[decision.plan.value] += 1
        self.plans["pull"] += decision.pull_from is not None

    def pulled(self) -> None:
        """Nothing to note."""

    def lost(self, samples: Sequence[int]) -> None:
        """They go on elsewhere, or the request ends by an error."""

    def read(self, event: GenerateEvent) -> bool:
        now = self._loop.time()
        if self._heard_at is not None:
            self.longest_pause_s = max(self.longest_pause_s, now - self._heard_at)
        self._heard_at = now
        delta = event.delta
        tokens, expected = self.tokens[delta.sample_index], self.expected[delta.sample_index]
        if delta.position != len(tokens):
            self.broken.append(f"a delta at {delta.position} after {len(tokens)} tokens")
        if self._has_ended[delta.sample_index]:
            self.broken.append("news of a sample that had ended")
        tokens += delta.token_ids
        if tuple(tokens) != expected[: len(tokens)]:
            self.broken.append(f"tokens {tokens} where {list(expected)} are right")
        if delta.finish_reason is not None:
            self._has_ended[delta.sample_index] = True
            if len(tokens) != len(expected):
                self.broken.append(f"{len(tokens)} tokens at the end where {len(expected)} are right")
        return self._enough_after is not None and len(tokens) >= self._enough_after

    @property
    def is_complete(self) -> bool:
        return all(
            has_ended or (self._enough_after is not None and len(tokens) >= self._enough_after)
            for has_ended, tokens in zip(self._has_ended, self.tokens, strict=True)
        )


class World:
    """One scenario on one loop."""

    def __init__(self, scenario: Scenario, oracle: Oracle, loop: VirtualLoop) -> None:
        self.report = Report()
        self._scenario = scenario
        self._oracle = oracle
        self._loop = loop
        self._clock = LoopClock(loop)
        self._network = Network(random.Random(scenario.seed + 1), scenario.weather)
        self._directory = Directory()
        self._faults: list[str] = []
        self._errors: list[str] = []
        self._router = Process("router", self._errors)
        self._maker = SiteMaker(
            self._network, self._directory, self._clock, scenario.num_blocks, self._faults, self._errors
        )
        self._roles = SimRoles(self._network, self._directory, self._router, self._clock)
        self._sites: list[Site] = []
        self._num_epochs = 0
        config = RouterConfig(plan=scenario.plan)
        self._table = WorkerTable(config, self, self._connect, self._clock)
        self._pipeline = Pipeline(
            config, self._table, RouterMetrics(), self._clock, random.Random(scenario.seed + 2)
        )

        self._watch = RoleWatch(self._table, self._roles, self._clock, asyncio.sleep)

    # ------------------------------------------------------------ membership

    async def announcements(self) -> tuple[Announcement, ...]:
        """What the registry would say: who has announced itself and is not known to be gone."""
        return tuple(
            self._roles.heard(site)
            for site in self._sites
            if not site.process.is_dead and not site.process.is_stopped
        )

    def _connect(self, ref: WorkerRef) -> Worker:
        return SimWorker(self._network, self._directory, self._router, ref)

    # ------------------------------------------------------------ the play

    async def play(self) -> Report:
        scenario = self._scenario
        for role, count in ((Role.PREFILL, scenario.num_prefill), (Role.DECODE, scenario.num_decode)):
            for index in range(count):
                await self._start(f"{role.value}-{index}", role, f"{role.value}-{index}")
        await self._table.start()
        watching = asyncio.create_task(self._watch.run())
        acts = [asyncio.create_task(self._serve(client)) for client in scenario.clients]
        acts += [asyncio.create_task(self._bring(trouble)) for trouble in scenario.troubles]
        await asyncio.gather(*acts)
        self._network.calm()
        await asyncio.sleep(CALM_S)
        await self._check_rest()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await self._pipeline.stop()
        await self._table.stop()
        for site in self._sites:
            site.process.kill()
        self.report.broken += [f"wrong KV: {fault}" for fault in self._faults] + self._errors
        return self.report

    async def _start(self, name: str, role: Role, address: str) -> None:
        self._num_epochs += 1
        self._sites.append(await self._maker.make(name, role, self._num_epochs, address))

    async def _serve(self, client: Client) -> None:
        reader = _Reader(client, self._oracle, self._loop)
        await asyncio.sleep(client.at_s)
        began_at = self._loop.time()
        deadline = Deadline(began_at + client.timeout_s)
        work = asyncio.create_task(self._pipeline.serve(client.request, reader, deadline))
        if client.leaves_after_s is not None:
            await asyncio.wait({work}, timeout=client.leaves_after_s)
            work.cancel()
        await asyncio.wait({work}, timeout=client.timeout_s + GRACE_S)
        name = client.request.request_id
        report = self.report
        if not work.done():
            report.broken.append(f"{name} hangs beyond its deadline")
            work.cancel()
            return
        report.broken += [f"{name}: {line}" for line in reader.broken]
        report.plans += reader.plans
        report.num_tokens += sum(len(tokens) for tokens in reader.tokens)
        report.longest_pause_s = max(report.longest_pause_s, reader.longest_pause_s)
        if work.cancelled():
            if client.leaves_after_s is None:
                report.broken.append(f"{name} was cancelled by nobody")
        elif (error := work.exception()) is not None:
            report.num_errors += 1
            if not isinstance(error, ServingError):
                report.broken.append(f"{name} ended by {error!r}")
        elif not reader.is_complete:
            report.broken.append(f"{name} returned with {reader.tokens} of {reader.expected}")
        else:
            report.num_complete += 1

    async def _bring(self, trouble: Trouble) -> None:
        await asyncio.sleep(trouble.at_s)
        victim = await self._victim(trouble)
        if victim is None:
            return
        self.report.num_troubles += 1
        process, network = victim.process, self._network
        match trouble.kind:
            case TroubleKind.KILL:
                process.kill()
                network.notice()
                await asyncio.sleep(trouble.lasts_s)
                ref = victim.ref
                fresh = ref.address if trouble.keeps_address else f"{ref.worker_id}:{self._num_epochs}"
                await self._start(ref.worker_id, ref.role, fresh)
            case TroubleKind.STOP:
                process.stop()
                await asyncio.sleep(trouble.lasts_s)
                process.go_on()
                if not process.is_dead and not victim.either.is_healthy():
                    self.report.broken.append(f"{process.name} is not healthy since it was stopped")
                network.notice()
            case TroubleKind.CUT_ROUTER:
                await self._cut(self._router, process, trouble.lasts_s)
            case TroubleKind.CUT_BRIDGE:
                others = [site for site in self._living() if site.ref.role is not victim.ref.role]
                if others:
                    await self._cut(process, others[trouble.second % len(others)].process, trouble.lasts_s)
            case TroubleKind.ROLE:
                home = victim.ref.role
                await self._take(victim, Role.DECODE if home is Role.PREFILL else Role.PREFILL)
                await asyncio.sleep(trouble.lasts_s)
                await self._take(victim, home)
            case TroubleKind.STORM:
                before = network.weather
                network.weather = STORM
                await asyncio.sleep(trouble.lasts_s)
                network.weather = before

    async def _take(self, site: Site, role: Role) -> None:
        """Have it take that role. None that runs has a reason not to leave its own."""
        if not await self._roles.take(site, role) and not site.process.is_dead:
            self.report.broken.append(f"{site.process.name} could not leave its role")

    def _living(self) -> list[Site]:
        return [site for site in self._sites if not site.process.is_dead]

    async def _victim(self, trouble: Trouble) -> Site | None:
        """Whom it hits: anyone, or whoever has a ticket in the state that it waits for, if anybody."""
        if trouble.state is None:
            living = self._living()
            return living[trouble.victim % len(living)] if living else None
        give_up_at = self._loop.time() + WAIT_FOR_STATE_S
        while self._loop.time() < give_up_at:
            for site in self._living():
                if site.ref.role is trouble.role and site.num_tickets(trouble.state):
                    return site
            await asyncio.sleep(0.0005)
        return None

    async def _cut(self, a: Process, b: Process, seconds: float) -> None:
        self._network.cut(a, b)
        await asyncio.sleep(seconds)
        self._network.heal(a, b)

    # ------------------------------------------------------------ afterwards

    async def _check_rest(self) -> None:
        for site in self._sites:
            if site.process.is_dead:
                continue
            name, worker = site.process.name, site.worker
            if not site.either.is_healthy():
                self.report.broken.append(f"{name} is not healthy, though nothing hinders it any more")
            try:
                await worker.check()
            except (AssertionError, ServingError) as error:
                self.report.broken.append(f"{name}: {error}")
            leak = worker.registry.get_sample_value(
                KV_LEAK_DIFFERENCE, {"role": site.ref.role.value, "model": worker._config.model}
            )
            if leak != 0:
                self.report.broken.append(f"{name} has a leak of {leak} blocks")
            status = worker._loop.status()
            held = status.num_held_blocks + status.num_quarantined_blocks
            if held:
                self.report.broken.append(f"{name} holds {held} blocks")
            if isinstance(worker, DecodeWorker):
                if worker._loop.num_unfinished:
                    self.report.broken.append(f"{name} has {worker._loop.num_unfinished} jobs or tickets")
            elif worker.num_calls:
                self.report.broken.append(f"{name} has {worker.num_calls} calls")
            cached = len(list(worker._runner.cache.allocator.prefix_cache.items()))
            known = self._table.index.num_blocks(site.ref.worker_id)
            if known != cached:
                self.report.broken.append(f"{name} has {cached} blocks cached, the router knows {known}")
        for entry in self._table.entries():
            if entry.num_reserved_seqs or entry.num_reserved_tokens:
                self.report.broken.append(f"the router has reservations on {entry.ref.worker_id}")


def play(scenario: Scenario, oracle: Oracle) -> Report:
    """The whole scenario in virtual time; the same seed gives the same play."""
    loop = VirtualLoop()
    return run_virtually(World(scenario, oracle, loop).play(), loop)
