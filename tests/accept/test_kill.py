"""Acceptance, kills: workers die at several moments under several streams; no token is lost or repeated."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
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

NUM_TOKENS = 300
SETTINGS = [
    None,
    Settings(0.9, 0.9, seed=1),
    None,
    Settings(0.9, 0.9, seed=2),
    None,
    Settings(0.9, 0.9, seed=3),
]


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one kill under several streams."""

    ledger: Ledger
    num_open: int
    num_unread: int
    longest_pause_s: float

    def __str__(self) -> str:
        return f"{self.num_open} streams open then, longest pause {self.longest_pause_s:.1f} s; {self.ledger}"


def run_round(
    fleet: Fleet, system: System, batch: list[list[int]], victim: psutil.Process, after_s: float
) -> Round:
    """All prompts as streams at once, the victim killed meanwhile; every token is checked.

    `num_open` streams had not ended when it was killed, `num_unread` had not even begun.
    """
    killed_at: list[float] = []

    def kill() -> None:
        victim.kill()
        killed_at.append(time.monotonic())

    timer = threading.Timer(after_s, kill)
    timer.start()
    pairs = list(zip(batch, SETTINGS, strict=False))
    watched = at_once(
        [partial(read_stream, system.client, body(ids, NUM_TOKENS, settings)) for ids, settings in pairs]
    )
    timer.join()
    total = Ledger()
    for (ids, settings), stream in zip(pairs, watched, strict=True):
        total.add(check(fleet, ids, stream.answer, NUM_TOKENS, settings, f"killed after {after_s} s"))
    return Round(
        total,
        sum(stream.last_at > killed_at[0] for stream in watched),
        sum(stream.first_at > killed_at[0] for stream in watched),
        max(stream.longest_pause_s for stream in watched),
    )


@pytest.mark.parametrize("after_s", [0.3, 1.0, 2.0])
def test_six_streams_survive_the_death_of_a_decode_worker(
    fleet: Fleet, report: Report, after_s: float
) -> None:
    system = fleet.system(profiles.PAIR, is_local=False)
    wait_whole(system)
    lengths = [5, 17, 33, 64, 100, 150]
    batch = prompts.prompts_of_lengths(fleet.models.bundled, lengths, seed=int(after_s * 10))
    victim = random.Random(after_s).choice(on_ray.workers(system, "decode"))
    outcome = run_round(fleet, system, batch, victim, after_s)
    assert outcome.num_open > 0, "all streams had ended before the kill"
    report("g", f"one of two decode workers killed after {after_s} s, 6 streams", outcome)


@pytest.mark.parametrize("after_s", [0.3, 0.8])
def test_long_prompts_survive_the_death_of_the_prefill_worker(
    fleet: Fleet, report: Report, after_s: float
) -> None:
    system = fleet.system(profiles.PAIR, is_local=False)
    wait_whole(system)
    lengths = [1200, 1400, 1600]
    batch = prompts.prompts_of_lengths(fleet.models.bundled, lengths, seed=100 + int(after_s * 10))
    (victim,) = on_ray.workers(system, "prefill")
    outcome = run_round(fleet, system, batch, victim, after_s)
    assert outcome.num_unread > 0, "all prompts had been read before the kill"
    report("g", f"prefill killed after {after_s} s, {outcome.num_unread} of 3 prompts unread", outcome)


def test_the_only_decode_worker_comes_back_in_time(fleet: Fleet, report: Report) -> None:
    system = fleet.system(profiles.SPLIT, is_local=False)
    for after_s in (0.3, 1.2):
        wait_whole(system)
        batch = prompts.prompts_of_lengths(fleet.models.bundled, [20, 40, 60], seed=200 + int(after_s * 10))
        (victim,) = on_ray.workers(system, "decode")
        outcome = run_round(fleet, system, batch, victim, after_s)
        assert outcome.num_open == 3, "streams had ended before the kill"
        report("g", f"the only decode worker killed after {after_s} s", outcome)


def test_nobody_notices_repeated_deaths_of_the_registry(fleet: Fleet, report: Report) -> None:
    system = fleet.system(profiles.SPLIT, is_local=False)
    wait_whole(system)
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [20, 40, 60], seed=300)
    pauses = []
    for _ in range(3):
        outcome = run_round(fleet, system, batch, on_ray.registry(system), 0.5)
        pauses.append(outcome.longest_pause_s)
        time.sleep(2.0)
    assert max(pauses) < 1.0
    report("g", "registry killed three times under 3 streams", f"longest pause {max(pauses):.2f} s")
