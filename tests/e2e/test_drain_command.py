"""`baton drain WORKER`: streams end there or go on elsewhere, none is lost, another one takes its place."""

from __future__ import annotations

import subprocess
import threading

import pytest

from core import telemetry
from tests.e2e import on_ray, profiles, prompts
from tests.e2e.fleet import Fleet
from tests.e2e.harness import BATON, System
from tests.e2e.killing import Watched, body, check, read_stream, wait_whole
from tests.e2e.readiness import watching_readiness
from tests.e2e.scrape import rise, scrape, wait_until

pytestmark = pytest.mark.timeout(280)

PROMPT = list(prompts.FACTS["The capital of France is"])
NUM_TOKENS = 300
NUM_STREAMS = 4


def baton_drain(system: System, *words: str) -> tuple[int, str]:
    """Exit status and what was printed, on one line."""
    command = [BATON, "drain", *words, "--port", str(system.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def decode_workers(system: System) -> set[str]:
    has_role = scrape(system.client).by_label(telemetry.WORKER_ROLE, "worker_id", role="decode")
    return {worker for worker, has in has_role.items() if has}


def test_streams_of_a_drained_worker_end_or_move_and_another_worker_takes_its_place(
    fleet: Fleet, system: System
) -> None:
    wait_whole(system)
    before = decode_workers(system)
    pids = {process.pid for process in on_ray.workers(system, "decode")}
    reading = scrape(system.client)
    is_under_way = threading.Barrier(NUM_STREAMS + 1)
    watched: list[Watched] = []

    def under_way(_: str) -> None:
        is_under_way.wait()

    def read() -> None:
        watched.append(read_stream(system.client, body(PROMPT, NUM_TOKENS), 10, under_way))

    readers = [threading.Thread(target=read) for _ in range(NUM_STREAMS)]
    for reader in readers:
        reader.start()
    is_under_way.wait(120.0)
    # both workers have some of them: whichever it is, it is left no time to end them
    drained = min(before)
    with watching_readiness(system) as seen:
        code, said = baton_drain(system, drained, "--within", "1")
        assert (code, said) == (0, f"{drained} drains; another one is started in its place")
        for reader in readers:
            reader.join()
    assert (seen.refusals, seen.others) == ([], [])
    assert len(watched) == NUM_STREAMS
    for one in watched:
        check(fleet, PROMPT, one.answer, NUM_TOKENS, None, "a decode worker drained")

    def why_not_replaced() -> str:
        now = decode_workers(system)
        return "" if len(now) == len(before) and drained not in now else f"decode workers {now}"

    took = wait_until(why_not_replaced, 120.0, 0.5)
    print(f"drained: replaced {took:.1f} s after the last stream")
    wait_whole(system)
    assert len({process.pid for process in on_ray.workers(system, "decode")} - pids) == 1
    after = scrape(system.client)
    assert rise(reading, after, telemetry.REQUESTS, outcome="failed") == 0
    assert not after.value(telemetry.KV_LEAK_DIFFERENCE)


def test_what_cannot_be_drained_is_told(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    code, said = baton_drain(system, "decode-none")
    assert (code, "there is no worker 'decode-none'; known are:" in said) == (1, True), said
    has_role = scrape(system.client).by_label(telemetry.WORKER_ROLE, "worker_id", role="prefill")
    (prefill,) = (worker for worker, has in has_role.items() if has)
    code, said = baton_drain(system, prefill)
    assert (code, "is the last prefill worker" in said, "--force" in said) == (1, True, True), said
    code, said = baton_drain(fleet.system(profiles.STD), "decode-0")
    assert (code, "nobody would start another worker" in said) == (1, True), said


@pytest.fixture
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)
