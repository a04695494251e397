"""Case 43: priorities: who is higher goes first, equals keep their order, nobody is harmed or starves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import telemetry
from router.api_keys import KeyScope
from tests.e2e.client import COMPLETIONS, Client, assert_error_body, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until
from tests.e2e.tenant_keys import add_key

RUNNING = 2
AGING_S = 1.5


@pytest.fixture(scope="module")
def clients(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Client]]:
    """`a` may ask for the highest priority, `b` may not."""
    keys: Path = tmp_path_factory.mktemp("priorities") / "keys.json"
    made = {name: add_key(keys, name) for name in "ab"} | {"watch": add_key(keys, "w", KeyScope.OPERATOR)}
    settings = {
        "router.tenants.keys_file": str(keys),
        "router.tenants.limits": [{"name": "a", "max_priority": 9}],
        "router.tenants.aging_s": AGING_S,
        "decode.max_num_seqs": RUNNING,
        "router.plan": "local",
    }
    profile = Profile("priorities", settings, api_key=made["watch"])
    with fleet.once(profile, fleet.models.path("toy")) as system:
        yield {name: Client(system.port, api_key=key) for name, key in made.items()}


class Load:
    """Requests of `a`; `ended` is the order in which they were done."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients
        self._before = scrape(clients["watch"])
        self._lock = threading.Lock()
        self.ended: list[str] = []
        self.texts: dict[str, str] = {}

    def one(self, name: str, priority: int, max_tokens: int, after: int = 0) -> None:
        """Sent once `after` others have come and none of them has ended."""
        wait_until(lambda: "" if self._num_come() >= after else "too few have come", 30.0, 0.01)
        body = {"prompt": name, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        response = self._clients["a"].post(COMPLETIONS, body, {"x-priority": str(priority)})
        assert response.status == 200, response.body
        assert response.json()["usage"]["completion_tokens"] == max_tokens
        with self._lock:
            self.ended.append(name)
            self.texts[name] = response.json()["choices"][0]["text"]

    def _num_come(self) -> float:
        now = scrape(self._clients["watch"])
        here = now.value(telemetry.ROUTER_REQUESTS)
        return min(rise(self._before, now, telemetry.REQUESTS_STARTED), here)


def test_a_high_one_goes_before_those_that_wait_and_the_low_ones_lose_nothing(
    clients: dict[str, Client],
) -> None:
    wait_idle(clients["watch"])
    load = Load(clients)
    low = [f"low {number}" for number in range(6)]
    jobs = [lambda name=name: load.one(name, 0, 1500) for name in low[:RUNNING]]  # type: ignore[misc]
    jobs += [lambda name=name: load.one(name, 0, 300, after=RUNNING) for name in low[RUNNING:]]  # type: ignore[misc]
    at_once([*jobs, lambda: load.one("high", 9, 10, after=6)])
    assert load.ended.index("high") <= RUNNING, load.ended
    wait_idle(clients["watch"])
    alone = Load(clients)
    for name in low[4:]:
        alone.one(name, 5, 300)
        assert alone.texts[name] == load.texts[name], "another text than alone"


def test_equals_are_served_in_the_order_in_which_they_came(clients: dict[str, Client]) -> None:
    wait_idle(clients["watch"])
    load = Load(clients)
    jobs = [lambda: load.one("first", 5, 2500)] * RUNNING
    # each comes when those before it wait; they are alike, so they end as they began
    jobs += [lambda n=n: load.one(f"{n}", 5, 300 + 100 * n, after=RUNNING + n) for n in range(5)]  # type: ignore[misc]
    at_once(jobs)
    order = [int(name) for name in load.ended if name != "first"]
    assert all(abs(place - number) <= 1 for place, number in enumerate(order)), load.ended


def test_a_stream_of_high_ones_does_not_starve_a_low_one(clients: dict[str, Client]) -> None:
    wait_idle(clients["watch"])
    load = Load(clients)
    has_ended = threading.Event()

    def highs(number: int) -> None:
        turn = 0
        while not has_ended.is_set():
            load.one(f"high {number} {turn}", 9, 300)
            turn += 1

    def low() -> None:
        try:
            load.one("low", 0, 20, after=2 * RUNNING)
        finally:
            has_ended.set()

    at_once([*[lambda n=n: highs(n) for n in range(3 * RUNNING)], low])  # type: ignore[misc]
    assert "low" in load.ended


def test_values_that_are_no_priority_are_refused_and_too_high_ones_lowered(
    clients: dict[str, Client],
) -> None:
    for bad in ("high", "-1", "10", "1e9", "1000000000"):
        error = assert_error_body(clients["a"].post(COMPLETIONS, {"prompt": "x"}, {"x-priority": bad}), 400)
        assert error["param"] == "X-Priority"
    body = {"prompt": "x", "max_tokens": 2}
    assert clients["b"].post(COMPLETIONS, body, {"x-priority": "9"}).status == 200
