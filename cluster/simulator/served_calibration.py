"""ServedCalibration: prices from a running service: what steps, sharing and the router take there.

Owns which requests are sent, and prices of what was alone; of what ran beside others see `served_sharing` and
`served_mix`. A service that has nothing else to do, with one prefill worker at least; what its steps take
includes all that happens between two of them. Runs on an event loop of its own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product

import numpy as np

from cluster.loadtest.calibration import find_vocabulary
from cluster.loadtest.client import Client
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.settings import Target
from cluster.simulator.fit import Measured, batch_prices, fit_price
from cluster.simulator.front import FrontPrice
from cluster.simulator.jitter import Jitter, spread_of
from cluster.simulator.machine_pace import Pace, timed_pace
from cluster.simulator.mix_ratios import (
    ratios,
    ratios_beside,
    ratios_within,
    scaled,
    sharing_in_mix,
    times_price,
    undisturbed_reads,
)
from cluster.simulator.profile import Profile
from cluster.simulator.served_calls import ServedCalls, Told, all_streaming, num_between, records_of, told_by
from cluster.simulator.served_mix import Mix, Mixed
from cluster.simulator.served_sharing import Beside, mixed_steps, sharing_of
from cluster.simulator.step_price import Features, StepPrice

_MIN_STEPS = 8
_ASSUMED_STEP_S = 0.01
_BETWEEN_S = 0.03  # from one prompt to the next that is to be read beside it
_OUTLIER = 2.0  # times the median: somebody else had the machine


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked, each `runs` times: `prompts` of so many tokens alone; `tails` of so many behind `heads`
    of so many that are cached; `batches` of streams behind
    prompts of `contexts` tokens, `num_output` tokens while all run; while `beside` streams run,
    `read_beside`: prompts that come together, one group after the other. Then `num_mixed` requests of all
    lengths between, at random moments, at a rate of `mixed_share` of what the prices allow.
    """

    prompts: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)
    heads: tuple[int, ...] = (512, 1536)
    tails: tuple[int, ...] = (64, 128, 256)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (32, 640)
    num_output: int = 48
    beside: tuple[int, ...] = (1, 2, 4)
    read_beside: tuple[tuple[int, ...], ...] = ((256,), (128, 160), (64,), (64, 384))
    runs: int = 3
    num_mixed: int = 60
    mixed_output: tuple[int, int] = (16, 64)
    mixed_share: float = 0.5


