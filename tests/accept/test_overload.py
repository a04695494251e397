"""Acceptance, overload: twice the capacity for five minutes costs no goodput, no truth and no memory."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from tests.e2e import prompts
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.open_loop import OpenLoop, Shape
from tests.e2e.overload import Memory, check_refusals, peak
from tests.e2e.scrape import wait_idle

BUSY = Profile("busy", {"decode.max_num_seqs": 16}, num_decode=2)
SECONDS = 300.0
# arenas and caches of an allocator, not of the service
MAX_GROWTH_MIB = 32.0


@pytest.mark.timeout(1500)
def test_five_minutes_of_twice_the_capacity(fleet: Fleet, report: Report) -> None:
    system = fleet.system(BUSY, is_local=False)
    prompt = partial(prompts.random_ids, fleet.models.bundled, 64)
    load = OpenLoop(system.client, Shape(prompt, max_tokens=32, timeout_s=10.0), seed=8)
    load.run(1.0, 10.0)  # warm
    capacity, best = peak(load, 1.0, 20.0)
    memory = Memory(system)
    watcher = threading.Thread(target=memory.watch)
    watcher.start()
    outcome = load.run(2 * capacity, SECONDS)
    memory.end()
    watcher.join()
    wait_idle(system.client, 60.0)
    refusals = [call.seconds for call in outcome.calls if call.status in (429, 503)]
    grown = memory.growth()
    worst = max(grown, key=lambda name: grown[name])
    report("h", "SmolLM2, 1 + 2 workers, peak of goodput", f"{best:.2f}/s")
    report("h", "twice that for 300 s", outcome)
    report("h", "refused after", f"p50 {np.median(refusals):.2f} s, p99 {np.quantile(refusals, 0.99):.2f} s")
    report("h", "most memory gained", f"{grown[worst]:.1f} MiB, {worst}")
    check_refusals(outcome, max_late=0.05)
    assert outcome.goodput >= 0.9 * best, f"{outcome}, peak {best:.2f}"
    assert grown[worst] < MAX_GROWTH_MIB, grown
