"""Acceptance, overload: twice the capacity for five minutes costs no goodput, no truth and no memory."""

from __future__ import annotations

from functools import partial

import pytest

from tests.e2e import prompts
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.open_loop import OpenLoop, Shape
from tests.e2e.overload import Memory, check_refusals, peak, refused_after
from tests.e2e.scrape import wait_idle

# pages of the KV pool come into memory as blocks are first used: all of a small pool's before it is measured
BUSY = Profile(
    "busy", {"decode.max_num_seqs": 16, "engine.kv_cache_bytes": 128 << 20}, num_decode=2, is_local=False
)
SECONDS = 300.0
# as long as a request may take
SETTLE_S = 10.0
# arenas and caches of an allocator, not of the service
MAX_GROWTH_MIB = 32.0


@pytest.mark.timeout(1500)
def test_five_minutes_of_twice_the_capacity(fleet: Fleet, report: Report) -> None:
    system = fleet.system(BUSY, is_local=False)
    prompt = partial(prompts.random_ids, fleet.models.bundled, 64)
    load = OpenLoop(system.client, Shape(prompt, max_tokens=32, timeout_s=SETTLE_S), seed=8)
    load.run(1.0, 10.0, 0.0)  # warm
    best = peak(load, 1.0, 30.0, SETTLE_S)
    with Memory(system) as memory:
        outcome = load.run(2 * best, SECONDS, SETTLE_S)
    wait_idle(system.client, 60.0)
    grown = memory.growth()
    worst, *others = sorted(grown, key=lambda name: -grown[name])
    report("h", "SmolLM2, 1 + 2 workers, peak of goodput", f"{best:.2f}/s")
    report("h", f"twice that for {SECONDS:.0f} s", outcome)
    report("h", "refused after", refused_after(outcome))
    for name in (worst, *others[:4]):
        report("h", "memory gained", f"{grown[name]:.1f} MiB, {name}")
    check_refusals(outcome, max_late=0.05)
    assert outcome.goodput >= 0.9 * best, f"{outcome}, peak {best:.2f}"
    assert grown[worst] < MAX_GROWTH_MIB, grown
