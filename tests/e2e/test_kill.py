"""SIGKILL in a running cluster: streams go on with the same tokens, or end with a typed error in time."""

from __future__ import annotations

import time

import pytest

from core import telemetry
from tests.e2e import on_ray, profiles, prompts, wire
from tests.e2e.client import COMPLETIONS
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System, is_ready
from tests.e2e.killing import RECOVERY_S, body, check, read_stream, wait_whole
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until
from tests.e2e.seeded import Settings

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 300
PROMPT = list(prompts.FACTS["The capital of France is"])
SEEDED = Settings(0.9, 0.9, seed=77)


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system(profiles.PAIR, is_local=False)


def test_nobody_notices_that_the_registry_is_killed(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    watched = read_stream(system.client, body(PROMPT, 60), 5, lambda _: on_ray.registry(system).kill())
    check(fleet, PROMPT, watched.answer, 60, None, "registry killed")
    start = time.monotonic()
    assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
    assert time.monotonic() - start < 5.0


def test_a_request_completes_although_its_prefill_worker_is_killed(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    client, before = system.client, scrape(system.client)
    ids = prompts.random_ids(fleet.models.bundled, 1700, seed=88)
    (victim,) = on_ray.workers(system, "prefill")
    request = {**body(ids, 8), "stream": False, "stream_options": None}
    with client.open(COMPLETIONS, request) as connection:
        # blocks travel as they are computed: some have come, most are still to be read
        wait_until(
            lambda: "" if rise(before, scrape(client), telemetry.KV_TRANSFER_BYTES) else "no block yet",
            30.0,
            0.02,
        )
        victim.kill()
        response = connection.read_all()
    assert response.status == 200, response.body
    assert rise(before, scrape(client), telemetry.RETRIES) >= 1, "it was killed too late to matter"
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
    def kill_the_one_that_works(_: str) -> None:
        on_ray.busiest(on_ray.workers(system, "decode"), 0.2).kill()

    # beside other work on the machine the idle worker may have been the busier one: then once more
    for _ in range(3):
        wait_whole(system)
        before = scrape(system.client)
        watched = read_stream(system.client, body(PROMPT, NUM_TOKENS, settings), 10, kill_the_one_that_works)
        check(fleet, PROMPT, watched.answer, NUM_TOKENS, settings, "decode killed")
        if rise(before, scrape(system.client), telemetry.RETRIES) >= 1:
            assert watched.answer.usage is not None
            (told,) = watched.answer.usage["baton"]["prompts"]
            assert "resume" in {stall["cause"] for stall in told["stalls"]}, told
            return
    pytest.fail("no kill has hit the stream")


def kill_all_decode(system: System) -> None:
    for process in on_ray.workers(system, "decode"):
        process.kill()


def kill_all_workers(system: System) -> None:
    """Prefill workers first: they would stand in."""
    for process in on_ray.workers(system, "prefill"):
        process.kill()
    kill_all_decode(system)


def test_without_any_decode_worker_a_stream_goes_on_all_the_same(fleet: Fleet, system: System) -> None:
    wait_whole(system)
    watched = read_stream(system.client, body(PROMPT, NUM_TOKENS), 10, lambda _: kill_all_decode(system))
    check(fleet, PROMPT, watched.answer, NUM_TOKENS, None, "all decode workers killed")


def test_without_a_replacement_before_the_deadline_a_stream_ends_with_a_typed_error(system: System) -> None:
    wait_whole(system)
    timeout_s = 6.0
    start = time.monotonic()
    with wire.RawConnection(system.port, timeout_s=60.0) as connection:
        request = system.client.encode(body(PROMPT, 2000))
        connection.send("POST", COMPLETIONS, request, headers={"X-Request-Timeout": str(timeout_s)})
        response = connection.read_head()
        has_killed = False
        for _ in connection.pieces(response):
            if not has_killed and response.body.count(b"data: ") >= 10:
                kill_all_workers(system)
                has_killed = True
    took = time.monotonic() - start
    assert has_killed
    assert took < timeout_s + 1.0, f"ended only after {took:.1f} s"
    lines = response.body.split(b"\n\n")
    events = [wire.strict_json(line[6:]) for line in lines if line.startswith(b"data: {")]
    error = events[-1]["error"]
    assert error["code"], error
    assert error["message"], error
    assert all("error" not in event for event in events[:-1])
    wait_until(lambda: "" if is_ready(system.port) else "nobody can answer", RECOVERY_S)
    wait_whole(system)
    assert system.client.complete(PROMPT, max_tokens=4, temperature=0).num_tokens == 4
    wait_idle(system.client)
