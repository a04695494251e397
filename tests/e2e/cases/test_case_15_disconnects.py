"""Case 15: a client that goes away frees everything it used, on both workers, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.scrape import Scrape, rise, scrape, wait_begun, wait_idle, wait_until
from tests.e2e.wire import RawConnection

FREED_S = 2.0
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
ROUNDS = 10
Close = Callable[[RawConnection], None]
CLOSES: dict[str, Close] = {"FIN": RawConnection.hang_up, "RST": RawConnection.reset}


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.SPLIT)


def num_cancelled(before: Scrape, after: Scrape) -> float:
    return rise(before, after, telemetry.REQUESTS, outcome="aborted")


def read_events(connection: RawConnection, count: int) -> None:
    response = connection.read_head()
    assert response.status == 200
    seen = 0
    for piece in connection.pieces(response):
        seen += piece.count(b"data: ")
        if seen >= count:
            return
    raise AssertionError(f"the stream ended after {seen} events: {response.body[-300:]!r}")


def after_third_event(client: Client, close: Close) -> None:
    connection = client.open(COMPLETIONS, {"prompt": "Once upon a time", **ENDLESS, "stream": True})
    read_events(connection, 3)
    close(connection)


def while_unstreamed(client: Client, close: Close) -> None:
    before = scrape(client)
    connection = client.open(COMPLETIONS, {"prompt": "Once upon a time", **ENDLESS})
    wait_begun(client, before, 1)
    close(connection)


def with_four_samples(client: Client, close: Close) -> None:
    body = {"prompt": "Once upon a time", **ENDLESS, "temperature": 1, "n": 4, "stream": True}
    connection = client.open(COMPLETIONS, body)
    read_events(connection, 8)
    close(connection)


@pytest.mark.parametrize("closing", CLOSES)
@pytest.mark.parametrize("way", [after_third_event, while_unstreamed, with_four_samples])
def test_a_close_frees_blocks_and_stops_generation(
    system: System, way: Callable[[Client, Close], None], closing: str
) -> None:
    client = system.client
    wait_idle(client)
    before = scrape(client)
    for _ in range(ROUNDS // 2):
        way(client, CLOSES[closing])
        wait_idle(client, FREED_S)
    after = scrape(client)
    assert num_cancelled(before, after) == ROUNDS // 2
    time.sleep(0.5)
    assert rise(after, scrape(client), telemetry.GENERATED_TOKENS) == 0, "tokens nobody can read"


@pytest.mark.parametrize("closing", CLOSES)
def test_a_close_during_a_long_prefill_frees_the_prefill_worker(
    system: System, models_words: list[int], closing: str
) -> None:
    client = system.client
    wait_idle(client)
    before = scrape(client)

    def is_under_way() -> str:
        return "" if scrape(client).value(telemetry.ROUTER_REQUESTS) else "not there yet"

    for i in range(ROUNDS // 2):
        prompt = [*models_words[i:], *models_words[:i]]
        with client.open(COMPLETIONS, {"prompt": prompt, "max_tokens": 8}) as connection:
            wait_until(is_under_way, 10.0, 0.02)
            time.sleep(0.3)
            CLOSES[closing](connection)
        # a chunk of 512 tokens may have to end first; the whole prompt would take many times as long
        wait_idle(client, FREED_S + 2.0)
    assert num_cancelled(before, scrape(client)) == ROUNDS // 2


@pytest.fixture(scope="module")
def models_words(fleet: Fleet) -> list[int]:
    return prompts.random_ids(fleet.models.bundled, 8000, seed=15)


def test_requests_that_end_normally_are_not_counted_as_cancelled(system: System) -> None:
    client = system.client
    wait_idle(client)
    before = scrape(client)
    for i in range(ROUNDS):
        assert client.complete("Once upon a time", max_tokens=2 + i % 3).num_tokens <= 4
    wait_idle(client, FREED_S)
    after = scrape(client)
    assert num_cancelled(before, after) == 0
    assert rise(before, after, telemetry.REQUESTS) == ROUNDS


@pytest.mark.parametrize("closing", CLOSES)
def test_a_close_while_queued_gives_up_the_place_in_the_queue(fleet: Fleet, closing: str) -> None:
    client = fleet.system(profiles.TINY, "toy").client
    wait_idle(client)
    before = scrape(client)
    words = prompts.random_ids(fleet.models.bundled, 60, seed=16)
    endless = {"prompt": words, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    for _ in range(ROUNDS // 2):
        begin = scrape(client)
        with ExitStack() as stack:
            connections = [
                stack.enter_context(client.open(COMPLETIONS, {**endless, "stream": True})) for _ in range(8)
            ]
            wait_begun(client, begin, 8)
            for connection in reversed(connections):
                CLOSES[closing](connection)
        wait_idle(client, FREED_S)
    closed = num_cancelled(before, scrape(client))
    finished = rise(before, scrape(client), telemetry.REQUESTS) - closed
    assert closed + finished == ROUNDS // 2 * 8
    assert closed >= ROUNDS // 2 * 6, "most were closed long before their end"
    # all of the pool can be used at once
    whole = client.complete(words, max_tokens=300, ignore_eos=True, temperature=0)
    assert whole.num_tokens == 300
