"""Case 53: after aborts the gauges return to zero by themselves, and every request is accounted for."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import pytest

from core import telemetry
from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.scrape import Scrape, rise, scrape, wait_begun, wait_idle, wait_until

FREED_S = 2.0
WATCH_S = 10.0

# A client program that opens streams and waits to be killed.
CLIENT_PROGRAM = """
import socket, sys, time
port, body = int(sys.argv[1]), sys.argv[2].encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\n"
head += b"Content-Length: %d\\r\\n\\r\\n" % len(body)
connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(int(sys.argv[3]))]
for connection in connections:
    connection.sendall(head + body)
print("sent", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.TINY, "toy").client


@pytest.fixture(scope="module")
def endless(fleet: Fleet) -> dict[str, Any]:
    words = prompts.random_ids(fleet.models.bundled, 60, seed=53)
    return {"prompt": words, "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True}


def check_accounts(before: Scrape, after: Scrape, num_requests: int) -> None:
    """Each request was started once and ended once, most by their clients' leaving; nothing fell."""
    assert rise(before, after, telemetry.REQUESTS_STARTED) == num_requests
    assert rise(before, after, telemetry.REQUESTS, outcome="aborted") > num_requests / 2
    assert rise(before, after, telemetry.REQUESTS) == num_requests
    old, new = before.counters(), after.counters()
    for key, value in old.items():
        assert new.get(key, -1.0) >= value, f"{key} fell from {value} to {new.get(key)}"
    assert min(new.values()) >= 0


def watch_zero(client: Client) -> Scrape:
    """Idle within the time, and it stays so without any new traffic."""
    wait_idle(client, FREED_S)
    deadline = time.monotonic() + WATCH_S / 2
    while time.monotonic() < deadline:
        reading = scrape(client)
        assert reading.why_not_idle() == ""
        assert reading.value(telemetry.KV_UTILIZATION) == 0
        time.sleep(0.5)
    return reading


@pytest.mark.parametrize("num_clients", [12])
def test_gauges_return_to_zero_when_all_clients_close_at_once(
    client: Client, endless: dict[str, Any], num_clients: int
) -> None:
    wait_idle(client)
    before = scrape(client)
    with ExitStack() as stack:
        connections = [stack.enter_context(client.open(COMPLETIONS, endless)) for _ in range(num_clients)]
        wait_begun(client, before, num_clients)
        for connection in connections:
            connection.hang_up()
    check_accounts(before, watch_zero(client), num_clients)


def test_gauges_return_to_zero_when_the_clients_process_is_killed(
    client: Client, endless: dict[str, Any]
) -> None:
    wait_idle(client)
    before = scrape(client)
    body = client.encode(endless).decode()
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT_PROGRAM, str(client.port), body, "12"], stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"sent\n"
        wait_begun(client, before, 12)
        program.kill()
    check_accounts(before, watch_zero(client), 12)


def test_refused_requests_are_accounted_for_and_leave_no_trace(
    client: Client, endless: dict[str, Any]
) -> None:
    wait_idle(client)
    before = scrape(client)
    wrong: list[dict[str, Any]] = [
        {"temperature": 9},
        {"max_tokens": -1},
        {"prompt": [prompts.HELLO] * 9000},
        {"n": 0},
        {"x": 1},
    ]
    for extra in wrong:
        assert client.post(COMPLETIONS, {**endless, **extra}).status == 400
    assert client.complete("hi", max_tokens=2, temperature=0, ignore_eos=True).num_tokens == 2
    wait_idle(client, FREED_S)
    after = scrape(client)
    errors = rise(before, after, telemetry.HTTP_RESPONSES)
    assert errors >= len(wrong), "refusals are counted as responses"
    assert rise(before, after, telemetry.REQUESTS_STARTED) == rise(before, after, telemetry.REQUESTS)


def test_the_exposition_is_complete_and_quick_under_two_hundred_streams(
    fleet: Fleet, endless: dict[str, Any]
) -> None:
    client = fleet.system(profiles.SPLIT, "toy").client
    wait_idle(client)
    before = scrape(client)
    body: dict[str, Any] = {**endless, "max_tokens": 2000}
    with ExitStack() as stack:
        connections = at_once([lambda: client.open(COMPLETIONS, body)] * 200)
        for connection in connections:
            stack.enter_context(connection)
        wait_until(lambda: "" if scrape(client).num_running > 16 else "too few run", 20.0)
        readings = [scrape(client) for _ in range(5)]
    times = sorted(reading.seconds for reading in readings)
    assert times[len(times) // 2] < 1.0, f"/metrics took {times} s"
    assert times[-1] < 3.0, f"/metrics took {times} s"
    for reading in readings:
        for family in reading.families.values():
            if family.name.startswith("baton_"):
                assert family.documentation, f"{family.name} has no HELP"
                assert family.type != "unknown", f"{family.name} has no TYPE"
    wait_idle(client, FREED_S + 3.0)
    assert rise(before, scrape(client), telemetry.REQUESTS) == 200


def test_the_next_request_is_served_normally(client: Client) -> None:
    start = time.monotonic()
    assert client.complete("hi", max_tokens=8, temperature=0, ignore_eos=True).num_tokens == 8
    assert time.monotonic() - start < 5.0