class ServedCalibration:
    """`token_budget`: of a step of a prefill worker; `chunk`: of a prompt beside a decode worker's streams.
    `tell` hears what is being measured.
    """

    def __init__(self, target: Target, token_budget: int, chunk: int, tell: Callable[[str], None]) -> None:
        self._target = target
        self._token_budget = token_budget
        self._chunk = chunk
        self._tell = tell
        self._start = time.perf_counter()

    def measure(self, profile: Profile, questions: Questions) -> Profile:
        """`profile` with all prices measured. Raises NoAnswer, ValueError."""
        return self._concluded(profile, asyncio.run(self._ask(profile, questions)))

    async def _ask(self, profile: Profile, asked: Questions) -> _Answers:
        async with Client(self._target, None, self._now) as client:
            model = self._target.model or await client.first_model()
            vocabulary = await find_vocabulary(self._target, model, client)
            service = ServedCalls(client, self._target, model, vocabulary, self._now)
            for _ in range(3):
                await service.ask(64, 8)
            reads = [await self._read(service, num, asked.runs) for num in asked.prompts]
            streams: list[Measured] = []
            for num, batch in product(asked.contexts, asked.batches):
                step_s = streams[-1].seconds if streams else _ASSUMED_STEP_S
                num_output = asked.num_output + num_while_read(reads, num, batch, step_s)
                if num + num_output < profile.max_context:
                    streams.append(await self._stream(service, num, batch, num_output, asked.runs))
            longest = profile.max_context - max(asked.tails) - 1
            heads = [num for num in asked.heads if num < longest]
            behind = [step for num in heads for step in await self._read_behind(service, num, asked)]
            pace = await timed_pace(service)
            rounds = [await self._beside(service, reads, streams[0], asked, num) for num in asked.beside]
            self._tell_pace(await timed_pace(service), pace)
            alone = [*(read.measured for read in reads), *streams, *behind]
            together = mixed_steps(rounds, self._chunk)
            price, _ = fit_price(alone + together)
            mix = await self._mix(service, asked, replace(price, batches=batch_prices(streams)))
            self._tell_pace(await timed_pace(service), pace)
        return _Answers(reads, streams, alone, rounds, together, mix, pace)

    def _concluded(self, profile: Profile, told: _Answers) -> Profile:
        reads = told.mix.reading(self._features, self._chunk)
        elsewhere = told.mix.reading_elsewhere(self._features)
        whole, streaming = [read.whole for read in reads], told.mix.decoding()
        price, error = fit_price(told.alone + told.together + whole)
        price = replace(price, batches=batch_prices(told.streams))
        undisturbed = whole + undisturbed_reads(elsewhere)
        times_decoding, times_reading = times_price(price, streaming), times_price(price, undisturbed)
        price = scaled(price, times_decoding, times_reading)
        sharing, of_reads = profile.sharing, ratios(price, undisturbed)
        if sharing is not None:
            # by the prices that a simulation charges: what a mix makes longer is not to count twice
            sharing = sharing_of(told.rounds, price, self._features, sharing)
            sharing = sharing_in_mix(elsewhere, told.mix.decoding_beside(), price, sharing)
            of_reads = ratios(price, whole) + ratios_beside(price, elsewhere, sharing.reading)
        jitter = Jitter(
            streaming=spread_of(ratios(price, streaming)),
            reading=spread_of(of_reads),
            chunk=spread_of(ratios_within(price, reads)),
        )
        front = front_of(told.reads, profile.link.latency_s)
        front = replace(front, busy_s=busy_of(told.reads, told.mix.beside()))
        self._tell(
            f"prompts read together with streams: {len(told.together)}; "
            f"in the mix: {len(whole)} by their worker, {len(elsewhere)} by another"
        )
        self._tell(f"in a mix of requests: streams × {times_decoding:.2f}, prompts × {times_reading:.2f}")
        self._tell(f"{sharing}; {front}")
        return replace(
            profile,
            price=price,
            typical_error=error,
            sharing=sharing,
            front=front,
            jitter=jitter,
            pace=told.pace,
        )

    def _tell_pace(self, pace: Pace, then: Pace) -> None:
        self._tell(f"a prompt alone takes {pace.slower_than(then):.2f} times what it did")

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _features(self, num_tokens: int) -> Features:
        return features_of_prompt(num_tokens, self._token_budget)

    async def _read(self, service: ServedCalls, num_tokens: int, runs: int) -> Read:
        answers = [await service.read(num_tokens, 1) for _ in range(runs)]
        read_s = typical([told.read_s for told in answers])
        rest_s = typical([told.rest_s + told.queue_s for told in answers])
        self._tell(f"{num_tokens} tokens read in {1e3 * read_s:.1f} ms, and {1e3 * rest_s:.1f} ms around it")
        return Read(num_tokens, Measured(self._features(num_tokens), read_s), rest_s)

    async def _read_behind(self, service: ServedCalls, num_head: int, asked: Questions) -> list[Measured]:
        """Prompts whose first `num_head` tokens are cached by the worker that reads them: what each of their
        own tokens costs for those before it, of which prompts read as a whole say little.
        """
        head, steps = service.words(num_head), []
        await service.ask(num_head + min(asked.tails), 1, head)
        for num in asked.tails:
            answers = [await service.read(num_head + num, 1, head) for _ in range(asked.runs)]
            cached = [told for told in answers if told.num_cached_tokens]
            if not cached:
                self._tell(
                    f"{num_head} tokens that were just read are not cached: no prompt is cheaper for it"
                )
                return []
            seconds = typical([told.read_s for told in cached])
            num_cached = round(statistics.fmean(told.num_cached_tokens for told in cached))
            features = features_behind(num_head + num - num_cached, num_cached, self._token_budget)
            steps.append(Measured(features, seconds))
            self._tell(f"{num} tokens behind {num_cached} cached ones read in {1e3 * seconds:.1f} ms")
        return steps

    async def _stream(
        self, service: ServedCalls, num: int, batch: int, num_output: int, runs: int
    ) -> Measured:
        paces: list[float] = []
        for _ in range(runs):
            calls = await asyncio.gather(*(service.ask(num, num_output) for _ in range(batch)))
            pace_s = pace_of(records_of(calls))
            if pace_s is not None:
                paces.append(pace_s)
        if not paces:
            raise ValueError(f"{batch} streams behind {num} tokens did not run side by side")
        seconds = typical(paces)
        self._tell(f"{batch} streams behind {num} tokens: {1e3 * seconds:.1f} ms a token")
        kv_tokens = batch * (num + num_output / 2)
        return Measured((1.0, 0.0, 0.0, float(batch), kv_tokens), seconds)

    async def _beside(
        self,
        service: ServedCalls,
        reads: Sequence[Read],
        stream: Measured,
        asked: Questions,
        num_streams: int,
    ) -> Beside:
        """Both at a time: streams that run, and prompts that are read meanwhile, some of them two at once."""
        num_stream = asked.contexts[0]
        read_s = read_seconds(reads, num_stream)
        groups_s = sum(read_seconds(reads, num) + read_s for group in asked.read_beside for num in group)
        step_s = stream.seconds
        # a stream gets a token with each chunk of a prompt, and in between
        num_output = asked.num_output + int(
            2 * asked.runs * (sum(map(sum, asked.read_beside)) / self._chunk + 0.3 * groups_s / step_s)
        )
        streams = [asyncio.create_task(service.ask(num_stream, num_output)) for _ in range(num_streams)]
        await asyncio.sleep(2 * num_streams * read_s + 0.1)
        told: list[Told] = []
        for group in cycle(asked.read_beside):
            if any(task.done() for task in streams):
                break
            told += await asyncio.gather(
                *(_later(index * _BETWEEN_S, service, num) for index, num in enumerate(group))
            )
            await asyncio.sleep(_BETWEEN_S)
        return Beside(records_of([await task for task in streams]), num_stream, told)

    async def _mix(self, service: ServedCalls, asked: Questions, price: StepPrice) -> Mix:
        """Requests of all lengths that come at random moments."""
        chance = random.Random(0)
        shortest, longest = min(asked.contexts), max(asked.contexts)
        read_s = price.seconds(self._features((shortest + longest) // 2))
        step_s = price.seconds((1.0, 0.0, 0.0, 3.0, 1.5 * (shortest + longest)))
        rate = asked.mixed_share / (read_s + sum(asked.mixed_output) / 2 * step_s / 3)
        tasks, begun = [], self._now()
        for _ in range(asked.num_mixed):
            num = chance.randint(shortest, longest)
            tasks.append((num, asyncio.create_task(service.ask(num, chance.randint(*asked.mixed_output)))))
            begun += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, begun - self._now()))
        calls = [(num, await task) for num, task in tasks]
        return Mix([Mixed(call.record, told_by(call, num)) for num, call in calls if call.record is not None])


