"""Sending a workload to a server. Owns when each request is sent; what comes of it is in `measures`.

Runs on the benchmark's event loop.
"""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.measures import NoOverlap, Summary, summarize_batch, summarize_interruption
from benchmarks.streaming import Call, Endpoint, Stream, fetch
from benchmarks.workloads import NUM_TOKENS_BEFORE, Batch, Interruption
from core.telemetry import PLACEMENTS

_POLL_S = 0.002


async def run(endpoint: Endpoint, work: Batch | Interruption) -> Summary:
    """One run. Raises BrokenStream or NoOverlap: then there is no result."""
    if isinstance(work, Batch):
        return summarize_batch(await run_batch(endpoint, work))
    return await _run_interruption(endpoint, work)


async def run_batch(endpoint: Endpoint, batch: Batch) -> list[Stream]:
    """The streams in the order of their requests."""
    places = asyncio.Semaphore(batch.concurrency)

    async def in_a_place(call: Call) -> Stream:
        async with places:
            return await call.run()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(in_a_place(Call(endpoint, ask))) for ask in batch.asks]
    return [task.result() for task in tasks]


async def _run_interruption(endpoint: Endpoint, work: Interruption) -> Summary:
    calls = [Call(endpoint, ask) for ask in work.running]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call.run()) for call in calls]
        while min(len(call.times) for call in calls) < NUM_TOKENS_BEFORE:
            if any(task.done() for task in tasks):
                raise NoOverlap("a running stream ended before all of them ran")
            await asyncio.sleep(_POLL_S)
        long = await Call(endpoint, work.long).run()
    return summarize_interruption([task.result() for task in tasks], long)


async def placements(endpoint: Endpoint) -> dict[str, float]:
    """How many requests Baton's router has placed, by plan; empty for another server."""
    status, text = await fetch(endpoint.port, "/metrics")
    if status != 200:
        return {}
    return {
        sample.labels["plan"]: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == f"{PLACEMENTS}_total"
    }
