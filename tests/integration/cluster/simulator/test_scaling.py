"""The autoscaler in the simulator: the real rules move simulated workers, and nobody's stream is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decision_log import DecisionEvent
from cluster.autoscaler.replay import replay_file
from cluster.loadtest.traces import TraceRecord
from cluster.simulator.deployment import Deployment
from cluster.simulator.simulation import Outcome, Simulation
from cluster.simulator.step_price import StepPrice
from cluster.simulator.workload import Arrival, arrivals_of
from core.ids import Role
from tests.unit.cluster.simulator.world import SMALL

# some seconds of processor each, on however busy a machine
pytestmark = pytest.mark.timeout(600)

PRICE = StepPrice(fixed_s=0.06, token_s=400e-6, pair_s=10e-9, stream_s=3e-3, kv_s=500e-9)
CONFIG = AutoscalingConfig(
    is_enabled=True,
    max_prefill_workers=6,
    max_decode_workers=6,
    target_ttft_s=4.0,
    target_itl_s=0.12,
    startup_s=8.0,
    scale_down_delay_s=30.0,
    can_flip=False,
)
SLO_TTFT_S = 8.0


def requests(
    levels: Sequence[tuple[float, float, float]], prompt: tuple[int, int], output: tuple[int, int]
) -> list[Arrival]:
    """`levels`: seconds, and the requests a second at their beginning and end, on a line between."""
    chance, records, start = random.Random(7), [], 0.0
    for seconds, first, last in levels:
        top, now = max(first, last), 0.0
        while (now := now + chance.expovariate(top)) < seconds:
            if chance.random() * top < first + (last - first) * now / seconds:
                records.append(TraceRecord(start + now, chance.randrange(*prompt), chance.randrange(*output)))
        start += seconds
    return arrivals_of(records)


def deployment(num_prefill: int, num_decode: int) -> Deployment:
    return replace(SMALL, price=PRICE, num_prefill=num_prefill, num_decode=num_decode)


def applied(event: DecisionEvent, role: Role) -> int:
    return event.applied_prefill if role is Role.PREFILL else event.applied_decode


def changes(decisions: Sequence[DecisionEvent], role: Role) -> list[tuple[float, int]]:
    """When the number of replicas changed, and by how many."""
    found = []
    for one, other in pairwise(decisions):
        if applied(one, role) != applied(other, role):
            found.append((other.now, applied(other, role) - applied(one, role)))
    return found


def num_reversals(found: Sequence[tuple[float, int]]) -> int:
    return sum((one[1] > 0) is not (other[1] > 0) for one, other in pairwise(found))


def assert_none_lost(arrivals: Sequence[Arrival], outcome: Outcome) -> None:
    for item, record in zip(arrivals, outcome.records, strict=True):
        assert not record.error
        assert len(record.token_times) == item.record.num_output_tokens


@pytest.fixture(scope="module")
def there_and_back(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Arrival], Outcome, Path]:
    """Load comes over two minutes, stays for one, and goes away."""
    log = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    arrivals = requests(
        [(30, 0.2, 0.2), (120, 0.2, 2.0), (60, 2.0, 2.0), (150, 0.2, 0.2)], (500, 3000), (20, 80)
    )
    simulation = Simulation(deployment(1, 1), scaling=replace(CONFIG, log_file=log))
    return arrivals, simulation.play(arrivals), log


def test_load_that_comes_finds_workers_before_its_slo_is_lost(
    there_and_back: tuple[list[Arrival], Outcome, Path],
) -> None:
    arrivals, outcome, _ = there_and_back
    assert_none_lost(arrivals, outcome)
    alone = Simulation(deployment(1, 1)).play(arrivals)

    def share_in_time(played: Outcome) -> float:
        waits = [record.token_times[0] - record.arrival_s for record in played.records]
        return sum(wait <= SLO_TTFT_S for wait in waits) / len(waits)

    assert share_in_time(outcome) >= 0.95
    assert share_in_time(alone) < 0.85, "the load needs no more workers than there were"
    most = {role: max(applied(event, role) for event in outcome.decisions) for role in Role}
    assert most[Role.PREFILL] > 1 or most[Role.DECODE] > 1


def test_load_that_goes_away_leaves_the_least_and_turns_once(
    there_and_back: tuple[list[Arrival], Outcome, Path],
) -> None:
    _, outcome, _ = there_and_back
    for role in Role:
        found = changes(outcome.decisions, role)
        assert num_reversals(found) <= 1, found
        assert applied(outcome.decisions[-1], role) == 1
    # who was started and left again has served
    names = {site.worker_id for site in outcome.sites if site.num_steps}
    assert len(names) > 2


def test_the_log_of_a_simulation_replays_to_the_same_decisions(
    there_and_back: tuple[list[Arrival], Outcome, Path],
) -> None:
    _, outcome, log = there_and_back
    replayed = replay_file(log)
    assert replayed.num_decisions == len(outcome.decisions) > 100
    assert not replayed.differences
    assert replay_file(log, replace(CONFIG, max_decode_workers=1, max_prefill_workers=1)).differences


def test_a_burst_of_prompts_takes_workers_from_decode_and_their_streams_end(tmp_path: Path) -> None:
    arrivals = requests([(20, 0.2, 0.2), (30, 2.5, 2.5), (60, 0.2, 0.2)], (3000, 6000), (20, 40))
    # too short for replicas, and decode stays as it is meanwhile
    config = replace(CONFIG, can_flip=True, max_workers=6, startup_s=60.0, scale_down_delay_s=300.0)
    log = tmp_path / "decisions.jsonl"
    outcome = Simulation(deployment(1, 5), scaling=replace(config, log_file=log)).play(arrivals)
    assert_none_lost(arrivals, outcome)
    for event in outcome.decisions:
        assert event.decision.prefill.num_replicas + event.decision.decode.num_replicas <= 6
        assert event.applied_prefill + event.applied_decode <= 6
    ordered = [(flip.worker_id, event.now) for event in outcome.decisions for flip in event.decision.flips]
    for (name, now), (again, later) in combinations(ordered, 2):
        assert name != again or later - now >= config.flip_back_delay_s, ordered
    turns = [event.decision.flips[0].role for event in outcome.decisions if event.decision.flips]
    assert sum(one is not two for one, two in pairwise(turns)) <= 2, "two changes of load"
    assert not replay_file(log).differences
    flipped = {flip.worker_id for event in outcome.decisions for flip in event.decision.flips}
    served = {site.worker_id: set[str]() for site in outcome.sites}
    for site in outcome.sites:
        if site.num_steps:
            served[site.worker_id].add(site.role)
    assert flipped
    assert any(roles == {"prefill", "decode"} for roles in served.values()), served
    again = Simulation(deployment(1, 5), scaling=config).play(arrivals)
    assert [event.decision for event in again.decisions] == [event.decision for event in outcome.decisions]


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_pool_that_may_sleep_is_refused_by_name(pool: str) -> None:
    config = replace(CONFIG, **{f"min_{pool}_workers": 0})
    with pytest.raises(ValueError, match=f"min_{pool}_workers"):
        Simulation(deployment(1, 1), scaling=config)
