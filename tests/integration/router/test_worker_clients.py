"""GrpcWorker against the workers' real service over a real socket; behind the service a scripted worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from core.errors import (
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    ReservationRefused,
    ServingError,
    StaleEpoch,
    StepFailed,
    WorkerDraining,
    WorkerError,
    WorkerLost,
)
from core.ids import Epoch, RequestId, Role, TicketId
from core.jobs import CancelJob, GenerateJob, PrefillJob, SampleStart
from core.peer_security import PeerSecurity
from protos.service import serve_worker
from router.worker_clients import GrpcWorker
from tests.unit.router.scripted import ScriptedWorker, answer, new_request, new_status

WAIT_S = 5.0


@dataclass
class Line:
    """A scripted worker, the server in front of it and a client of it."""

    worker: ScriptedWorker
    server: Any
    client: GrpcWorker

    async def kill(self) -> None:
        """All connections break, nothing is said."""
        await self.server.stop(grace=None)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    worker = ScriptedWorker(Role.DECODE, "d", epoch=7)
    server, port = await serve_worker(worker, "127.0.0.1", PeerSecurity())
    worker.ref = replace(worker.ref, address=f"127.0.0.1:{port}")
    client = GrpcWorker(worker.ref)
    yield Line(worker, server, client)
    await client.close()
    await server.stop(grace=None)


def _generate_job(**request: Any) -> GenerateJob:
    return GenerateJob(new_request(**request), (SampleStart(0),), None, 1, 30.0)


def _prefill_job() -> PrefillJob:
    return PrefillJob(new_request(logprobs=2), (SampleStart(0),), TicketId(""), None, 1, 30.0)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the other side of the socket sets no event
            await asyncio.sleep(0.005)


async def test_calls_and_their_answers_arrive_as_they_were_sent(line: Line) -> None:
    job = _prefill_job()
    line.worker.num_cached_tokens = 4
    result = await line.client.prefill(job)
    assert line.worker.prefills == [job]
    assert result.deltas[0].token_ids == tuple(answer(job.request, 0)[:1])
    assert result.deltas[0].logprobs[0].logprob == -0.25
    assert result.num_cached_tokens == 4
    generate = _generate_job(max_tokens=20, num_samples=1)
    events = [event async for event in line.client.generate(generate)]
    assert line.worker.generates == [generate]
    assert [token for event in events for token in event.delta.token_ids] == answer(generate.request, 0)
    cancel = CancelJob(RequestId("r-0"), TicketId("ab" * 16), "test")
    await line.client.cancel(cancel)
    assert line.worker.cancels == [cancel]
    line.worker.exposition = b"# TYPE a gauge\na 1\n"
    assert await line.client.metrics() == line.worker.exposition


async def test_the_watch_gives_a_digest_and_then_what_comes(line: Line) -> None:
    events = line.client.watch()
    assert (await anext(events)).digest == (0, 0)
    line.worker.beat()
    assert (await anext(events)).status == new_status(line.worker.ref)
    await events.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [
        ReservationRefused("no room", worker_id="d"),
        WorkerDraining("draining"),
        StepFailed("boom"),
        Overloaded("full", retry_after_s=2),
        InvalidRequest("no", param="prompt"),
        ContextTooLong("long", num_prompt_tokens=9),
        ServingError("something new"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_that_the_worker_sends_is_that_error(line: Line, error: ServingError) -> None:
    line.worker.on_prefill = line.worker.on_generate = lambda job: error
    with pytest.raises(type(error)) as prefilled:
        await line.client.prefill(_prefill_job())
    with pytest.raises(type(error)) as generated:
        await anext(line.client.generate(_generate_job()))
    for caught in (prefilled.value, generated.value):
        assert (type(caught), caught.message, caught.details) == (type(error), error.message, error.details)


async def test_a_fault_inside_the_worker_is_an_error_and_not_a_hang(line: Line) -> None:
    def broken(job: object) -> ServingError | None:
        raise RuntimeError("inside")

    line.worker.on_prefill = broken
    with pytest.raises(ServingError) as caught:
        await line.client.prefill(_prefill_job())
    assert not isinstance(caught.value, WorkerError)


async def test_a_message_for_another_incarnation_is_refused(line: Line) -> None:
    stranger = GrpcWorker(replace(line.worker.ref, epoch=Epoch(8)))
    for call in (stranger.prefill(_prefill_job()), stranger.metrics(), anext(stranger.watch())):
        with pytest.raises(StaleEpoch):
            await call
    await stranger.close()


async def test_a_worker_that_nobody_listens_for_is_lost_at_once(line: Line) -> None:
    await line.kill()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerLost) as caught:
            await line.client.prefill(_prefill_job())
        assert caught.value.details["worker_id"] == "d"
        with pytest.raises(WorkerLost):
            await anext(line.client.watch())


async def test_a_death_ends_calls_in_flight_at_once(line: Line) -> None:
    line.worker.hold, line.worker.pause_at = asyncio.Event(), 2
    events = line.client.generate(_generate_job())
    watch = line.client.watch()
    await anext(watch)
    await anext(events)
    await anext(events)
    calls = [
        asyncio.ensure_future(call)
        for call in (line.client.prefill(_prefill_job()), anext(events), anext(watch))
    ]
    await _until(lambda: line.worker.num_open_calls == 2)
    await line.kill()
    async with asyncio.timeout(1.0):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, WorkerLost) for outcome in outcomes), outcomes


async def test_a_connection_that_was_let_go_of_loses_the_worker_for_calls_in_flight_and_later_ones(
    line: Line,
) -> None:
    line.worker.hold, line.worker.pause_at = asyncio.Event(), 2
    events = line.client.generate(_generate_job())
    await anext(events)
    await anext(events)
    in_flight = [asyncio.ensure_future(call) for call in (line.client.prefill(_prefill_job()), anext(events))]
    await _until(lambda: line.worker.num_open_calls == 2)
    await line.client.close()
    async with asyncio.timeout(WAIT_S):
        outcomes = await asyncio.gather(
            *in_flight,
            line.client.prefill(_prefill_job()),
            anext(line.client.generate(_generate_job())),
            anext(line.client.watch()),
            line.client.cancel(CancelJob(RequestId("r-0"))),
            line.client.metrics(),
            return_exceptions=True,
        )
    assert all(isinstance(outcome, WorkerLost) for outcome in outcomes), outcomes


async def test_whoever_stops_listening_stops_the_call_at_the_worker(line: Line) -> None:
    line.worker.pause_at, line.worker.hold = 2, asyncio.Event()
    events = line.client.generate(_generate_job())
    await anext(events)
    prefill = asyncio.create_task(line.client.prefill(_prefill_job()))
    await _until(lambda: line.worker.num_open_calls == 2)
    await events.aclose()  # type: ignore[attr-defined]
    prefill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    await _until(lambda: line.worker.num_open_calls == 0)
