"""Case 57: health and readiness tell the truth on Ray: a role is missing, none is left, all sleep, busy."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.e2e import on_ray, profiles, prompts
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.killing import RECOVERY_S, body, read_stream, wait_whole
from tests.e2e.readiness import watching_readiness
from tests.e2e.scrape import wait_until

pytestmark = pytest.mark.timeout(280)

PROMPT = list(prompts.FACTS["The capital of France is"])
# ten seconds; the rest is for a crowded machine
LONGEST_LIE_S = 13.0


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)


def workers(system: System) -> list[psutil.Process]:
    return [*on_ray.workers(system, "prefill"), *on_ray.workers(system, "decode")]


@contextmanager
def asleep(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


def test_neither_full_load_nor_a_long_prompt_is_a_failure(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    ids = prompts.random_ids(fleet.models.bundled, 1700, seed=57)
    with watching_readiness(system) as seen:
        requests = [body(PROMPT, 60)] * 6 + [body(ids, 2)] * 2
        readers = [threading.Thread(target=read_stream, args=(system.client, one)) for one in requests]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert (seen.refusals, seen.others) == ([], [])
    assert seen.degraded == [()]
    assert len(seen.said) > 10


def test_workers_that_all_sleep_are_not_ready_until_they_wake(system: System) -> None:
    wait_whole(system)
    with watching_readiness(system) as seen:
        stopped_at = time.monotonic()
        with asleep(workers(system)):
            refused = seen.first(503, stopped_at, 30.0)
            assert refused.at - stopped_at < LONGEST_LIE_S
            wait_until(lambda: "" if "decode" in seen.said[-1].degraded else f"{seen.said[-1]}", 5.0)
        woken_at = time.monotonic()
        seen.first(200, woken_at, RECOVERY_S)
        assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
    assert seen.others == [], "the router itself is alive all the time, and the model is still the same"
    wait_whole(system)


def test_what_is_missing_is_named_and_ready_is_said_when_the_first_answer_is_possible(system: System) -> None:
    wait_whole(system)
    with watching_readiness(system) as seen:
        killed_at = time.monotonic()
        for process in on_ray.workers(system, "prefill"):
            process.kill()
        wait_until(lambda: "" if ("prefill",) in seen.degraded else f"{seen.degraded}", LONGEST_LIE_S)
        assert seen.refusals == [], "decode reads prompts itself"
        assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
        killed_at = time.monotonic()
        for process in workers(system):
            process.kill()
        refused = seen.first(503, killed_at, 30.0)
        assert refused.at - killed_at < LONGEST_LIE_S
        assert "decode" in refused.degraded
        seen.first(200, refused.at, RECOVERY_S)
        assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
        wait_whole(system)
        wait_until(lambda: "" if seen.said[-1].degraded == () else f"{seen.said[-1]}", 30.0)
    assert seen.others == []
