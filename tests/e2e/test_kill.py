"""SIGKILL in a running cluster: streams go on with the same tokens, or end with a typed error in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from core import telemetry
from tests.e2e import on_ray, profiles, prompts, wire
from tests.e2e.answers import Answer, of_stream
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import scrape, wait_idle, wait_until
from tests.e2e.seeded import Settings, check_sampled

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 120
RECOVERY_S = 120.0
PROMPT = list(prompts.FACTS["The capital of France is"])
SEEDED = Settings(0.9, 0.9, seed=77)


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)


def wait_whole(system: System, num_decode: int = 2) -> None:
    """Until all workers are back and nothing runs."""

    def missing() -> str:
        reading = scrape(system.client)
        counts = reading.by_label(telemetry.WORKERS, "role", state="alive")
        wanted = {"prefill": 1, "decode": num_decode}
        short = {role: counts.get(role, 0) for role in wanted if counts.get(role, 0) < wanted[role]}
        return f"workers {short}" if short else reading.why_not_idle()

    wait_until(missing, RECOVERY_S, 0.5)


def body(
    max_tokens: int, settings: Settings | None = None, prompt: list[int] | None = None
) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0} if settings is None else settings.body()
    return {
        "prompt": prompt or PROMPT,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }


def read_stream(
    client: Client,
    request: dict[str, Any],
    after_events: int,
    act: Callable[[], object],
    timeout_s: float = 200.0,
) -> tuple[list[dict[str, Any]], float]:
    """The events of a stream during which `act` is done after the first events; and when it ended."""
    with client.open(COMPLETIONS, request) as connection:
        response = connection.read_head()
        assert response.status == 200, response.status
        has_acted = False
        deadline = time.monotonic() + timeout_s
        for _ in connection.pieces(response):
            if not has_acted and response.body.count(b"data: ") >= after_events:
                act()
                has_acted = True
            assert time.monotonic() < deadline, "the stream hangs"
        assert has_acted, "the stream ended before anything was killed"
    return wire.parse_events(response.body), time.monotonic()


def check(fleet: Fleet, answer: Answer, num_tokens: int, settings: Settings | None, where: str) -> None:
    """Exactly the model's tokens, each once."""
    reference = fleet.models.reference(fleet.models.bundled)
    output = fleet.models.vocabulary.ids_of(answer)
    assert len(output) == num_tokens == answer.num_tokens, where
    ledger = Ledger()
    if settings is None:
        check_greedy(reference, PROMPT, output, ledger, where, answer.logprobs)
    else:
        check_sampled(reference, PROMPT, output, settings, ledger, where)
    ledger.check_share()


def test_nobody_notices_that_the_registry_is_killed(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    events, _ = read_stream(system.client, body(60), 5, lambda: on_ray.registry(system).kill())
    (answer,) = of_stream(events, has_usage=True)
    check(fleet, answer, 60, None, "registry killed")
    start = time.monotonic()
    assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
    assert time.monotonic() - start < 5.0


def test_a_request_completes_although_its_prefill_worker_is_killed(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    client = system.client
    ids = prompts.random_ids(fleet.models.bundled, 2000, seed=88)
    request = {**body(8, prompt=ids), "stream": False, "stream_options": None}
    with client.open(COMPLETIONS, request) as connection:
        wait_until(
            lambda: "" if scrape(client).value(telemetry.NUM_RUNNING, role="prefill") else "not yet",
            10.0,
            0.05,
        )
        time.sleep(0.7)
        (victim,) = on_ray.workers(system, "prefill")
        victim.kill()
        response = connection.read_all()
    assert response.status == 200, response.body
    choice = response.json()["choices"][0]
    output = [fleet.models.vocabulary.id_of_text(token) for token in choice["logprobs"]["tokens"]]
    reference = fleet.models.reference(fleet.models.bundled)
    check_greedy(reference, ids, output, Ledger(), "prefill killed", choice["logprobs"]["token_logprobs"])
    # while it is being replaced, decode reads prompts by itself
    assert client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4


@pytest.mark.parametrize("settings", [None, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_goes_on_with_the_same_tokens_when_its_decode_worker_is_killed(
    fleet: Fleet, system: System, settings: Settings | None
) -> None:
    wait_whole(system)

    def kill_the_one_that_works() -> None:
        on_ray.busiest(on_ray.workers(system, "decode")).kill()

    events, _ = read_stream(system.client, body(NUM_TOKENS, settings), 10, kill_the_one_that_works)
    (answer,) = of_stream(events, has_usage=True)
    check(fleet, answer, NUM_TOKENS, settings, "decode killed")


def test_without_any_decode_worker_a_stream_waits_for_the_replacement(fleet: Fleet, system: System) -> None:
    wait_whole(system)

    def kill_all() -> None:
        for process in on_ray.workers(system, "decode"):
            process.kill()

    events, _ = read_stream(system.client, body(NUM_TOKENS), 10, kill_all)
    (answer,) = of_stream(events, has_usage=True)
    check(fleet, answer, NUM_TOKENS, None, "all decode workers killed")


def test_without_a_replacement_before_the_deadline_a_stream_ends_with_a_typed_error(
    fleet: Fleet, system: System
) -> None:
    del fleet
    wait_whole(system)
    timeout_s = 9.0

    def kill_all() -> None:
        for process in on_ray.workers(system, "decode"):
            process.kill()

    start = time.monotonic()
    with wire.RawConnection(system.port, timeout_s=60.0) as connection:
        request = system.client.encode(body(2000))
        connection.send("POST", COMPLETIONS, request, headers={"X-Request-Timeout": str(timeout_s)})
        response = connection.read_head()
        has_killed = False
        for _ in connection.pieces(response):
            if not has_killed and response.body.count(b"data: ") >= 10:
                kill_all()
                has_killed = True
    took = time.monotonic() - start
    assert has_killed
    assert took < timeout_s + 1.0, f"ended only after {took:.1f} s"
    events = [
        wire.strict_json(line[6:]) for line in response.body.split(b"\n\n") if line.startswith(b"data: {")
    ]
    error = events[-1]["error"]
    assert error["code"], error
    assert error["message"], error
    assert all("error" not in event for event in events[:-1])
    wait_whole(system)
    assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
    wait_idle(system.client)
