"""Acceptance, kills: workers die at several moments under several streams; no token is lost or repeated."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import psutil
import pytest

from tests.e2e import on_ray, profiles, prompts
from tests.e2e.client import at_once
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.killing import body, check, read_stream, wait_whole
from tests.e2e.reference import Ledger
from tests.e2e.seeded import Settings

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 100
SETTINGS = [
    None,
    Settings(0.9, 0.9, seed=1),
    None,
    Settings(0.9, 0.9, seed=2),
    None,
    Settings(0.9, 0.9, seed=3),
]


def kill_later(processes: list[psutil.Process], after_s: float) -> threading.Timer:
    timer = threading.Timer(after_s, random.Random(after_s).choice(processes).kill)
    timer.start()
    return timer


def run_round(
    fleet: Fleet,
    system: System,
    batch: list[list[int]],
    victims: list[psutil.Process],
    after_s: float,
    where: str,
) -> tuple[Ledger, float]:
    """All prompts as streams at once, one of the victims killed meanwhile; tokens checked, longest pause."""
    timer = kill_later(victims, after_s)
    jobs = [
        partial(read_stream, system.client, body(ids, NUM_TOKENS, settings))
        for ids, settings in zip(batch, SETTINGS, strict=False)
    ]
    watched = at_once(jobs)
    timer.join()
    total = Ledger()
    for ids, settings, stream in zip(batch, SETTINGS, watched, strict=False):
        ledger = check(fleet, ids, stream.answer, NUM_TOKENS, settings, where)
        total.num_tokens += ledger.num_tokens
        total.num_prompts += 1
        total.near_ties += ledger.near_ties
        total.max_error = max(total.max_error, ledger.max_error)
    return total, max(stream.longest_pause_s for stream in watched)


@pytest.mark.parametrize("after_s", [0.2, 0.8, 1.7, 2.9])
def test_six_streams_survive_the_death_of_a_decode_worker(
    fleet: Fleet, report: Report, after_s: float
) -> None:
    system = fleet.system(profiles.PAIR, is_local=False)
    wait_whole(system)
    batch = prompts.prompts_of_lengths(
        fleet.models.bundled, [5, 17, 33, 64, 100, 150], seed=int(after_s * 10)
    )
    victims = on_ray.workers(system, "decode")
    ledger, pause_s = run_round(fleet, system, batch, victims, after_s, f"decode killed after {after_s} s")
    report(
        "g",
        f"decode killed after {after_s} s, 6 streams, a second worker",
        f"{ledger}; pause {pause_s:.1f} s",
    )


@pytest.mark.parametrize("after_s", [0.3, 1.1, 2.3])
def test_long_prompts_survive_the_death_of_the_prefill_worker(
    fleet: Fleet, report: Report, after_s: float
) -> None:
    system = fleet.system(profiles.PAIR, is_local=False)
    wait_whole(system)
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [400, 800, 1200], seed=100 + int(after_s * 10))
    victims = on_ray.workers(system, "prefill")
    ledger, pause_s = run_round(fleet, system, batch, victims, after_s, f"prefill killed after {after_s} s")
    report("g", f"prefill killed after {after_s} s, 3 long prompts", f"{ledger}; pause {pause_s:.1f} s")


def test_a_single_decode_worker_comes_back_in_time(fleet: Fleet, report: Report) -> None:
    system = fleet.system(profiles.SPLIT, is_local=False)
    for after_s in (0.5, 2.0):
        wait_whole(system)
        batch = prompts.prompts_of_lengths(fleet.models.bundled, [20, 40, 60], seed=200 + int(after_s * 10))
        victims = on_ray.workers(system, "decode")
        ledger, pause_s = run_round(fleet, system, batch, victims, after_s, "the only decode worker killed")
        report("g", f"the only decode worker killed after {after_s} s", f"{ledger}; pause {pause_s:.1f} s")


def test_nobody_notices_repeated_deaths_of_the_registry(fleet: Fleet, report: Report) -> None:
    system = fleet.system(profiles.SPLIT, is_local=False)
    wait_whole(system)
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [20, 40, 60], seed=300)
    pauses = []
    for _ in range(3):
        ledger, pause_s = run_round(fleet, system, batch, [on_ray.registry(system)], 0.5, "registry killed")
        pauses.append(pause_s)
        time.sleep(2.0)
    report("g", "registry killed three times under 3 streams", f"{ledger}; pause {max(pauses):.1f} s")
