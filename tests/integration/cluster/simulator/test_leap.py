"""A thousand requests: steps that are taken at once leave the event log of stepping."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.simulator.fleet import Fleet
from cluster.simulator.simulation import Simulation
from core.ids import WorkerRef
from core.jobs import WatchEvent
from tests.unit.cluster.simulator.world import conversations, deployment

NUM_REQUESTS = 1_000


def event_log(monkeypatch: pytest.MonkeyPatch, is_leaping: bool) -> tuple[list[Any], int]:
    """What was heard of the workers, message by message, what became of each request, token by token, and
    what each worker did; and the events that it took.
    """
    log: list[Any] = []
    hear = Fleet.hear

    def noted(fleet: Fleet, ref: WorkerRef, event: WatchEvent) -> None:
        log.append((fleet._events.now(), ref.worker_id, event))
        hear(fleet, ref, event)

    with monkeypatch.context() as patched:
        patched.setattr(Fleet, "hear", noted)
        simulation = Simulation(deployment(is_leaping=is_leaping), seed=1)
        outcome = simulation.play(conversations(NUM_REQUESTS, rate=10.0))
    for record in outcome.records:
        log.append((record.number, record.plan, record.reader, record.decoder, record.num_attempts))
        log.append(
            (record.held_s, record.num_cached_tokens, record.token_times, record.ended_s, record.error)
        )
    log += [
        (site.worker_id, site.num_steps, site.num_query_tokens, site.num_hit_tokens) for site in outcome.sites
    ]
    return log, outcome.num_events


@pytest.mark.timeout(600)  # ten seconds of processor, on however busy a machine
def test_a_thousand_requests_have_the_event_log_of_stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    leaping, num_leaping = event_log(monkeypatch, is_leaping=True)
    stepping, num_stepping = event_log(monkeypatch, is_leaping=False)
    assert len(leaping) == len(stepping)
    for one, other in zip(leaping, stepping, strict=True):
        assert one == other
    assert num_leaping < 0.9 * num_stepping
