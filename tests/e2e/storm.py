"""Storm: streams without a pause on a cluster in which workers are killed one after the other.

Owns the load (so many streams at a time, until the kills are done), the killer, and the count of what came
of the streams. Every token of every stream is compared with the model's own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import psutil

from core import telemetry
from tests.e2e import on_ray, prompts
from tests.e2e.client import Client
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.killing import Watched, body, read_stream, wait_whole
from tests.e2e.reference import NEAR_TIE, Ledger, Reference
from tests.e2e.scrape import rise, scrape

_LOOK_S = 0.5
# a death shows at once by the broken connection; after so long it was seen, or nobody will see it
_SEEN_S = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """At least `num_streams`, `num_at_a_time`, of up to `max_tokens` each, and `num_kills`.

    The next kill comes when all workers are back, at the latest `patience_s` after the one before.
    """

    num_streams: int
    num_at_a_time: int
    max_tokens: int
    num_kills: int
    deadline_s: float = 180.0
    patience_s: float = 20.0


@dataclass(slots=True)
class Outcome:
    """What came of a storm. `pauses_s`: the longest of each stream; `resumes_s`: of each that went on
    elsewhere.
    """

    num_streams: int = 0
    num_kills: int = 0
    num_retries: float = 0.0
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    resumes_s: list[float] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)

    def __str__(self) -> str:
        parts = [
            f"{self.num_kills} kills in {self.seconds:.0f} s",
            f"{self.num_streams} streams, {len(self.lost)} lost, {self.num_retries:.0f} retries",
            f"{len(self.resumes_s)} streams resumed: pause {percentiles(self.resumes_s)}",
            f"longest pause of a stream {percentiles(self.pauses_s)}",
        ]
        return "; ".join([*parts, str(self.ledger)])


def percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "none"
    p50, p99 = np.percentile(seconds, [50, 99])
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s"


@dataclass(frozen=True, slots=True)
class _Stream:
    prompt: list[int]
    num_tokens: int


class Storm:
    """One run on `system`. `run` once."""

    def __init__(self, fleet: Fleet, system: System, model: str, plan: Plan, seed: int) -> None:
        self._fleet = fleet
        self._system = system
        self._model = model
        self._plan = plan
        self._chance = random.Random(seed)
        self._client = Client(system.port, timeout_s=plan.deadline_s + 20.0)
        self._client.headers["x-request-timeout"] = str(plan.deadline_s)
        self._lock = threading.Lock()
        self._num_begun = 0
        self._has_ended = threading.Event()
        self._failed: list[BaseException] = []

    def run(self) -> Outcome:
        """Until all kills are done and all streams have ended; then the tokens are compared."""
        plan, outcome = self._plan, Outcome()
        wait_whole(self._system)
        before, started_at = scrape(self._client), time.monotonic()
        killer = threading.Thread(target=self._kill, args=(outcome,), name="killer")
        killer.start()
        with ThreadPoolExecutor(plan.num_at_a_time) as pool:
            parts = [pool.submit(self._keep_reading, outcome) for _ in range(plan.num_at_a_time)]
            watched = [pair for part in parts for pair in part.result()]
        killer.join()
        if self._failed:
            raise self._failed[0]
        outcome.seconds = time.monotonic() - started_at
        wait_whole(self._system)
        outcome.num_retries = rise(before, scrape(self._client), telemetry.RETRIES)
        for stream, seen in watched:
            self._check(stream, seen, outcome)
        outcome.ledger.check_share()
        return outcome

    def _keep_reading(self, outcome: Outcome) -> list[tuple[_Stream, Watched]]:
        """One stream after the other, while some are to come or workers are still to be killed."""
        found = []
        while (stream := self._next()) is not None:
            try:
                request = body(stream.prompt, stream.num_tokens)
                seen = read_stream(self._client, request, timeout_s=self._plan.deadline_s + 5.0)
            except (AssertionError, OSError) as failure:
                with self._lock:
                    outcome.lost.append(str(failure)[:500])
            else:
                found.append((stream, seen))
        return found

    def _next(self) -> _Stream | None:
        with self._lock:
            if self._num_begun >= self._plan.num_streams and self._has_ended.is_set():
                return None
            self._num_begun += 1
            length = self._chance.randint(1, 300)
            num_tokens = self._chance.randint(self._plan.max_tokens // 4, self._plan.max_tokens)
            seed = 700_000 + self._num_begun
        return _Stream(prompts.random_ids(self._fleet.models.bundled, length, seed), num_tokens)

    def _kill(self, outcome: Outcome) -> None:
        try:
            for _ in range(self._plan.num_kills):
                self._wait_for_streams()
                victim = self._chance.choice([*self._workers("prefill"), *self._workers("decode")])
                victim.kill()
                outcome.num_kills += 1
                self._wait_recovered(time.monotonic())
        except BaseException as failure:  # noqa: BLE001 - raised again by `run`
            self._failed.append(failure)
        finally:
            self._has_ended.set()

    def _workers(self, role: str) -> list[psutil.Process]:
        return on_ray.workers(self._system, role)

    def _wait_for_streams(self) -> None:
        """A kill without streams shows nothing."""
        while scrape(self._client).value(telemetry.ROUTER_REQUESTS, state="running") == 0:
            time.sleep(0.05)

    def _wait_recovered(self, killed_at: float) -> None:
        profile = self._system.profile
        wanted = profile.num_prefill + profile.num_decode
        has_been_seen = False
        while (elapsed := time.monotonic() - killed_at) < self._plan.patience_s:
            num_alive = scrape(self._client).value(telemetry.WORKERS, state="alive")
            has_been_seen |= num_alive < wanted or elapsed > _SEEN_S
            if has_been_seen and num_alive >= wanted:
                return
            time.sleep(_LOOK_S)

    def _check(self, stream: _Stream, seen: Watched, outcome: Outcome) -> None:
        """As many tokens as asked for, each the model's own after those before it."""
        models, answer = self._fleet.models, seen.answer
        output = models.vocabulary.ids_of(answer)
        where = f"stream of {len(stream.prompt)} and {stream.num_tokens} tokens"
        assert len(output) == answer.num_tokens == stream.num_tokens, where
        reference = models.reference(models.path(self._model))
        check_tokens(reference, stream.prompt, output, outcome.ledger, where)
        outcome.num_streams += 1
        outcome.pauses_s.append(seen.longest_pause_s)
        assert answer.usage is not None
        (told,) = answer.usage["baton"]["prompts"]
        outcome.resumes_s += [stall["ms"] / 1e3 for stall in told["stalls"] if stall["cause"] == "resume"]


def check_tokens(
    reference: Reference, prompt: list[int], output: list[int], ledger: Ledger, where: str
) -> None:
    """Each token is the reference's best after those before it, but for near ties: by logits alone, since a
    storm has hundreds of thousands of tokens.
    """
    rows = reference.logits([*prompt, *output], len(output))
    gaps = rows.max(axis=1) - rows[np.arange(len(output)), output]
    for position in np.flatnonzero(gaps):
        story = f"{where}: token {position} is {output[position]}, gap {gaps[position]:.6f}"
        assert gaps[position] < NEAR_TIE, f"{story}; output {output}"
        ledger.near_ties.append(story)
    ledger.num_tokens += len(output)
    ledger.num_prompts += 1
