"""Answering: one API call under way: its requests run side by side, their text comes out as choice events.

Owns the tasks of a call, the order of its events, its usage and its token times. Does not own wire shapes.
Lives on the event loop; leaving the `async with` block cancels whatever still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from core.clock import Clock, Deadline
from core.errors import Cancelled
from core.jobs import GenerateEvent, Reading
from core.request import FinishReason, Request, TokenLogprob
from router.admission import Admission
from router.api_call import ApiCall, Prompt
from router.decision import Decision
from router.metrics import RequestLabels, RouterMetrics
from router.pipeline import Pipeline
from router.stamps import Stamps
from router.tenants import Tenant
from router.text import SampleText, TextDelta
from router.token_bytes import TokenBytes
from router.work_meter import OpenWork


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """News of one choice. `is_first`: nothing of this choice came before; then the prompt's logprobs are
    known.
    """

    index: int
    delta: TextDelta
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt tokens count once for each prompt, completion tokens for each sample, the ending token
    included.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class PromptReader:
    """The pipeline's Reader for one prompt: tokens to text, for all its samples."""

    def __init__(
        self,
        call: ApiCall,
        number: int,
        token_bytes: TokenBytes,
        events: asyncio.Queue[_Item],
        counting: _Counting,
        stamps: Stamps,
    ) -> None:
        self.stamps = stamps
        self.decision: Decision | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.samples = [SampleText(token_bytes, call.text, index) for index in range(call.n)]
        self._first_index = number * call.n
        self._seen: set[int] = set()
        self._events = events
        self._counting = counting
        self._work: OpenWork | None = None

    def begin(self, request: Request) -> None:
        """The request waits for its turn from now on."""
        work = self._counting.metrics.work
        num_tokens = request.num_samples * request.sampling.max_tokens
        self._work = work.open(request.num_prompt_tokens, num_tokens)

    def placed(self, decision: Decision) -> None:
        self.decision = decision
        self.stamps.placed(self._counting.clock.now())
        if self._work is not None:
            self._work.placed()

    def pulled(self) -> None:
        self.stamps.pulled(self._counting.clock.now())

    def lost(self, samples: Sequence[int]) -> None:
        self.stamps.lost(samples, self._counting.clock.now())
        if self._work is not None:
            self._work.lost()

    def read(self, event: GenerateEvent) -> bool:
        delta = event.delta
        index = delta.sample_index
        if event.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
        if not self._seen:
            self.num_cached_tokens = delta.num_cached_tokens
        sample = self.samples[index]
        if delta.token_ids and sample.finish_reason is None:
            self._observe(index, len(delta.token_ids), event.reading)
        text = sample.feed(delta)
        self._events.put_nowait(ChoiceEvent(self._first_index + index, text, index not in self._seen))
        self._seen.add(index)
        return sample.finish_reason is not None

    def _observe(self, index: int, num_tokens: int, reading: Reading | None) -> None:
        counting, stamps = self._counting, self.stamps
        is_first = stamps.first_token_at is None
        since_last_s = stamps.token(index, reading, counting.clock.now())
        if is_first:
            assert stamps.ttft_s is not None
            counting.metrics.first_token(counting.labels, stamps.ttft_s, stamps.parts)
            if self._work is not None:
                self._work.first_token(self.num_cached_tokens, stamps.parts)
        elif since_last_s is not None:
            counting.metrics.next_tokens(counting.labels, num_tokens, since_last_s)
            if self._work is not None:
                self._work.next_tokens(num_tokens, since_last_s)

    def ended(self) -> None:
        """Nothing more comes."""
        if self._work is not None:
            num_tokens = sum(sample.num_tokens for sample in self.samples)
            self._work.close(num_tokens, self.stamps.transfer_wait_s)
        self._counting.metrics.paused(self.stamps.transfer_wait_s, self.stamps.stalls)


@dataclass(frozen=True, slots=True)
class _Counting:
    """Where the token times of a call are counted."""

    metrics: RouterMetrics
    labels: RequestLabels
    clock: Clock


class _End:
    """One request has ended."""


_Item = ChoiceEvent | BaseException | _End


class Answering:
    """Runs `requests`, one for each prompt of `call`; `next` gives their events until all have ended."""

    def __init__(
        self,
        call: ApiCall,
        requests: Sequence[Request],
        token_bytes: TokenBytes,
        pipeline: Pipeline,
        admission: Admission,
        deadline: Deadline,
        labels: RequestLabels,
        arrived_at: float,
        tenant: Tenant,
        tokenize_s: float = 0.0,
    ) -> None:
        self.call = call
        self._tenant = tenant
        self.requests = requests
        self._pipeline = pipeline
        self._admission = admission
        self._deadline = deadline
        self._events: asyncio.Queue[_Item] = asyncio.Queue()
        counting = _Counting(pipeline.metrics, labels, pipeline.clock)
        self.readers = [
            PromptReader(call, number, token_bytes, self._events, counting, Stamps(arrived_at, tokenize_s))
            for number in range(len(requests))
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = len(requests)
        self.kept_texts: list[list[str]] | None = None

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._serve(request, reader))
            for request, reader in zip(self.requests, self.readers, strict=True)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> ChoiceEvent | None:
        """The next event, None after the last. Raises the error that ended a request; safe to cancel."""
        while self._num_running or not self._events.empty():
            item = await self._events.get()
            if isinstance(item, ChoiceEvent):
                if self.kept_texts is not None:
                    self.kept_texts[item.index].append(item.delta.text)
                return item
            if isinstance(item, BaseException):
                raise item
            self._num_running -= 1
        return None

    def prompt_of(self, choice_index: int) -> tuple[Prompt, PromptReader]:
        """The prompt that a choice answers, and its reader."""
        number = choice_index // self.call.n
        return self.call.prompts[number], self.readers[number]

    def keep_texts(self) -> None:
        """Keep the text of each choice as it goes by."""
        self.kept_texts = [[] for _ in range(self.num_choices)]

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.call.n

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=sum(request.num_prompt_tokens for request in self.requests),
            num_completion_tokens=sum(
                sample.num_tokens for reader in self.readers for sample in reader.samples
            ),
            num_cached_tokens=sum(reader.num_cached_tokens for reader in self.readers),
        )

    def finish_reason(self) -> FinishReason:
        """That of the whole call: LENGTH if any choice was cut."""
        reasons = {sample.finish_reason for reader in self.readers for sample in reader.samples}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    async def _serve(self, request: Request, reader: PromptReader) -> None:
        reader.begin(request)
        try:
            async with self._admission.place(request, self._tenant, self._deadline):
                reader.stamps.admitted(self._pipeline.clock.now())
                await self._pipeline.serve(request, reader, self._deadline)
        except asyncio.CancelledError:
            # usually nobody reads any more; if somebody does, it must not wait for ever
            self._events.put_nowait(Cancelled("the request was given up"))
            raise
        except Exception as error:  # noqa: BLE001 - handed to whoever reads the events
            self._events.put_nowait(error)
        else:
            self._events.put_nowait(_End())
        finally:
            reader.ended()
