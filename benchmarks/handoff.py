"""The handoff of a prompt between two worker processes: what it costs, and what of it prefill hides.

Real workers in processes of their own, real gRPC, no Ray and no router: this process calls them as a router
does. Decode is one process; each transport has a prefill process. Everything is paired: round by round the
ways are taken in turn, and ratios are those within a round.

- *second token*: from the request to the second token. Split: prefill reads the prompt and hands it over;
  local: decode reads it by itself. One request at a time.
- *hidden*: 1 - (commit acknowledged - prefill's end) / (time in which computed blocks waited for their
  acknowledgement), from prefill's own telemetry.
- *steps*: pauses between the tokens of running streams on decode. *read* while prefill reads a prompt and
  hands it over, against reading one of the same length for one token, which is not handed over; *burst* while
  prefill hands over a prompt that it has cached and decode has not, against only looking it up: all bytes at
  once. *usual* is the median pause before, with nothing beside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count, pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.worker_process import WorkerSpec, worker_processes
from cluster.config import config_from_settings
from cluster.security import peer_security
from cluster.settings import settings_from_flags
from core import telemetry
from core.config import merge
from core.ids import RequestId, Role, TicketId, WorkerId, WorkerRef, new_ticket_id
from core.jobs import CancelJob, GenerateJob, PrefillJob, SampleStart
from core.peer_security import PeerSecurity
from core.request import Request, SamplingParams
from router.worker_clients import GrpcWorker

DECODE = WorkerId("decode")
WAYS = {
    "shm": {"shm": "required"},
    "distributed": {"shm": "never", "distributed": "required"},
    "grpc": {"shm": "never", "distributed": "never"},
}
_TIME_LEFT_S = 120.0
_REST_S = 0.1  # between two requests, so that none begins beside the last steps of another
_NUM_TOKENS_OUT = 4
_NUM_STREAM_TOKENS = 100  # of a running stream's prompt
_VOCABULARY = range(100, 10_000)


class Requests:
    """Prompts of random words: no two begin alike, so nothing is cached that should not be."""

    def __init__(self) -> None:
        self._chance = random.Random(os.getpid())
        self._numbers = count()

    def make(self, num_tokens: int, max_tokens: int) -> Request:
        prompt = tuple(self._chance.choices(_VOCABULARY, k=num_tokens))
        return self.again(prompt, max_tokens)

    def again(self, prompt: tuple[int, ...], max_tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        return Request(RequestId(f"handoff-{next(self._numbers)}"), prompt, sampling)


class Worker:
    """One worker process and what it counts."""

    def __init__(self, ref: WorkerRef, security: PeerSecurity) -> None:
        self.ref = ref
        self.calls = GrpcWorker(ref, security)

    async def counted(self, *names: str) -> list[float]:
        """The sum of each series over its labels."""
        text = (await self.calls.metrics()).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return [sum(sample.value for sample in samples if sample.name == name) for name in names]

    async def prefill(self, request: Request, decode: WorkerRef | None) -> tuple[TicketId, tuple[int, ...]]:
        """Read the prompt; the ticket under which it is handed to `decode`, and the first token."""
        ticket_id = new_ticket_id()
        job = PrefillJob(request, (SampleStart(0),), ticket_id, decode, 0, _TIME_LEFT_S)
        result = await self.calls.prefill(job)
        return ticket_id, result.deltas[0].token_ids

    async def token_times(
        self, request: Request, emitted: tuple[int, ...] = (), ticket_id: TicketId | None = None
    ) -> AsyncGenerator[float, None]:
        """When each token came that is not emitted yet."""
        job = GenerateJob(request, (SampleStart(0, emitted),), ticket_id, 0, _TIME_LEFT_S)
        async for event in self.calls.generate(job):
            now = time.perf_counter()
            for _ in event.delta.token_ids:
                yield now


async def split(prefill: Worker, decode: Worker, request: Request) -> tuple[float, float]:
    """Seconds to the first and to the second token."""
    started = time.perf_counter()
    ticket_id, first = await prefill.prefill(request, decode.ref)
    first_at = time.perf_counter()
    times = [at async for at in decode.token_times(request, first, ticket_id)]
    return first_at - started, times[0] - started


async def local(decode: Worker, request: Request) -> tuple[float, float]:
    started = time.perf_counter()
    times = [at async for at in decode.token_times(request)]
    return times[0] - started, times[1] - started


# ---------------------------------------------------------------- second token, hidden share

_HANDED = (
    f"{telemetry.KV_EXPOSED_SECONDS}_sum",
    f"{telemetry.KV_PUSH_SECONDS}_sum",
    f"{telemetry.KV_PUSH_SECONDS}_count",
)


async def handed_over(prefill: Worker, before: Sequence[float]) -> tuple[float, float]:
    """Exposed and pushing seconds of the one ticket that was committed since `before`."""
    while True:
        exposed, pushing, num = await prefill.counted(*_HANDED)
        if num > before[2]:
            return exposed - before[0], pushing - before[1]
        await asyncio.sleep(0.01)  # prefill has not heard of the commit yet


async def measure_tokens(
    options: argparse.Namespace, prefills: dict[str, Worker], decode: Worker, requests: Requests
) -> list[str]:
    firsts: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    exposed: dict[str, list[float]] = {}
    pushing: dict[str, list[float]] = {}
    for number in range(-options.warm_up, options.rounds):
        for way in (*prefills, "local"):
            request = requests.make(options.tokens, _NUM_TOKENS_OUT)
            await asyncio.sleep(_REST_S)
            if way == "local":
                first, second = await local(decode, request)
            else:
                before = await prefills[way].counted(*_HANDED)
                first, second = await split(prefills[way], decode, request)
                was_exposed, was_pushing = await handed_over(prefills[way], before)
            if number < 0:
                continue
            firsts.setdefault(way, []).append(first)
            seconds.setdefault(way, []).append(second)
            if way != "local":
                exposed.setdefault(way, []).append(was_exposed)
                pushing.setdefault(way, []).append(was_pushing)
    own = statistics.median(seconds["local"])
    lines = [f"| local | {ms(statistics.median(firsts['local']))} | {ms(own)} | | | | |"]
    for way in prefills:
        paired = ratio_of(seconds[way], seconds["local"])
        hidden = [1 - out / all_ for out, all_ in zip(exposed[way], pushing[way], strict=True)]
        lines.append(
            f"| {way} | {ms(statistics.median(firsts[way]))} | {ms(statistics.median(seconds[way]))} "
            f"| {paired:.3f} | {ms(statistics.median(pushing[way]))} | {ms(statistics.median(exposed[way]))} "
            f"| {statistics.median(hidden):.2f} |"
        )
    return [
        "| way | first token ms | second token ms | of local | pushing ms | exposed ms | hidden |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *lines,
    ]


# ---------------------------------------------------------------- steps of running streams


class Streams:
    """Streams that run on decode, and when their tokens came."""

    def __init__(self, decode: Worker, requests: Sequence[Request]) -> None:
        self.times: list[list[float]] = [[] for _ in requests]
        self._tasks = [
            asyncio.create_task(self._follow(decode, request, times))
            for request, times in zip(requests, self.times, strict=True)
        ]

    async def until_each_has(self, num_tokens: int) -> None:
        while min(map(len, self.times)) < num_tokens:  # noqa: ASYNC110 (for the streams, an event each)
            await asyncio.sleep(0.01)

    def pauses(self, begin: float, end: float) -> list[float]:
        """Those of which any part lies between the two moments, in full length."""
        return [
            after - before
            for times in self.times
            for before, after in pairwise(times)
            if after > begin and before < end
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, decode: Worker, request: Request, times: list[float]) -> None:
        async with aclosing(decode.token_times(request)) as found:
            async for at in found:
                times.append(at)


@asynccontextmanager
async def running(decode: Worker, requests: Requests, num_streams: int) -> AsyncIterator[Streams]:
    streams = Streams(decode, [requests.make(_NUM_STREAM_TOKENS, 2000) for _ in range(num_streams)])
    try:
        await streams.until_each_has(8)
        yield streams
    finally:
        await streams.stop()


async def pauses_while(
    streams: Streams, prefill: Worker, decode: Worker, request: Request, *, is_handed_over: bool
) -> tuple[float, list[float]]:
    """Seconds to the first token of `request`, and the streams' pauses while prefill reads it and, if it is
    handed over, until the commit.
    """
    before = await prefill.counted(*_HANDED)
    begin = time.perf_counter()
    ticket_id, _ = await prefill.prefill(request, decode.ref if is_handed_over else None)
    first_at = time.perf_counter()
    if is_handed_over:
        await handed_over(prefill, before)
    end = time.perf_counter()
    num_tokens = min(map(len, streams.times))
    await streams.until_each_has(num_tokens + 4)  # the pause that was open has ended, and things settle
    if is_handed_over:
        await decode.calls.cancel(CancelJob(request.request_id, ticket_id, "measured"))
    return first_at - begin, streams.pauses(begin, end)


async def measure_steps(
    options: argparse.Namespace, prefills: dict[str, Worker], decode: Worker, requests: Requests
) -> list[str]:
    found: dict[tuple[str, str], list[list[float]]] = {}
    firsts: dict[tuple[str, str], list[float]] = {}
    usuals: dict[tuple[str, str], list[float]] = {}
    for number in range(-1, options.step_rounds):
        for way, prefill in prefills.items():
            async with running(decode, requests, options.streams) as streams:
                cold = requests.make(options.tokens, 1)
                cached = requests.again(cold.prompt_token_ids, 1)
                plans = [
                    ("read", requests.make(options.tokens, 2), True),
                    ("read alone", cold, False),
                    ("burst", requests.again(cold.prompt_token_ids, 2), True),
                    ("burst alone", cached, False),
                ]
                if number % 2:  # what comes later meets longer streams
                    plans = [plans[1], plans[0], plans[3], plans[2]]
                for name, request, is_handed_over in plans:
                    usual = streams.times[0][-1]
                    await asyncio.sleep(0.3)
                    first, pauses = await pauses_while(
                        streams, prefill, decode, request, is_handed_over=is_handed_over
                    )
                    if number >= 0:
                        found.setdefault((way, name), []).append(pauses)
                        firsts.setdefault((way, name), []).append(first)
                        alone = streams.pauses(usual, usual + 0.25)
                        usuals.setdefault((way, name), []).append(statistics.median(alone))
    lines = []
    for way in prefills:
        for name in ("read", "burst"):
            mine, other = found[way, name], found[way, f"{name} alone"]
            means = [[statistics.mean(pauses) for pauses in rounds] for rounds in (mine, other)]
            longest = [[max(pauses) for pauses in rounds] for rounds in (mine, other)]
            lines.append(
                f"| {way} {name} | {ms(statistics.median(means[1]))} | {ms(statistics.median(means[0]))} "
                f"| {ratio_of(means[0], means[1]):.2f} | {ms(statistics.median(longest[1]))} "
                f"| {ms(statistics.median(longest[0]))} | {ratio_of(longest[0], usuals[way, name]):.2f} "
                f"| {ms(statistics.median(usuals[way, name]))} | {ms(statistics.median(firsts[way, name]))} |"
            )
    return [
        f"| steps of {options.streams} streams | ms without push | with push | ratio | longest without "
        "| with | longest of usual | usual | first token ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *lines,
    ]


def ratio_of(mine: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


async def measure(options: argparse.Namespace) -> None:
    settings = settings_from_flags([f"--{text}" for text in options.set])
    settings = merge(settings, {"security": {"is_token_required": False}})  # all on the loopback device
    if options.model is not None:
        settings = merge(settings, {"engine": {"model": str(options.model)}})
    specs = [WorkerSpec(DECODE, Role.DECODE, settings)]
    for way in options.ways:
        own = merge(settings, {"prefill": {"bridge": WAYS[way]}})
        specs.append(WorkerSpec(WorkerId(way), Role.PREFILL, own))
    with worker_processes(specs) as found:
        security = peer_security(config_from_settings(settings).security, None)
        workers = {worker_id: Worker(ref, security) for worker_id, (ref, _) in found.items()}
        decode = workers.pop(DECODE)
        prefills = {str(worker_id): worker for worker_id, worker in workers.items()}
        requests = Requests()
        try:
            for part, rounds in ((measure_tokens, options.rounds), (measure_steps, options.step_rounds)):
                if rounds:
                    print("\n".join(await part(options, prefills, decode, requests)), flush=True)
        finally:
            for worker in (decode, *prefills.values()):
                await worker.calls.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder; the bundled model unless given")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--step-rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as flags of `baton serve`"
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
