"""Client and Call: one streamed request to an OpenAI-compatible server, timed where it arrives.

Owns the HTTP exchange and turning whatever comes of it into a record; an answer that is not complete is an
error, never a result. When it is sent belongs to `runner`. Each request has a connection of its own, so that
none fails because the server closed an idle one. Runs on the load test's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from cluster.loadtest.answer import Answer
from cluster.loadtest.event_stream import BrokenStream, EventReader
from cluster.loadtest.prompts import Ask
from cluster.loadtest.record import Outcome, RequestRecord
from cluster.loadtest.settings import Api, Target

PATHS = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}
_REFUSALS = (429, 503)
_READ_BYTES = 1 << 20
_MAX_TOLD = 500

Now = Callable[[], float]


class NoAnswer(Exception):
    """The server does not answer what a load test must know first."""


class Client:
    """Open it with `async with`. `now` gives seconds since the run's start."""

    def __init__(self, target: Target, api_key: str | None, now: Now) -> None:
        self.target = target
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
            read_bufsize=_READ_BYTES,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    def call(self, ask: Ask, due_s: float) -> Call:
        assert self._session is not None, "the client is not open"
        return Call(self._session, self.target, ask, due_s, self._now)

    async def first_model(self) -> str:
        """The first that the server lists. Raises NoAnswer."""
        url = f"{self.target.url.rstrip('/')}/v1/models"
        assert self._session is not None, "the client is not open"
        try:
            async with asyncio.timeout(30.0), self._session.get(url) as response:
                text = await response.text()
                if response.status != 200:
                    raise NoAnswer(f"GET {url}: status {response.status}: {text[:_MAX_TOLD]}")
                return str(orjson.loads(text)["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer(f"GET {url}: {_told(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NoAnswer(f"GET {url}: not a list of models; give the name with --model") from error


class Call:
    """One request: `run` it once. What has come so far may be watched meanwhile."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        ask: Ask,
        due_s: float,
        now: Now,
    ) -> None:
        self.due_s = due_s
        self.index = 0  # given when it is due
        self.record: RequestRecord | None = None
        self._session = session
        self._target = target
        self._ask = ask
        self._now = now
        self._sent_s: float | None = None
        self._status: int | None = None
        self._answer = Answer(target.stream_end)
        # made before it is due: nothing is left to do then but to send
        self._url = target.url.rstrip("/") + PATHS[target.api]
        self._data = orjson.dumps(ask.body)

    @property
    def text(self) -> str:
        return self._answer.text

    @property
    def usage(self) -> dict[str, Any]:
        return self._answer.usage

    @property
    def times(self) -> Sequence[float]:
        """Of the events with text so far."""
        return self._answer.times

    @property
    def has_first_token(self) -> bool:
        return bool(self._answer.times)

    @property
    def num_events(self) -> int:
        return len(self._answer.times)

    async def run(self) -> RequestRecord:
        """Never fails because of the server: what it did wrong is in the record."""
        self._sent_s = self._now()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                outcome, detail = await self._exchange()
        except TimeoutError:
            outcome = Outcome.ERROR
            detail = f"no complete answer within {self._target.timeout_s:g} s"
        except BrokenStream as error:
            outcome, detail = Outcome.ERROR, str(error)
        except aiohttp.ClientPayloadError as error:
            outcome, detail = Outcome.ERROR, f"the answer was cut off: {_told(error)}"
        except (aiohttp.ClientError, OSError) as error:
            outcome, detail = Outcome.ERROR, _told(error)
        self.record = self._record(outcome, detail)
        return self.record

    def so_far(self) -> RequestRecord:
        """The record of a call that was given up."""
        return self.record or self._record(Outcome.UNFINISHED, "the test ended before the answer")

    async def _exchange(self) -> tuple[Outcome, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._session.post(
            self._url, data=self._data, headers=headers, allow_redirects=False
        ) as response:
            self._status = response.status
            if response.status != 200:
                text = (await response.content.read(_MAX_TOLD)).decode("utf-8", "replace")
                kind = Outcome.REFUSED if response.status in _REFUSALS else Outcome.ERROR
                return kind, f"status {response.status}: {text}"
            if response.content_type != "text/event-stream":
                raise BrokenStream(f"the answer is {response.content_type}, not an event stream")
            reader = EventReader()
            async for piece in response.content.iter_any():
                now = self._now()
                for event in reader.feed(piece):
                    self._answer.take(event, now)
            reader.end()
            self._answer.complete()
        return Outcome.COMPLETED, ""

    def _record(self, outcome: Outcome, detail: str) -> RequestRecord:
        answer, now = self._answer, self._now()
        num_output_tokens = answer.count("completion_tokens")
        return RequestRecord(
            index=self.index,
            due_s=self.due_s,
            sent_s=now if self._sent_s is None else self._sent_s,
            ended_s=now,
            outcome=outcome,
            event_times_s=tuple(answer.times),
            num_prompt_tokens=answer.count("prompt_tokens") or 0,
            num_output_tokens=len(answer.times) if num_output_tokens is None else num_output_tokens,
            num_cached_tokens=answer.num_cached_tokens,
            planned_prompt_tokens=self._ask.planned_prompt_tokens,
            planned_output_tokens=self._ask.planned_output_tokens,
            finish_reason=answer.finish_reason,
            status=self._status,
            detail=detail,
            has_usage=num_output_tokens is not None,
        )


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TOLD]
