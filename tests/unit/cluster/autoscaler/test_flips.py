"""Changes of role and the budget over both pools: neither is forgotten while something is under way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decide import decide
from cluster.autoscaler.decision import Decision, Flip, State
from cluster.autoscaler.load import Load, PoolCount, RouterLoad, WorkerLoad
from core.ids import Role
from tests.unit.cluster.autoscaler.loads import QUIET, load_of, worker

CONFIG = AutoscalingConfig(
    is_enabled=True,
    max_prefill_workers=6,
    max_decode_workers=6,
    max_workers=6,
    scale_up_delay_s=3.0,
    scale_down_delay_s=20.0,
    idle_delay_s=500.0,
    startup_s=8.0,
    flip_back_delay_s=30.0,
)
# 1.5 workers' worth of prompts, and 5
SOME = replace(QUIET, num_open=1, arrivals_per_s=3.0, tokens_per_s=1200.0, num_arrived=10_000)
MANY = replace(SOME, tokens_per_s=4000.0)
BUSY = replace(QUIET, num_open=1)


class Asked:
    """The rules, asked once a second."""

    def __init__(self, config: AutoscalingConfig = CONFIG) -> None:
        self.config, self.state, self.now = config, State(), 0.0

    def second(self, load: Load) -> Decision:
        decision, self.state = decide(load, self.config, self.state, self.now)
        self.now += 1.0
        return decision

    def until_flips(self, load: Load, most: int = 60) -> tuple[Flip, ...]:
        for _ in range(most):
            if flips := self.second(load).flips:
                return flips
        return ()


def fleet(*roles: str) -> list[WorkerLoad]:
    """One prefill worker, and decode workers in these roles ("p", "d"; "-" says nothing)."""
    names = {"p": Role.PREFILL, "d": Role.DECODE}
    away = [worker(f"d{i}", names[name], home=Role.DECODE) for i, name in enumerate(roles) if name != "-"]
    return [worker("p", Role.PREFILL), *away]


def counted(num_decode: int, *workers: WorkerLoad, router: RouterLoad = BUSY) -> Load:
    """Those who report; `num_decode` replicas run in decode."""
    return replace(load_of(*workers), decode=PoolCount(num_decode, num_decode), router=router)


def total(decision: Decision) -> int:
    return decision.prefill.num_replicas + decision.decode.num_replicas


def test_prefill_does_not_grow_beyond_the_budget_while_decode_workers_change_their_role() -> None:
    asked = Asked()
    full = counted(5, *fleet("d", "d", "d", "d", "d"), router=SOME)
    assert asked.until_flips(full)
    more = replace(full, router=MANY)
    for _ in range(15):
        assert total(asked.second(more)) <= 6


def test_targets_beyond_the_budget_are_cut_even_if_nobody_reports() -> None:
    away = counted(5, *fleet("p", "p", "d", "d", "d"), router=MANY)
    decision = Asked(replace(CONFIG, max_workers=4)).second(away)
    assert total(decision) == 4
    assert min(decision.prefill.num_replicas, decision.decode.num_replicas) >= 1
    silent = replace(away, workers=(), router=None, prefill=PoolCount(3, 3))
    assert total(Asked(replace(CONFIG, max_workers=4)).second(silent)) == 4


def test_a_pool_grows_into_the_budget_only_when_the_replicas_that_leave_have_gone() -> None:
    asked = Asked(replace(CONFIG, can_flip=False))
    draining = replace(load_of(worker("p", Role.PREFILL), worker("d0", Role.DECODE)), router=MANY)
    leaving = replace(draining, decode=PoolCount(1, 5))
    for _ in range(8):
        assert asked.second(leaving).prefill.num_replicas == 1
    assert asked.second(draining).prefill.num_replicas == 5


def test_a_worker_between_two_roles_counts_as_there_and_nobody_follows_it() -> None:
    asked = Asked()
    (flip,) = asked.until_flips(counted(3, *fleet("d", "d", "d"), router=SOME))
    assert flip.worker_id == "d0"
    between = counted(3, *fleet("-", "d", "d"), router=SOME)
    decisions = [asked.second(between) for _ in range(10)]
    assert not any(decision.flips for decision in decisions)
    assert {(d.prefill.num_replicas, d.decode.num_replicas) for d in decisions} == {(1, 3)}


def test_whoever_changed_its_role_keeps_it_for_a_while() -> None:
    asked = Asked()
    assert asked.until_flips(counted(3, *fleet("d", "d", "d"), router=SOME)) == (Flip("d0", Role.PREFILL),)
    asked.second(counted(3, *fleet("-", "d", "d"), router=SOME))
    seen_at = asked.now
    gone = counted(3, *fleet("p", "d", "d"))
    assert asked.until_flips(gone, 100) == (Flip("d0", Role.DECODE),)
    assert 30.0 <= asked.now - 1.0 - seen_at < 60.0


def test_whoever_changed_its_role_goes_back_before_that_if_nobody_else_runs_that_phase() -> None:
    asked = Asked()
    assert asked.until_flips(counted(2, *fleet("d", "d"), router=SOME)) == (Flip("d0", Role.PREFILL),)
    asked.second(counted(2, *fleet("p", "d"), router=SOME))
    # an operator takes the other decode worker
    prefill, one, taken = fleet("p", "p")
    lost = counted(2, prefill, one, replace(taken, is_pinned=True), router=SOME)
    assert asked.until_flips(lost, 10) == (Flip("d0", Role.DECODE),)


def test_an_order_that_is_followed_late_is_held_from_then_on() -> None:
    asked = Asked()
    assert asked.until_flips(counted(3, *fleet("d", "d", "d"), router=SOME))
    for _ in range(25):  # void meanwhile, and no longer needed
        asked.second(counted(3, *fleet("d", "d", "d")))
    seen_at = asked.now
    assert asked.until_flips(counted(3, *fleet("p", "d", "d")), 100) == (Flip("d0", Role.DECODE),)
    assert asked.now - 1.0 - seen_at >= 30.0


@dataclass
class Chance:
    """A fleet that does as it is told, in its own time, under a load that changes by chance."""

    seed: int
    budget: int
    now: float = 0.0
    workers: dict[str, WorkerLoad] = field(default_factory=dict)
    targets: dict[Role, int] = field(default_factory=dict)
    starting: list[tuple[float, str, Role]] = field(default_factory=list)
    changing: dict[str, tuple[float, float, Role]] = field(default_factory=dict)
    changed: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        num_prefill = self.chance.randint(1, self.budget - 1)
        self.targets = {Role.PREFILL: num_prefill, Role.DECODE: self.budget - num_prefill}
        self.rates, self.streams = (0.0, 0.0), 0
        for role, num in self.targets.items():
            for _ in range(num):
                self._start(role, 0.0)

    def _start(self, role: Role, at: float) -> None:
        self.count += 1
        self.starting.append((at, f"{role.value}-{self.count:03}", role))

    def load(self) -> Load:
        """What is reported now: whoever is between two roles says nothing, whoever leaves one drains."""
        chance = self.chance
        if chance.random() < 0.1:
            self.rates, self.streams = (chance.uniform(0, 12), chance.uniform(50, 900)), chance.randint(0, 60)
        for at, name, role in [item for item in self.starting if item[0] <= self.now]:
            self.starting.remove((at, name, role))
            self.workers[name] = worker(name, role)
        for name, (_, at, role) in list(self.changing.items()):
            if at <= self.now:
                del self.changing[name]
                self.workers[name] = worker(name, role, home=self.workers[name].home)
                self.changed.setdefault(name, []).append(self.now)
        reported = []
        for name, item in self.workers.items():
            leaves_at = self.changing[name][0] if name in self.changing else self.now + 1
            if self.now < leaves_at:
                running = chance.randint(0, self.streams) if item.role is Role.DECODE else 0
                reported.append(replace(item, num_running=running, is_draining=name in self.changing))
        per_s, num_prompt = self.rates
        router = replace(
            BUSY,
            arrivals_per_s=per_s,
            tokens_per_s=per_s * num_prompt,
            num_arrived=round(10 * per_s),
            num_waiting_tokens=chance.randint(0, 4000),
            num_output_tokens=40.0,
        )
        counts = [PoolCount(self.targets[role], self._num_running(role)) for role in Role]
        assert tuple(Role) == (Role.PREFILL, Role.DECODE)
        is_known = chance.random() > 0.02
        return Load(counts[0], counts[1], tuple(reported), router if is_known else None)

    def _num_running(self, home: Role) -> int:
        return sum(item.home is home for item in self.workers.values())

    def follow(self, decision: Decision) -> None:
        for role in Role:
            wanted = decision.pool(role).num_replicas
            for _ in range(wanted - self.targets[role]):
                self._start(role, self.now + self.chance.uniform(3, 15))
            for _ in range(self.targets[role] - wanted):
                late = [item for item in self.starting if item[2] is role]
                if late:
                    self.starting.remove(late[-1])
                else:
                    name = self.chance.choice([n for n, w in self.workers.items() if w.home is role])
                    del self.workers[name]
                    self.changing.pop(name, None)
            self.targets[role] = wanted
        for flip in decision.flips:
            if flip.worker_id in self.workers and self.chance.random() < 0.95:
                gone_at = self.now + self.chance.uniform(0, 25)
                back_at = gone_at + self.chance.uniform(0.5, 3)
                self.changing[flip.worker_id] = (gone_at, back_at, flip.role)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_budget_the_minima_and_the_roles_hold(seed: int) -> None:
    chance = random.Random(seed)
    budget, hold_s = chance.randint(2, 9), chance.choice([10.0, 30.0, 60.0])
    config = replace(
        CONFIG,
        max_workers=budget,
        max_prefill_workers=8,
        max_decode_workers=8,
        flip_back_delay_s=hold_s,
        scale_down_delay_s=chance.choice([5.0, 40.0]),
    )
    asked, plant = Asked(config), Chance(seed, budget)
    for second in range(300):
        plant.now = float(second)
        load = plant.load()
        decision = asked.second(load)
        assert total(decision) <= budget, second
        for role in Role:
            assert config.min_workers(role) <= decision.pool(role).num_replicas <= 8
        assert len({flip.role for flip in decision.flips}) <= 1, "nobody changes places with another one"
        for flip in decision.flips:
            recent = [at for at in plant.changed.get(flip.worker_id, []) if second - at < hold_s]
            assert not recent or not load.of_role(flip.role), (second, flip)
        plant.follow(decision)
    for name, times in plant.changed.items():
        assert all(later - earlier >= hold_s for earlier, later in pairwise(times)), (name, times)
