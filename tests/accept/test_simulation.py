"""Acceptance, faults: twenty thousand seeds of the simulated system, on all cores."""

from __future__ import annotations

import logging
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.e2e.fixtures import Report
from tests.simulation.chain_model import Oracle
from tests.simulation.scenario import scenario_of
from tests.simulation.world import play

NUM_SEEDS = 20_000
SEEDS_PER_PART = 250


def play_part(first: int) -> tuple[dict[int, list[str]], Counter[str]]:
    """What is broken, by seed, and counts."""
    logging.disable(logging.ERROR)
    oracle, broken, counts = Oracle(), {}, Counter[str]()
    for seed in range(first, first + SEEDS_PER_PART):
        try:
            report = play(scenario_of(seed), oracle)
        except Exception as error:  # noqa: BLE001 - the seed is to be named, and the others are to be played
            broken[seed] = [repr(error)]
            continue
        counts.update(complete=report.num_complete, errors=report.num_errors, troubles=report.num_troubles)
        if report.broken:
            broken[seed] = report.broken
    return broken, counts


@pytest.mark.timeout(5400)
def test_twenty_thousand_seeds_break_no_promise(report: Report) -> None:
    broken: dict[int, list[str]] = {}
    counts = Counter[str]()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        for found, counted in processes.map(play_part, range(0, NUM_SEEDS, SEEDS_PER_PART)):
            broken |= found
            counts += counted
    assert not broken
    assert counts["complete"] > 5 * counts["errors"]
    assert counts["troubles"] > NUM_SEEDS
    whole = f"{counts['complete']} streams whole, {counts['errors']} ended by a typed error in time"
    report("h", f"{NUM_SEEDS} simulated seeds, {counts['troubles']} troubles", whole)
