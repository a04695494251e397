"""Killing: streams of a running cluster, read while something in it is killed, and what they must carry.

Owns the requests, the reading with an act in the middle, and the comparison with the model's own tokens.
Who is killed is said by the tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from core import telemetry
from tests.e2e import wire
from tests.e2e.answers import Answer, of_stream
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import scrape_anything, wait_until
from tests.e2e.seeded import Settings, check_sampled

RECOVERY_S = 120.0
DECODE_WORKER = "x-baton-decode-worker"


def wait_whole(system: System) -> None:
    """Until all workers of the profile are back and nothing runs."""
    wanted = {"prefill": system.profile.num_prefill, "decode": system.profile.num_decode}

    def missing() -> str:
        reading = scrape_anything(system.client)
        if not reading.has_workers:
            return "no worker's series"
        counts = reading.by_label(telemetry.WORKERS, "role", state="alive")
        short = {role: counts.get(role, 0) for role in wanted if counts.get(role, 0) < wanted[role]}
        return f"workers {short}" if short else reading.why_not_idle()

    wait_until(missing, RECOVERY_S, 0.5)


def body(prompt: list[int], max_tokens: int, settings: Settings | None = None) -> dict[str, Any]:
    """A stream of exactly `max_tokens` tokens, greedy unless there are settings."""
    sampling: dict[str, Any] = {"temperature": 0} if settings is None else settings.body()
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }


@dataclass(frozen=True, slots=True)
class Watched:
    """A finished stream, when its first and last event came, and the longest pause between two."""

    answer: Answer
    first_at: float
    last_at: float
    longest_pause_s: float


def read_stream(
    client: Client,
    request: dict[str, Any],
    after_events: int = 0,
    act: Callable[[str], object] | None = None,
    timeout_s: float = 200.0,
) -> Watched:
    """Read a stream to its end; once `after_events` events are there, `act` is done with the id of the decode
    worker that it began on.
    """
    with client.open(COMPLETIONS, request) as connection:
        response = connection.read_head()
        assert response.status == 200, response.status
        deadline = time.monotonic() + timeout_s
        for _ in connection.pieces(response):
            if act is not None and response.body.count(b"data: ") >= after_events:
                act(response.headers[DECODE_WORKER])
                act = None
            assert time.monotonic() < deadline, "the stream hangs"
        assert act is None, "the stream ended before anything was killed"
    (answer,) = of_stream(wire.parse_events(response.body), has_usage=True)
    times = [at for at, _ in response.arrivals]
    pause_s = max(later - sooner for sooner, later in pairwise(times))
    return Watched(answer, times[0], times[-1], pause_s)


def check(
    fleet: Fleet, prompt: list[int], answer: Answer, num_tokens: int, settings: Settings | None, where: str
) -> Ledger:
    """Exactly the model's tokens, each once."""
    reference = fleet.models.reference(fleet.models.bundled)
    output = fleet.models.vocabulary.ids_of(answer)
    assert len(output) == num_tokens == answer.num_tokens, where
    ledger = Ledger()
    if settings is None:
        check_greedy(reference, prompt, output, ledger, where, answer.logprobs)
    else:
        check_sampled(reference, prompt, output, settings, ledger, where)
    ledger.check_share()
    return ledger
