"""SIGSTOP in a running cluster: a decode worker that sleeps is left, wakes up, and disturbs nobody."""

from __future__ import annotations

import signal
import time

import pytest

from core import telemetry
from tests.e2e import on_ray, profiles, prompts
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.killing import body, check, read_stream, wait_whole
from tests.e2e.scrape import rise, scrape

pytestmark = pytest.mark.timeout(280)

PROMPT = list(prompts.FACTS["The capital of France is"])
NUM_TOKENS = 300
# 3 s of silence are noticed; the rest is for a crowded machine
LONGEST_PAUSE_S = 12.0


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)


@pytest.mark.parametrize("asleep_s", [6.0, 1.0])
def test_a_stream_of_a_stopped_decode_worker_goes_on_with_the_same_tokens(
    fleet: Fleet, system: System, asleep_s: float
) -> None:
    """Longer than it takes to notice: another one goes on. Shorter: a pause and nothing else, or the same."""
    stopped = []

    def stop_the_one_that_works(_: str) -> None:
        stopped.append(on_ray.busiest(on_ray.workers(system, "decode"), 0.2))
        stopped[-1].send_signal(signal.SIGSTOP)
        if asleep_s < 3.0:
            time.sleep(asleep_s)
            stopped[-1].send_signal(signal.SIGCONT)

    # beside other work on the machine the idle worker may have been the busier one: then once more
    for _ in range(3):
        wait_whole(system)
        before = scrape(system.client)
        try:
            watched = read_stream(system.client, body(PROMPT, NUM_TOKENS), 10, stop_the_one_that_works)
        finally:
            if stopped[-1].is_running():
                stopped[-1].send_signal(signal.SIGCONT)
        check(fleet, PROMPT, watched.answer, NUM_TOKENS, None, f"decode stopped for {asleep_s} s")
        assert watched.longest_pause_s < LONGEST_PAUSE_S
        has_hit = rise(before, scrape(system.client), telemetry.RETRIES) >= 1 or asleep_s < 3.0
        # the one that woke up holds nothing, and no block is missing
        wait_whole(system)
        if has_hit:
            return
    pytest.fail("no stop has hit the stream")
