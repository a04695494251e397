"""Case 28: in a pool too small for all, sequences are preempted and come back with the same tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.answers import Answer
from tests.e2e.checks import assert_same, survives
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.scrape import rise, scrape, wait_idle

pytestmark = pytest.mark.side_by_side

NUM_TOKENS = 150
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 28},
    "penalised": {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "with logprobs": {"temperature": 0, "logprobs": 2},
}
ON_MODELS = pytest.mark.parametrize(
    ("model", "rounds"), [("toy", 20), pytest.param("smollm2", 4, marks=pytest.mark.slow)]
)


def tiny(fleet: Fleet, model: str) -> System:
    return fleet.system(profiles.TINY, model)


def ask(client: Client, ids: Sequence[int], settings: dict[str, Any]) -> Answer:
    return client.stream_completion(ids, max_tokens=NUM_TOKENS, ignore_eos=True, **settings)


@pytest.mark.parametrize("kind", SETTINGS)
@ON_MODELS
def test_four_streams_in_a_tiny_pool_equal_their_solo_runs(
    fleet: Fleet, model: str, rounds: int, kind: str
) -> None:
    system, settings = tiny(fleet, model), SETTINGS[kind]
    client = system.client
    batch = prompts.prompts_of_lengths(fleet.models.bundled, [60] * 4, seed=28)
    solo = [ask(client, ids, settings) for ids in batch]
    wait_idle(client)
    before = scrape(client)
    rounds = rounds if kind == "greedy" else rounds // 4
    for turn in range(rounds):
        answers = at_once([partial(ask, client, ids, settings) for ids in batch])
        for i, (alone, together) in enumerate(zip(solo, answers, strict=True)):
            assert together.num_tokens == NUM_TOKENS
            assert together.num_cached_tokens <= 60, "recomputed tokens are no cache hits"
            assert_same(alone, together, f"{kind}, round {turn}, stream {i}")
    wait_idle(client)
    after = scrape(client)
    assert rise(before, after, telemetry.PREEMPTIONS) > 0, "the pool was not too small"
    assert rise(before, after, telemetry.GENERATED_TOKENS) == rounds * 4 * NUM_TOKENS
    hits = rise(before, after, telemetry.PREFIX_HIT_TOKENS)
    assert hits <= rise(before, after, telemetry.PREFIX_QUERY_TOKENS)


@ON_MODELS
def test_a_request_that_can_never_fit_is_refused_and_its_neighbour_completes(
    fleet: Fleet, model: str, rounds: int
) -> None:
    del rounds
    system = tiny(fleet, model)
    client = system.client
    small = prompts.random_ids(fleet.models.bundled, 60, seed=281)
    body = {"prompt": [prompts.HELLO] * 380, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    alone = ask(client, small, SETTINGS["greedy"])

    def impossible() -> None:
        for stream in (False, True):
            start = time.monotonic()
            response = client.post(COMPLETIONS, {**body, "stream": stream})
            assert time.monotonic() - start < 10.0
            assert response.status == 400, response.body
            assert response.json()["error"]["message"]

    with survives(system):
        impossible()
        beside, _ = at_once([lambda: ask(client, small, SETTINGS["greedy"]), impossible])
    assert beside is not None
    assert_same(alone, beside, "beside an impossible one")
    wait_idle(client)


@ON_MODELS
def test_a_request_that_fits_only_alone_completes_beside_others(
    fleet: Fleet, model: str, rounds: int
) -> None:
    del rounds
    client = tiny(fleet, model).client
    large = prompts.random_ids(fleet.models.bundled, 250, seed=282)
    small = prompts.prompts_of_lengths(fleet.models.bundled, [40, 50], seed=283)
    alone = client.stream_completion(large, max_tokens=100, ignore_eos=True, temperature=0)
    together = at_once(
        [
            lambda: client.stream_completion(large, max_tokens=100, ignore_eos=True, temperature=0),
            *(partial(ask, client, ids, SETTINGS["greedy"]) for ids in small),
        ]
    )
    assert_same(alone, together[0], "the large one beside two others")
    wait_idle(client)
