"""Clients that go away take their work with them."""

from __future__ import annotations

import asyncio

import pytest

from core.ids import Role
from tests.doubles import settle
from tests.unit.router.api import serving
from tests.unit.router.model_answers import (
    bare_call,
)
from tests.unit.router.scripted import ScriptedWorker


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_stops_all_its_work_at_once(stream: bool, n: int) -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=2)
    async with serving(worker) as api:
        task, gone, sent = await bare_call(api, {"stream": stream, "n": n, "max_tokens": 9})
        await settle()
        assert worker.num_open_calls == 1
        assert bool(sent) is stream
        gone.set()
        await task
        await settle()
        assert worker.num_open_calls == 0
        assert len(worker.cancels) == 1
        assert await api.metric("baton_requests_total", outcome="aborted", reason="cancelled") == 1
        assert await api.metric("baton_router_requests", state="running") == 0


async def test_a_client_that_goes_away_leaves_the_other_call_of_the_same_name_alone() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=2)
    name = {"X-Request-Id": "the-same"}
    async with serving(worker) as api:
        other = asyncio.create_task(
            api.post("/v1/completions", name, prompt="the", max_tokens=5, seed=3, ignore_eos=True)
        )
        task, gone, _ = await bare_call(api, {"stream": True}, "the-same")
        await settle()
        assert worker.num_open_calls == 2
        gone.set()
        await task
        await settle()
        assert worker.num_open_calls == 1
        (cancel,) = worker.cancels
        worker.resume.set()
        response = await other
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "the-same"
    assert response.json()["usage"]["completion_tokens"] == 5
    ids = {job.request.request_id for job in worker.generates}
    assert len(ids) == 2
    assert cancel.request_id in ids - {f"{response.json()['id']}-0"}


async def test_a_client_that_goes_away_while_waiting_for_its_turn_leaves_the_line() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=1)
    async with serving(worker, max_concurrency=1) as api:
        first = asyncio.create_task(api.complete(prompt="the", max_tokens=2))
        await settle()
        task, gone, _ = await bare_call(api, {})
        await settle()
        assert await api.metric("baton_router_requests", state="waiting") == 1
        gone.set()
        await task
        assert await api.metric("baton_router_requests", state="waiting") == 0
        worker.resume.set()
        assert (await first).status_code == 200
        assert len(worker.generates) == 1


async def test_a_server_that_takes_the_call_away_stops_its_work_too() -> None:
    worker = ScriptedWorker(Role.DECODE, "d", pause_at=2)
    async with serving(worker) as api:
        task, _, _ = await bare_call(api, {"stream": True})
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        assert worker.num_open_calls == 0
        assert len(worker.cancels) == 1