@dataclass(frozen=True, slots=True)
class _Answers:
    """What the service told. `alone`: all steps that ran alone, `reads` and `streams` among them; `together`:
    of prompts and streams, in the `rounds`. `pace`: of the machine behind `alone`.
    """

    reads: Sequence[Read]
    streams: Sequence[Measured]
    alone: list[Measured]
    rounds: Sequence[Beside]
    together: list[Measured]
    mix: Mix
    pace: Pace


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt alone: its steps, and the seconds until its first token came that no step took."""

    num_tokens: int
    measured: Measured
    rest_s: float


async def _later(seconds: float, service: ServedCalls, num_tokens: int) -> Told:
    await asyncio.sleep(seconds)
    # two: who wants one only is answered by the prefill worker alone
    return await service.read(num_tokens, 2)


def typical(values: Sequence[float]) -> float:
    """The mean: queues are made of what things take on average. Without those of twice the median."""
    limit = _OUTLIER * statistics.median(values)
    return statistics.fmean(value for value in values if value <= limit)


def features_of_prompt(num_tokens: int, token_budget: int) -> Features:
    """Of all the steps that read a prompt together."""
    return features_behind(num_tokens, 0, token_budget)


def features_behind(num_tokens: int, num_cached: int, token_budget: int) -> Features:
    """The same, of `num_tokens` behind cached ones."""
    num_steps, pairs = 0, 0.0
    for start in range(0, num_tokens, token_budget):
        num_new = min(token_budget, num_tokens - start)
        num_steps += 1
        pairs += num_new * (num_cached + start + 0.5 * num_new)
    return float(num_steps), float(num_tokens), pairs, 0.0, 0.0


def read_seconds(reads: Sequence[Read], num_tokens: int) -> float:
    """What a prompt takes alone, between those that were measured."""
    lengths, seconds = [read.num_tokens for read in reads], [read.measured.seconds for read in reads]
    return float(np.interp(num_tokens, lengths, seconds))


def num_while_read(reads: Sequence[Read], num_tokens: int, batch: int, step_s: float) -> int:
    """How many tokens the first of `batch` streams has got when the last one's prompt has been read: twice
    what reading takes alone, since the streams run beside it.
    """
    return int(2.0 * (batch - 1) * read_seconds(reads, num_tokens) / step_s)


def front_of(reads: Sequence[Read], message_s: float) -> FrontPrice:
    """What prompts wait for besides their steps and two messages, on a line over their lengths."""
    lengths = np.array([read.num_tokens for read in reads], dtype=float)
    waits = np.array([read.rest_s for read in reads]) - 2 * message_s
    slope, level = np.polyfit(lengths, waits, 1) if len(reads) > 1 else (0.0, float(waits.mean()))
    if slope < 0.0:
        slope, level = 0.0, float(np.median(waits))
    return FrontPrice(max(0.0, float(level)), float(slope))


def busy_of(reads: Sequence[Read], beside: Sequence[Told]) -> float:
    """How much longer a prompt waits, besides queue and steps, while workers compute on the same cores."""
    if not beside:
        return 0.0
    lengths, waits = [read.num_tokens for read in reads], [read.rest_s for read in reads]
    more = [told.rest_s - float(np.interp(told.num_tokens, lengths, waits)) for told in beside]
    return max(0.0, statistics.median(more))


def pace_of(records: Sequence[RequestRecord]) -> float | None:
    """Seconds of a step while all of them stream; None if they hardly do. Tokens may come several at a time,
    so it is their number in that time that counts, not the pauses between them.
    """
    first, last = all_streaming(records)
    num_steps = num_between(records, first, last)
    return (last - first) / num_steps if num_steps >= _MIN_STEPS else None
