"""Aborts: many streams at once whose clients hang up at random moments, and what must be left of them.

Owns the load, the moment at which each client leaves (seen inside the system), and the count of both. Those
that are not aborted are compared with the model's own tokens.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import telemetry
from tests.e2e import prompts, wire
from tests.e2e.answers import of_stream
from tests.e2e.client import COMPLETIONS
from tests.e2e.fleet import Models
from tests.e2e.glass import GlassSystem, Moment
from tests.e2e.killing import body
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import SETTLE_S, scrape, wait_idle, wait_until

SETTINGS: dict[str, Any] = {
    "engine": {"num_kv_blocks": 256, "threads": 1},
    # small pieces in single file: each moment is long enough to be met
    "prefill": {
        "token_budget": 64,
        "max_num_seqs": 4,
        "bridge": {"shm": "never", "distributed": "never", "frame_bytes": 1, "max_bytes_in_flight": 1},
    },
    "decode": {"max_num_seqs": 12},
    "router": {"plan": "remote", "max_concurrency": 28},
}
NUM_AT_A_TIME = 36
_LOOK_S = 0.003
_PATIENCE_S = 120.0
_ORDER = list(Moment)
# how long a client stays on, at most, when the request is where it was to be
_LINGER_S = {
    Moment.QUEUED: 0.05,
    Moment.PREFILLING: 0.03,
    Moment.TRANSFERRING: 0.003,
    Moment.DECODING: 0.3,
}
_KEPT_SHARE = 0.04
# connections, staging memory and tasks that each of 8 ways between two workers keeps from its first use on
_FEW = 8 * 5
_MAX_COMPARED = 100


@dataclass(slots=True)
class Outcome:
    """`moments`: where requests were when their clients left; `num_late`: those that were over by then."""

    moments: Counter[Moment] = field(default_factory=Counter)
    num_late: int = 0
    seconds: float = 0.0
    settle_s: float = 0.0
    blocks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def num_aborts(self) -> int:
        return self.moments.total()

    def __str__(self) -> str:
        moments = ", ".join(f"{self.moments[moment]} {moment}" for moment in Moment)
        blocks = "; ".join(
            f"{name} {free} free = {all_} - {cached} cached"
            for name, (all_, free, cached) in sorted(self.blocks.items())
        )
        return (
            f"{self.num_aborts} aborts ({moments}) in {self.seconds:.0f} s, idle "
            f"{self.settle_s:.1f} s later; {blocks}; {self.num_late} had ended; left alone: {self.ledger}"
        )


class Aborts:
    """One run of `num_aborts` on `system`. `run` once."""

    def __init__(self, models: Models, model: Path, system: GlassSystem, num_aborts: int, seed: int) -> None:
        self._models = models
        self._model = model
        self._system = system
        self._num_aborts = num_aborts
        self._chance = random.Random(seed)
        self._num_begun = 0
        self._outcome = Outcome()
        self._kept: list[tuple[list[int], int, bytes]] = []

    def run(self) -> Outcome:
        """Until so many requests were aborted, all others have ended and the system is at rest."""
        self._warm_up()
        num_tasks, num_open = self._system.num_tasks(), _num_open()
        outcome, started_at = self._outcome, time.monotonic()
        asyncio.run(self._run())
        outcome.seconds = time.monotonic() - started_at
        outcome.settle_s = wait_idle(self._system.client)
        wait_until(lambda: str(self._system.left_inside() or ""), SETTLE_S)
        wait_until(lambda: _more("tasks", self._system.num_tasks(), num_tasks), SETTLE_S)
        wait_until(lambda: _more("open files", _num_open(), num_open), SETTLE_S)
        self._system.check()
        outcome.blocks = self._system.blocks()
        for name, (num_blocks, num_free, num_cached) in outcome.blocks.items():
            assert num_free == num_blocks - num_cached, f"{name} holds blocks at rest"
        reading = scrape(self._system.client)
        assert reading.value(telemetry.NUM_WAITING_TOKENS) == 0
        assert reading.value(telemetry.KV_UTILIZATION) == 0
        reference = self._models.reference(self._model)
        for prompt, num_tokens, data in self._kept[:_MAX_COMPARED]:
            (answer,) = of_stream(wire.parse_events(data), has_usage=True)
            output = self._models.vocabulary.ids_of(answer)
            assert len(output) == num_tokens
            check_greedy(reference, prompt, output, outcome.ledger, f"prompt of {len(prompt)}")
        outcome.ledger.check_share()
        return outcome

    def _warm_up(self) -> None:
        """What the first requests open for good is open before anything is counted."""
        for seed in range(8):
            prompt = prompts.random_ids(self._models.bundled, 40, seed)
            assert self._system.client.post(COMPLETIONS, body(prompt, 4)).status == 200
        wait_idle(self._system.client)

    async def _run(self) -> None:
        await asyncio.gather(*(self._keep_asking() for _ in range(NUM_AT_A_TIME)))

    async def _keep_asking(self) -> None:
        while self._outcome.num_aborts < self._num_aborts:
            self._num_begun += 1
            await self._ask(self._num_begun)

    async def _ask(self, seed: int) -> None:
        chance = self._chance
        is_kept = chance.random() < _KEPT_SHARE
        prompt = prompts.random_ids(self._models.bundled, chance.randint(1, 500), seed % 400)
        num_tokens = chance.randint(2, 12) if is_kept else chance.randint(4, 200)
        target = chance.choice(_ORDER)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._system.port)
        data = self._system.client.encode({**body(prompt, num_tokens), "seed": seed})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
        # equal names disturb nobody: half of the requests bear one of three
        name = f"X-Request-Id: twin-{seed % 3}\r\n" if chance.random() < 0.5 else ""
        writer.write(f"{head}\r\nContent-Type: application/json\r\n{name}\r\n".encode() + data)
        reading = asyncio.create_task(reader.read())
        try:
            if is_kept:
                await self._keep(reading, prompt, num_tokens)
            else:
                await self._leave(reading, seed, target)
        finally:
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _keep(self, reading: asyncio.Task[bytes], prompt: list[int], num_tokens: int) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            response = await asyncio.shield(reading)
        head, _, chunked = response.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), response[:500]
        self._kept.append((prompt, num_tokens, _dechunked(chunked)))

    async def _leave(self, reading: asyncio.Task[bytes], seed: int, target: Moment) -> None:
        """Wait until the request is where it is to be aborted, or beyond; a little longer, and note."""
        async with asyncio.timeout(_PATIENCE_S):
            while not reading.done():
                moment = self._system.moment(seed)
                if target is Moment.QUEUED or (moment and _ORDER.index(moment) >= _ORDER.index(target)):
                    break
                await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(self._chance.random() * _LINGER_S[target])
        if reading.done():
            self._outcome.num_late += 1
            return
        # what no worker has, and has not ended, the router has
        self._outcome.moments[self._system.moment(seed) or Moment.QUEUED] += 1


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def _more(what: str, now: int, before: int) -> str:
    """Why this is more than a system at rest has, be it that each way was used since."""
    return f"{now} {what} where {before} were" if now > before + _FEW else ""


def _dechunked(data: bytes) -> bytes:
    """The body of a chunked response that has ended."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body
        body, data = body + data[:length], data[length + 2 :]
    raise AssertionError("the response was cut off")
