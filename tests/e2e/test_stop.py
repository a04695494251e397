"""A stop with requests open: what ends in time ends as ever, the rest with a typed error; nothing is cut."""

from __future__ import annotations

import json
import signal
import time

import pytest

from core import telemetry
from tests.e2e import wire
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile, System
from tests.e2e.scrape import scrape, wait_until

DRAIN_S = 3.0
COMPLETIONS = "/v1/completions"
CONTEXT = 32768
# no machine computes that many tokens, one after the other, within the drain
ENDLESS = {"prompt": "hi", "max_tokens": 32000, "ignore_eos": True, "temperature": 0}


def events(response: wire.RawResponse) -> list[str]:
    """Each event's data; the body must end with a whole event."""
    text = response.body.decode()
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


def num_started(system: System) -> float:
    return scrape(system.client).value(telemetry.REQUESTS_STARTED)


def is_typed_end(event: str) -> bool:
    return bool(json.loads(event)["error"]["code"] == "no_worker_available")


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "Ray"])
def test_requests_that_are_open_at_the_end_of_the_drain_end_with_a_typed_error(
    fleet: Fleet, is_local: bool
) -> None:
    profile = Profile("drained", {"cluster.drain_timeout_s": DRAIN_S}, is_local=is_local)
    with fleet.once(profile, fleet.models.toy("toy-long", max_position_embeddings=CONTEXT)) as system:
        num_before = num_started(system)
        with (
            system.client.open(COMPLETIONS, {**ENDLESS, "stream": True}) as stream,
            system.client.open(COMPLETIONS, ENDLESS) as whole,
            system.client.open(COMPLETIONS, {**ENDLESS, "max_tokens": 400, "stream": True}) as short,
        ):
            head = stream.read_head()
            assert head.status == 200
            wait_until(lambda: "" if num_started(system) == num_before + 3 else "not all have come", 10.0)
            system.process.send_signal(signal.SIGINT)
            stopping_at = time.monotonic()
            for _ in stream.pieces(head):
                pass
            assert len(events(head)) > 1
            assert is_typed_end(events(head)[-1])
            refused = whole.read_all()
            assert refused.status == 503
            assert refused.json()["error"]["code"] == "no_worker_available"
            last = events(short.read_all())[-1]
            assert last == wire.DONE or is_typed_end(last)
            assert time.monotonic() - stopping_at < DRAIN_S + 10.0
            system.process.wait(60.0)
