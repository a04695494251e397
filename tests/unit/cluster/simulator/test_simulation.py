"""A simulation ends, repeats itself, loses nothing, and knows what its parts know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.loadtest.record import Outcome as Kind
from cluster.loadtest.traces import TraceRecord
from cluster.simulator.simulation import Outcome, Simulation
from cluster.simulator.teller import Way
from cluster.simulator.workload import arrivals_of
from core.ids import Role
from core.worker_status import WorkerStatus
from router.config import PlanSetting, PolicySetting, RouterConfig
from tests.unit.cluster.simulator.world import conversations, deployment, played


def _log(outcome: Outcome) -> list[Any]:
    return [
        (r.number, r.token_times, r.plan, r.reader, r.decoder, r.num_cached_tokens, r.ended_s, r.error)
        for r in outcome.records
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_prefill": 0, "num_decode": 3},
        {"router": RouterConfig(plan=PlanSetting.REMOTE, pull_timeout_s=0.0)},
        {"router": RouterConfig(policy=PolicySetting.ROUND_ROBIN, pull_timeout_s=0.0)},
        {"num_blocks": 120},
    ],
    ids=["mixed", "aggregated", "remote", "round robin", "few blocks"],
)
def test_each_request_ends_with_the_tokens_it_asked_for(changes: dict[str, Any]) -> None:
    arrivals = conversations(30)
    outcome = played(arrivals, **changes)  # `play` itself asserts that nothing is left behind
    for item, record in zip(arrivals, outcome.records, strict=True):
        result = record.result()
        assert result.outcome is Kind.COMPLETED
        assert result.num_output_tokens == item.record.num_output_tokens
        assert result.event_times_s == tuple(sorted(result.event_times_s))
        assert result.due_s < result.event_times_s[0]
        assert result.event_times_s[-1] <= result.ended_s


def test_the_same_seed_plays_the_same_and_another_one_does_not() -> None:
    arrivals = conversations(40, rate=12.0)
    by_chance = RouterConfig(policy=PolicySetting.POWER_OF_TWO, pull_timeout_s=0.0)
    first, again, other = (played(arrivals, seed=seed, router=by_chance) for seed in (0, 0, 5))
    assert _log(first) == _log(again)
    assert first.sites == again.sites
    assert _log(first) != _log(other)


@pytest.mark.parametrize("num_prefill", [2, 0])
def test_leaping_over_steps_that_repeat_gives_the_events_of_stepping(num_prefill: int) -> None:
    arrivals = conversations(50, rate=8.0)
    leaping = played(arrivals, num_prefill=num_prefill)
    stepping = played(arrivals, num_prefill=num_prefill, is_leaping=False)
    assert _log(leaping) == _log(stepping)
    for one, other in zip(leaping.sites, stepping.sites, strict=True):
        assert replace(one, busy_s=0.0) == replace(other, busy_s=0.0)
        assert one.busy_s == pytest.approx(other.busy_s)
    assert leaping.num_events < stepping.num_events


def test_a_request_that_cannot_be_answered_in_time_ends_by_its_deadline() -> None:
    arrivals = conversations(40, rate=1000.0)
    outcome = played(arrivals, num_prefill=1, num_decode=1, timeout_s=1.5)
    late = [record for record in outcome.records if record.error]
    assert {record.error for record in late} == {"deadline_exceeded"}
    assert all(record.ended_s <= record.arrival_s + 1.5 + 1e-9 for record in outcome.records)
    assert len(late) < len(outcome.records)


def test_a_prompt_larger_than_every_pool_is_refused_as_too_long() -> None:
    outcome = played(conversations(30), num_blocks=72)
    errors = {record.error for record in outcome.records}
    assert errors == {"", "context_length_exceeded"}


def test_lost_late_and_unordered_events_cost_hits_but_nothing_else() -> None:
    arrivals = conversations(60, rate=6.0)
    perfect = played(arrivals)
    faulty = played(arrivals, way=Way(delay_s=0.2, jitter_s=0.4, loss=0.3))
    assert all(not record.error for record in faulty.records)
    assert perfect.num_pages == 0
    assert faulty.num_pages > 0


def test_what_is_found_cached_is_what_earlier_prompts_have_in_common() -> None:
    arrivals = conversations(40, rate=0.5)
    outcome = played(arrivals, num_prefill=0, num_decode=1, num_blocks=4_000)
    seen: set[int] = set()
    for item, record in zip(arrivals, outcome.records, strict=True):
        num_known = 0
        while num_known < len(item.record.block_ids) and item.record.block_ids[num_known] in seen:
            num_known += 1
        common = min(num_known * 512, item.record.num_prompt_tokens - 1)
        assert record.num_cached_tokens <= common
        assert record.num_cached_tokens > common - 512 - 64
        seen.update(item.record.block_ids)


def test_a_worker_without_work_tells_so_and_not_what_it_had() -> None:
    arrivals = arrivals_of([TraceRecord(at, 700, 3, (0, int(at))) for at in (1.0, 30.0)])
    remotely = RouterConfig(plan=PlanSetting.REMOTE, pull_timeout_s=0.0)
    simulation = Simulation(deployment(router=remotely, num_prefill=1, num_decode=1))
    told: list[WorkerStatus | None] = []

    def look() -> None:
        for role in Role:
            told.extend(entry.status for entry in simulation.fleet.usable(role))

    simulation.events.at(20.0, look)
    outcome = simulation.play(arrivals)
    assert [record.plan for record in outcome.records] == ["remote", "remote"]
    assert len(told) == 2
    for status in told:
        assert status is not None
        assert (status.num_waiting, status.num_waiting_tokens, status.num_held_blocks) == (0, 0, 0)
