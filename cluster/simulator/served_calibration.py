"""ServedCalibration: prices from a running service: what steps, sharing and the router take there.

Owns which requests are sent and what follows from their answers. A service that has nothing else to do, with
one prefill worker at least; what its steps take includes all that happens between two of them. Runs on an
event loop of its own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from cluster.loadtest.calibration import find_vocabulary
from cluster.loadtest.client import Call, Client, NoAnswer
from cluster.loadtest.prompts import Ask, request_body
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.settings import Target
from cluster.loadtest.vocabulary import FIRST_WORD, Vocabulary
from cluster.simulator.fit import Measured, fit_price
from cluster.simulator.front import FrontPrice
from cluster.simulator.profile import Profile
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import Features, StepPrice

_MIN_STEPS = 8
_ASSUMED_STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked, each `runs` times: `prompts` of so many tokens alone; `batches` of streams behind
    prompts of `contexts` tokens, `num_output` tokens while all run; prompts of `read_beside` tokens while
    `beside` streams run.
    """

    prompts: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (32, 384)
    num_output: int = 48
    beside: int = 4
    read_beside: int = 448
    runs: int = 3


class ServedCalibration:
    """`token_budget`: of a step of a prefill worker. `tell` hears what is being measured."""

    def __init__(self, target: Target, token_budget: int, tell: Callable[[str], None]) -> None:
        self._target = target
        self._token_budget = token_budget
        self._tell = tell
        self._start = time.perf_counter()

    def measure(self, profile: Profile, questions: Questions) -> Profile:
        """`profile` with all prices measured. Raises NoAnswer, ValueError."""
        return asyncio.run(self._measure(profile, questions))

    async def _measure(self, profile: Profile, asked: Questions) -> Profile:
        async with Client(self._target, None, self._now) as client:
            model = self._target.model or await client.first_model()
            vocabulary = await find_vocabulary(self._target, model, client)
            service = _Service(client, self._target, model, vocabulary, self._now)
            for _ in range(3):
                await service.ask(64, 8)
            reads = [await self._read(service, num, asked.runs) for num in asked.prompts]
            streams: list[Measured] = []
            for num, batch in product(asked.contexts, asked.batches):
                step_s = streams[-1].seconds if streams else _ASSUMED_STEP_S
                num_output = asked.num_output + num_while_read(reads, num, batch, step_s)
                if num + num_output < profile.max_context:
                    streams.append(await self._stream(service, num, batch, num_output, asked.runs))
            price, error = fit_price([read.measured for read in reads] + streams)
            sharing = await self._beside(service, price, asked, profile.sharing)
        front = front_of(reads, profile.link.latency_s)
        return replace(profile, price=price, typical_error=error, sharing=sharing, front=front)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _read(self, service: _Service, num_tokens: int, runs: int) -> Read:
        calls = [await service.ask(num_tokens, 1) for _ in range(runs)]
        prefill_s = statistics.median(_part(call, "prefill") for call in calls)
        rest_s = statistics.median(_ttft_s(call) - _part(call, "prefill") for call in calls)
        self._tell(
            f"{num_tokens} tokens read in {1e3 * prefill_s:.1f} ms, and {1e3 * rest_s:.1f} ms around it"
        )
        return Read(
            num_tokens, Measured(features_of_prompt(num_tokens, self._token_budget), prefill_s), rest_s
        )

    async def _stream(self, service: _Service, num: int, batch: int, num_output: int, runs: int) -> Measured:
        paces: list[float] = []
        for _ in range(runs):
            calls = await asyncio.gather(*(service.ask(num, num_output) for _ in range(batch)))
            pace_s = pace_of(_records(calls))
            if pace_s is not None:
                paces.append(pace_s)
        if not paces:
            raise ValueError(f"{batch} streams behind {num} tokens did not run side by side")
        seconds = statistics.median(paces)
        self._tell(f"{batch} streams behind {num} tokens: {1e3 * seconds:.1f} ms a token")
        kv_tokens = batch * (num + num_output / 2)
        return Measured((1.0, 0.0, 0.0, float(batch), kv_tokens), seconds)

    async def _beside(
        self, service: _Service, price: StepPrice, asked: Questions, shared: Sharing | None
    ) -> Sharing | None:
        """Both at a time: streams that run, and prompts that are read meanwhile."""
        if shared is None:
            return None
        reading, decoding = [], []
        num_stream = 32
        alone_s = price.seconds(features_of_prompt(asked.read_beside, self._token_budget))
        for _ in range(asked.runs):
            num_output = asked.num_output + int(8 * alone_s / price.seconds((1.0, 0.0, 0.0, 4.0, 400.0)))
            streams = [asyncio.create_task(service.ask(num_stream, num_output)) for _ in range(asked.beside)]
            await asyncio.sleep(4 * alone_s / asked.read_beside * num_stream * asked.beside + 0.1)
            reads: list[Call] = []
            while not any(task.done() for task in streams):
                reads.append(await service.ask(asked.read_beside, 1))
            records = _records([await task for task in streams])
            first, last = _common(records)
            kv_tokens = asked.beside * (num_stream + num_output / 2)
            step_s = price.seconds((1.0, 0.0, 0.0, float(asked.beside), kv_tokens))
            for call in reads:
                ended_s, took_s = call.due_s + _ttft_s(call), _part(call, "prefill")
                num_steps = _num_between(records, ended_s - took_s, ended_s)
                if first < ended_s - took_s and ended_s < last and num_steps:
                    reading.append(took_s / alone_s)
                    decoding.append(took_s / num_steps / step_s)
        if not reading or not decoding:
            raise ValueError("no prompt was read while streams ran: the answers are too short")
        found = Sharing(
            shared.num_cores, max(1.0, statistics.median(reading)), max(1.0, statistics.median(decoding))
        )
        self._tell(f"beside each other: reading × {found.reading:.2f}, decoding × {found.decoding:.2f}")
        return found


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt alone: its steps, and the seconds until its first token came that no step took."""

    num_tokens: int
    measured: Measured
    rest_s: float


class _Service:
    """Whom is asked."""

    def __init__(
        self, client: Client, target: Target, model: str, vocabulary: Vocabulary, now: Callable[[], float]
    ) -> None:
        self._client = client
        self._target = target
        self._model = model
        self._vocabulary = vocabulary
        self._now = now
        self._chance = random.Random(0)

    async def ask(self, num_prompt_tokens: int, num_output_tokens: int) -> Call:
        """A prompt that nobody has seen. Raises NoAnswer for anything but a whole answer."""
        num_words = self._vocabulary.num_words(num_prompt_tokens)
        words = (FIRST_WORD, *self._chance.choices(self._vocabulary.words, k=num_words))
        body = request_body(self._target, self._model, [" ".join(words)], num_output_tokens)
        call = self._client.call(Ask(body, num_prompt_tokens, num_output_tokens), self._now())
        record = await call.run()
        if not record.is_completed:
            raise NoAnswer(f"a prompt of {num_prompt_tokens} tokens: {record.detail}")
        return call


def features_of_prompt(num_tokens: int, token_budget: int) -> Features:
    """Of all the steps that read a prompt together."""
    num_steps, pairs = 0, 0.0
    for start in range(0, num_tokens, token_budget):
        num_new = min(token_budget, num_tokens - start)
        num_steps += 1
        pairs += num_new * (start + 0.5 * num_new)
    return float(num_steps), float(num_tokens), pairs, 0.0, 0.0


def num_while_read(reads: Sequence[Read], num_tokens: int, batch: int, step_s: float) -> int:
    """How many tokens the first of `batch` streams has got when the last one's prompt has been read: twice
    what reading takes alone, since the streams run beside it.
    """
    lengths, seconds = [read.num_tokens for read in reads], [read.measured.seconds for read in reads]
    read_s = float(np.interp(num_tokens, lengths, seconds))
    return int(2.0 * (batch - 1) * read_s / step_s)


def front_of(reads: Sequence[Read], message_s: float) -> FrontPrice:
    """What prompts wait for besides their steps and two messages, on a line over their lengths."""
    lengths = np.array([read.num_tokens for read in reads], dtype=float)
    waits = np.array([read.rest_s for read in reads]) - 2 * message_s
    slope, level = np.polyfit(lengths, waits, 1) if len(reads) > 1 else (0.0, float(waits.mean()))
    if slope < 0.0:
        slope, level = 0.0, float(np.median(waits))
    return FrontPrice(max(0.0, float(level)), float(slope))


def pace_of(records: Sequence[RequestRecord]) -> float | None:
    """Seconds of a step while all of them stream; None if they hardly do. Tokens may come several at a time,
    so it is their number in that time that counts, not the pauses between them.
    """
    first, last = _common(records)
    num_steps = _num_between(records, first, last)
    return (last - first) / num_steps if num_steps >= _MIN_STEPS else None


def _common(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From when on, and until when, all of them stream: behind the second token of the last one."""
    first = max(record.event_times_s[min(1, len(record.event_times_s) - 1)] for record in records)
    return first, min(record.event_times_s[-1] for record in records)


def _num_between(records: Sequence[RequestRecord], first: float, last: float) -> float:
    """Steps in that time: the tokens that a stream got, on average."""
    counts = [sum(first < when <= last for when in record.event_times_s) for record in records]
    return sum(counts) / len(counts)


def _records(calls: Sequence[Call]) -> list[RequestRecord]:
    return [call.record for call in calls if call.record is not None]


def _ttft_s(call: Call) -> float:
    (record,) = _records([call])
    assert record.ttft_s is not None
    return record.ttft_s


def _part(call: Call, name: str) -> float:
    """Seconds of one part of the time to first token."""
    told: Any = call.usage.get("baton")
    try:
        return float(told["prompts"][0]["ttft_ms"][name]) / 1e3
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer("the service does not tell where time went: router.explain must be on") from error
