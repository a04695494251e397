"""On Ray, when no decode worker is left: a prefill worker takes over within a second, no token is lost, the
service says what it lacks, and the stand-in goes home when the pool is back.
"""

from __future__ import annotations

import time

import pytest

from core import telemetry
from tests.e2e import on_ray, profiles, prompts, wire
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.killing import body, check, read_stream, wait_whole
from tests.e2e.readiness import watching_readiness
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 300
PROMPT = list(prompts.FACTS["The capital of France is"])


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)


def kill_all_decode(system: System) -> None:
    for process in on_ray.workers(system, "decode"):
        process.kill()


def test_a_prefill_worker_goes_on_with_the_streams_of_the_killed_decode_workers_and_then_goes_home(
    fleet: Fleet, system: System
) -> None:
    wait_whole(system)
    before = scrape(system.client)
    with watching_readiness(system) as seen:
        killed_at = time.monotonic()
        watched = read_stream(system.client, body(PROMPT, NUM_TOKENS), 10, lambda _: kill_all_decode(system))
    check(fleet, PROMPT, watched.answer, NUM_TOKENS, None, "all decode workers killed")
    assert not seen.refusals
    assert not seen.others
    assert ("prefill",) in seen.degraded, f"{seen.degraded} in {time.monotonic() - killed_at:.1f} s"
    after = scrape(system.client)
    assert rise(before, after, telemetry.ROLE_CHANGES, role="decode", cause="empty_pool") == 1
    took = rise(before, after, f"{telemetry.ROLE_CHANGE_SECONDS}_sum", role="decode")
    print(f"stand-in: change {took * 1e3:.0f} ms, longest pause {watched.longest_pause_s * 1e3:.0f} ms")
    assert took < 1.0
    # a replacement needs ten times as long to load the model
    assert watched.longest_pause_s < 3.0
    wait_whole(system)
    wait_until(
        lambda: (
            ""
            if rise(before, scrape(system.client), telemetry.ROLE_CHANGES, role="prefill", cause="pool_back")
            else "the stand-in is not home"
        ),
        60.0,
    )
    wait_whole(system)
    wait_idle(system.client)
    assert wire.request(system.port, "GET", "/ready").json()["degraded"] == []
