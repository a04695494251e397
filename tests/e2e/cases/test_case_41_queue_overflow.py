"""Case 41: what the line has no room for is answered at once, and all else completely."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from core import telemetry
from router.api_keys import KeyScope
from tests.e2e import wire
from tests.e2e.client import COMPLETIONS, Client, assert_error_body, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until
from tests.e2e.tenant_keys import add_key

RUNNING, QUEUE = 2, 4
NUM_TOKENS = 640
# of those that fill the line: all others have come before one of them ends, however slow this machine is
NUM_LONG_TOKENS = 4000


@pytest.fixture(scope="module")
def clients(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    keys: Path = tmp_path_factory.mktemp("overflow") / "keys.json"
    made = {name: add_key(keys, name) for name in "ab"} | {"watch": add_key(keys, "w", KeyScope.OPERATOR)}
    settings = {
        "router.tenants.keys_file": str(keys),
        "decode.max_num_seqs": RUNNING,
        "router.max_queue": QUEUE,
        "router.plan": "local",
    }
    profile = Profile("overflow", settings, api_key=made["watch"])
    with fleet.once(profile, fleet.models.path("toy")) as system:
        yield {name: Client(system.port, api_key=key) for name, key in made.items()}


def one(
    clients: dict[str, Client], number: int, num_tokens: int = NUM_TOKENS
) -> tuple[int, float, wire.RawResponse]:
    """Every other one of the other tenant, two of four streamed: status, seconds, response."""
    client = clients["ab"[number % 2]]
    body = {"prompt": f"word {number}", "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    is_stream = number % 4 < 2
    extra = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    start = time.monotonic()
    response = client.post(COMPLETIONS, {**body, **extra})
    seconds = time.monotonic() - start
    if response.status == 200:
        answer = wire.parse_events(response.body)[-1] if is_stream else response.json()
        assert answer["usage"]["completion_tokens"] == num_tokens
    return response.status, seconds, response


def num_missing(client: Client) -> str:
    num_there = scrape(client).value(telemetry.ROUTER_REQUESTS)
    return "" if num_there >= RUNNING + QUEUE else f"{num_there} requests"


def test_forty_at_once_are_served_whole_or_refused_at_once(clients: dict[str, Client]) -> None:
    before = scrape(clients["watch"])
    with ThreadPoolExecutor(RUNNING + QUEUE) as pool:
        first = [pool.submit(one, clients, number, NUM_LONG_TOKENS) for number in range(RUNNING + QUEUE)]
        wait_until(partial(num_missing, clients["watch"]), timeout_s=60)
        answers = at_once([partial(one, clients, number) for number in range(RUNNING + QUEUE, 40)])
        answers += [filled.result() for filled in first]
    served = [answer for answer in answers if answer[0] == 200]
    refused = [answer for answer in answers if answer[0] != 200]
    assert len(served) >= RUNNING + QUEUE
    assert refused
    for _, _, response in refused:
        assert_error_body(response, 429, 503)
        assert int(response.headers["retry-after"]) >= 1
    assert sorted(seconds for _, seconds, _ in refused)[len(refused) // 2] < 1.0
    wait_idle(clients["watch"])
    after = scrape(clients["watch"])
    assert rise(before, after, telemetry.REQUESTS, outcome="rejected") == len(refused)
    assert rise(before, after, telemetry.REQUESTS, outcome="succeeded") == len(served)
    assert rise(before, after, f"{telemetry.TTFT_SECONDS}_count") == len(served), (
        "a refusal is no sample of latency"
    )


def test_steady_overload_leaves_nothing_open_and_the_last_request_is_served(
    clients: dict[str, Client],
) -> None:
    start = time.monotonic()
    answers = at_once([partial(later, clients, start, number) for number in range(100)])
    assert {status for status, _, _ in answers} <= {200, 429, 503}
    assert max(seconds for _, seconds, _ in answers) < 60.0
    wait_idle(clients["watch"])
    assert one(clients, 1)[0] == 200


def later(clients: dict[str, Client], start: float, number: int) -> tuple[int, float, wire.RawResponse]:
    """Twenty a second."""
    time.sleep(max(0.0, start + number / 20 - time.monotonic()))
    return one(clients, number)
