"""Case 32: a prefill worker dies or freezes in mid-flight, one of two and the only one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from core import telemetry
from tests.e2e import on_ray, prompts
from tests.e2e.client import COMPLETIONS
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile, System
from tests.e2e.killing import Watched, body, read_stream, wait_whole
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until

pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]

TWO_READERS = Profile("two-readers", {"router.plan": "remote"}, num_prefill=2)
NUM_LONG, LONG, NUM_RUNNING, NUM_TOKENS = 8, 2000, 4, 1000
PROBE_EVERY_S, PROBED_S = 0.2, 8.0
# seconds in which a stopped process is noticed, and some for a crowded machine
ANSWERED_S = 60.0


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> Iterator[System]:
    started = fleet.system(TWO_READERS, "toy", is_local=False)
    yield started
    for process in on_ray.workers(started, "prefill"):
        process.send_signal(signal.SIGCONT)


def checked(fleet: Fleet, prompt: list[int], watched: Watched, num_tokens: int) -> None:
    ledger = Ledger()
    output = fleet.models.vocabulary.ids_of(watched.answer)
    assert len(output) == num_tokens
    reference = fleet.models.reference(fleet.models.toy())
    check_greedy(reference, prompt, output, ledger, "case 32", watched.answer.logprobs)
    assert not ledger.near_ties, "toys have wide gaps"


def probe(system: System, until: float) -> list[tuple[int, float]]:
    """A small request every 200 ms: (status, seconds) of each."""
    found: list[tuple[int, float]] = []

    def one() -> None:
        start = time.monotonic()
        response = system.client.post(COMPLETIONS, {"prompt": [700, 701], "max_tokens": 2})
        found.append((response.status, time.monotonic() - start))

    threads = []
    while time.monotonic() < until:
        threads.append(threading.Thread(target=one))
        threads[-1].start()
        time.sleep(PROBE_EVERY_S)
    for thread in threads:
        thread.join(60.0)
    assert len(found) == len(threads), "a probe hangs"
    return found


def run(fleet: Fleet, system: System, seed: int, act: Callable[[], object]) -> None:
    """Four streams decode and eight long prompts are read when `act` is done; all must be whole."""
    client, models = system.client, fleet.models
    short = [prompts.random_ids(models.bundled, 10, seed * 100 + i) for i in range(NUM_RUNNING)]
    long = [prompts.random_ids(models.bundled, LONG, seed * 100 + 50 + i) for i in range(NUM_LONG)]
    before = scrape(client)
    with ThreadPoolExecutor(NUM_RUNNING + NUM_LONG + 1) as pool:
        running = [pool.submit(read_stream, client, body(ids, NUM_TOKENS)) for ids in short]
        wait_until(
            lambda: "" if rise(before, scrape(client), telemetry.GENERATED_TOKENS) > 40 else "none decodes",
            30.0,
        )
        reading = [pool.submit(read_stream, client, body(ids, 8)) for ids in long]
        wait_until(
            lambda: "" if rise(before, scrape(client), telemetry.REQUESTS_STARTED) >= 12 else "too few",
            30.0,
            0.02,
        )
        start = time.monotonic()
        act()
        probes = pool.submit(probe, system, start + PROBED_S)
        for ids, done in zip(long, reading, strict=True):
            checked(fleet, ids, done.result(), 8)
        assert time.monotonic() - start < ANSWERED_S
        for ids, done in zip(short, running, strict=True):
            checked(fleet, ids, done.result(), NUM_TOKENS)
            stalls = done.result().answer.usage["baton"]["prompts"][0]["stalls"]  # type: ignore[index]
            assert "resume" not in {stall["cause"] for stall in stalls}, "a stream that decoded was touched"
        statuses = [status for status, _ in probes.result()]
    assert statuses.count(200) >= len(statuses) - 1, statuses


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_with_one_of_two_gone_every_answer_is_whole(
    fleet: Fleet, system: System, how: signal.Signals
) -> None:
    wait_whole(system)
    victim = on_ray.workers(system, "prefill")[0]
    run(fleet, system, int(how), lambda: victim.send_signal(how))
    wake(victim)
    recovered(fleet, system)


def test_without_any_prefill_worker_decode_reads_prompts_and_the_service_says_so(
    fleet: Fleet, system: System
) -> None:
    wait_whole(system)
    victims = on_ray.workers(system, "prefill")

    def stop_all() -> None:
        for victim in victims:
            victim.send_signal(signal.SIGSTOP)

    run(fleet, system, 77, stop_all)
    for victim in victims:
        wake(victim)
    recovered(fleet, system)


def wake(process: psutil.Process) -> None:
    if process.is_running():
        process.send_signal(signal.SIGCONT)


def recovered(fleet: Fleet, system: System) -> None:
    """All there again, nothing held, and prompts are handed over as before; who slept wrote nowhere."""
    wait_whole(system)
    before = scrape(system.client)
    for seed in range(4):
        ids = prompts.random_ids(fleet.models.bundled, 300, 32_000 + seed + int(time.monotonic() * 10))
        checked(fleet, ids, read_stream(system.client, body(ids, 10)), 10)
    wait_idle(system.client)
    assert rise(before, scrape(system.client), telemetry.KV_TRANSFER_BYTES) > 0
