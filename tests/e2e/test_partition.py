"""Hosts that do not reach each other: streams go on elsewhere or end with an error in time, nothing leaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from core import telemetry
from tests.e2e import prompts, wire
from tests.e2e.client import COMPLETIONS
from tests.e2e.fleet import Fleet
from tests.e2e.killing import Watched, body, read_stream
from tests.e2e.namespaces import ROUTER, why_not
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scattered import ScatteredSystem
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(bool(why_not()), reason=why_not())]

# payloads cross the network: shared memory would be a way around each cut
SETTINGS = {"router": {"plan": "remote"}, "prefill": {"bridge": {"shm": "never"}}}
DECODE = ("decode-0", "decode-1")
NUM_TOKENS = 1500
# silence of 3 s is what tells that a host is away
NOTICED_S = 15.0
CUT_S = 5.0


@pytest.fixture(scope="module")
def system(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScatteredSystem]:
    folder = tmp_path_factory.mktemp("scattered")
    with ScatteredSystem(fleet.models.toy(), SETTINGS, folder) as started:
        yield started


@pytest.fixture(autouse=True)
def whole(system: ScatteredSystem) -> Iterator[None]:
    """Each test begins idle and ends with all workers there, nothing held and no block missing."""
    wait_whole(system)
    yield
    wait_whole(system)


def wait_whole(system: ScatteredSystem) -> None:
    def missing() -> str:
        num_alive = scrape(system.client).value(telemetry.WORKERS, state="alive")
        return "" if num_alive == 3 else f"{num_alive:g} workers"

    wait_until(missing, 30.0, 0.2)
    wait_idle(system.client, 30.0)


def check(fleet: Fleet, prompt: list[int], watched: Watched, num_tokens: int) -> None:
    ledger, answer = Ledger(), watched.answer
    output = fleet.models.vocabulary.ids_of(answer)
    assert len(output) == num_tokens
    reference = fleet.models.reference(fleet.models.toy())
    check_greedy(reference, prompt, output, ledger, "partition", answer.logprobs)
    assert not ledger.near_ties, "toys have wide gaps"


def worker_of(watched: Watched) -> dict[str, object]:
    assert watched.answer.usage is not None
    (told,) = watched.answer.usage["baton"]["prompts"]
    found: dict[str, object] = told
    return found


@pytest.mark.parametrize("num_cut", [1, 2])
def test_a_stream_goes_on_when_decode_cannot_be_reached_any_more(
    fleet: Fleet, system: ScatteredSystem, num_cut: int
) -> None:
    """With one cut off the other one takes over; with both, they once they can be reached again."""
    ids = prompts.random_ids(fleet.models.bundled, 80, seed=900 + num_cut)
    cables, before = system.cables, scrape(system.client)

    def part(decode: str) -> None:
        if num_cut == 1:
            cables.cut(ROUTER, decode)
            return
        for name in DECODE:
            cables.cut(ROUTER, name)
        threading.Timer(CUT_S, mend).start()

    def mend() -> None:
        for name in DECODE:
            cables.mend(ROUTER, name)

    try:
        watched = read_stream(system.client, body(ids, NUM_TOKENS), 10, part)
    finally:
        mend()
    check(fleet, ids, watched, NUM_TOKENS)
    assert watched.longest_pause_s < NOTICED_S
    assert rise(before, scrape(system.client), telemetry.RETRIES) >= 1, "it was not cut off while it ran"


def test_what_cannot_be_done_before_the_deadline_ends_with_a_typed_error(
    fleet: Fleet, system: ScatteredSystem
) -> None:
    ids = prompts.random_ids(fleet.models.bundled, 60, seed=905)
    names, timeout_s = ("prefill-0", *DECODE), 8.0
    start = time.monotonic()
    try:
        with wire.RawConnection(system.port, timeout_s=60.0) as connection:
            request = system.client.encode(body(ids, 6000))
            connection.send("POST", COMPLETIONS, request, headers={"X-Request-Timeout": str(timeout_s)})
            response = connection.read_head()
            has_cut = False
            for _ in connection.pieces(response):
                if not has_cut and response.body.count(b"data: ") >= 10:
                    for name in names:
                        system.cables.cut(ROUTER, name)
                    has_cut = True
        took = time.monotonic() - start
    finally:
        for name in names:
            system.cables.mend(ROUTER, name)
    assert took < timeout_s + 1.0, f"ended only after {took:.1f} s"
    last = [line for line in response.body.split(b"\n\n") if line.startswith(b"data: {")][-1]
    assert wire.strict_json(last[6:])["error"]["code"]


def test_a_prompt_is_answered_although_prefill_cannot_reach_decode(
    fleet: Fleet, system: ScatteredSystem
) -> None:
    cables = system.cables
    ids = prompts.random_ids(fleet.models.bundled, 3000, seed=906)
    for name in DECODE:
        cables.cut("prefill-0", name)
    try:
        start = time.monotonic()
        watched = read_stream(system.client, body(ids, 40))
        assert time.monotonic() - start < 40.0
        check(fleet, ids, watched, 40)
        told = worker_of(watched)
        assert told["num_attempts"] != 1 or told["stalls"], told
    finally:
        for name in DECODE:
            cables.mend("prefill-0", name)
    wait_whole(system)
    # the connections that hung serve again
    before = scrape(system.client)
    ids = prompts.random_ids(fleet.models.bundled, 300, seed=907)

    def handed_over() -> str:
        check(fleet, ids, read_stream(system.client, body(ids, 20)), 20)
        return (
            "" if rise(before, scrape(system.client), telemetry.KV_TRANSFER_BYTES) else "nothing handed over"
        )

    wait_until(handed_over, 40.0)
