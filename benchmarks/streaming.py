"""Call: one streamed completion against an OpenAI-compatible server on this machine, timed at the client.

The exchange is the load test's client; this module adds the proof that the answer is the one that was asked
for: the finish reason is the length, and the server counted that many tokens. Anything else raises
BrokenStream, so that a stream that was cut short never becomes a fast one. Runs on the benchmark's event
loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from cluster.loadtest.client import Call as Exchange
from cluster.loadtest.client import Client
from cluster.loadtest.event_stream import BrokenStream
from cluster.loadtest.prompts import Ask as Wanted
from cluster.loadtest.prompts import request_body
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.settings import Target

__all__ = ["HOST", "Ask", "BrokenStream", "Call", "Endpoint", "Stream", "fetch", "whole_stream"]

HOST = "127.0.0.1"
TIMEOUT_S = 900.0
# Tokenizers of one model agree within a token or two at the ends of a text.
PROMPT_TOLERANCE = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of `num_prompt_tokens` tokens, to be continued greedily by exactly `max_tokens`."""

    prompt: str
    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and the name of its model."""

    port: int
    model: str


@dataclass(frozen=True, slots=True)
class Stream:
    """A complete answer. Seconds on one monotonic clock: `due_at` before connecting, `times` at each event
    with text, `ended_at` at the body's end. Token counts are the server's.
    """

    due_at: float
    times: tuple[float, ...]
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    text: str


class Call:
    """One request: `run` it once. `times` fills while it runs and may be watched."""

    def __init__(self, endpoint: Endpoint, ask: Ask) -> None:
        self._target = Target(f"http://{HOST}:{endpoint.port}", endpoint.model, timeout_s=TIMEOUT_S)
        self._ask = ask
        self._body = request_body(self._target, endpoint.model, [ask.prompt], ask.max_tokens)
        self._exchange: Exchange | None = None

    @property
    def times(self) -> Sequence[float]:
        return () if self._exchange is None else self._exchange.times

    async def run(self) -> Stream:
        """Raises BrokenStream; also when nobody answers, or not within fifteen minutes."""
        due_at = time.perf_counter()
        async with Client(self._target, None, time.perf_counter) as client:
            wanted = Wanted(self._body, self._ask.num_prompt_tokens, self._ask.max_tokens)
            self._exchange = client.call(wanted, due_at)
            record = await self._exchange.run()
        return whole_stream(record, self._ask, self._exchange.text)


def whole_stream(record: RequestRecord, ask: Ask, text: str) -> Stream:
    """The answer that was asked for. Raises BrokenStream."""
    if not record.is_completed:
        raise BrokenStream(record.detail)
    if record.finish_reason != "length":
        raise BrokenStream(f"finish reason {record.finish_reason} instead of length")
    if not record.has_usage:
        raise BrokenStream("the server did not count tokens")
    if record.num_output_tokens != ask.max_tokens:
        raise BrokenStream(f"{record.num_output_tokens} tokens instead of {ask.max_tokens}")
    if abs(record.num_prompt_tokens - ask.num_prompt_tokens) > PROMPT_TOLERANCE:
        raise BrokenStream(
            f"the server read {record.num_prompt_tokens} prompt tokens, not {ask.num_prompt_tokens}"
        )
    if not record.event_times_s:
        raise BrokenStream("no text at all")
    return Stream(
        due_at=record.due_s,
        times=record.event_times_s,
        ended_at=record.ended_s,
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=record.num_output_tokens,
        num_cached_tokens=record.num_cached_tokens,
        text=text,
    )


async def fetch(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OSError while nothing listens, BrokenStream for a body cut short."""
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(f"http://{HOST}:{port}{path}") as response,
        ):
            return response.status, await response.read()
    except aiohttp.ClientOSError:
        raise
    except aiohttp.ClientError as error:
        raise BrokenStream(f"{type(error).__name__}: {error}") from error
