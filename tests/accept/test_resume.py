"""Acceptance, resumes: a stream that loses its decode worker goes on from the KV that is left elsewhere."""

from __future__ import annotations

import pytest

from core import telemetry
from tests.e2e import on_ray, profiles, prompts
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.killing import body, check, read_stream, wait_whole
from tests.e2e.scrape import Scrape, rise, scrape

pytestmark = pytest.mark.timeout(600)

BLOCK = 16
NUM_PROMPT_TOKENS = 1000
NUM_TOKENS = 120
NUM_KILLS = 4


def resumed(before: Scrape, after: Scrape, kind: str) -> int:
    return int(rise(before, after, telemetry.RESUMED_TOKENS, kind=kind))


def test_a_long_prompt_is_not_read_again_when_its_decode_worker_dies(fleet: Fleet, report: Report) -> None:
    system = fleet.system(profiles.PAIR, is_local=False)
    told: list[str] = []
    for number in range(NUM_KILLS):
        wait_whole(system)
        ids = prompts.random_ids(fleet.models.bundled, NUM_PROMPT_TOKENS, seed=51_000 + number)
        before = scrape(system.client)
        watched = read_stream(
            system.client,
            body(ids, NUM_TOKENS),
            20,
            lambda _: on_ray.busiest(on_ray.workers(system, "decode"), 0.2).kill(),
        )
        check(fleet, ids, watched.answer, NUM_TOKENS, None, "decode killed")
        after = scrape(system.client)
        if rise(before, after, telemetry.RETRIES) == 0:
            continue  # beside other work on the machine the idle worker may have been the busier one
        cached, recomputed = resumed(before, after, "cached"), resumed(before, after, "recomputed")
        assert cached >= NUM_PROMPT_TOKENS // BLOCK * BLOCK, "the prompt is read again"
        assert recomputed <= NUM_TOKENS + BLOCK
        assert watched.answer.usage is not None
        (prompt,) = watched.answer.usage["baton"]["prompts"]
        (stall,) = [stall for stall in prompt["stalls"] if stall["cause"] == "resume"]
        plan = prompt["plan"]
        told.append(f"{recomputed} of {cached + recomputed} tokens ({plan}), {stall['ms'] / 1e3:.2f} s")
    assert told, "no kill has hit a stream"
    report(
        "g", f"decode killed in an answer to {NUM_PROMPT_TOKENS} tokens: read again, pause", "; ".join(told)
    )
