"""The server's own TTFT and ITL (case 56): whoever produced a token counts once, from that token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from core.errors import StepFailed, WorkerLost
from core.ids import Role
from core.telemetry import E2E_SECONDS, ITL_SECONDS, TTFT_SECONDS
from router.app import create_app
from router.config import RouterConfig
from tests.doubles import FakeTime, settle
from tests.unit.router.api import Api, Members, events_of, new_model, serving
from tests.unit.router.model_answers import REMOTE, bare_call, two_workers
from tests.unit.router.scripted import ScriptedWorker


@asynccontextmanager
async def timed(*workers: ScriptedWorker, **settings: Any) -> AsyncIterator[tuple[Api, FakeTime]]:
    """Where nothing takes time but what a test lets pass."""
    members, time = Members(workers), FakeTime()
    config = RouterConfig(**settings)
    app = create_app(config, new_model(), members, members.connect, clock=time, sleep=time.sleep)
    async with app.router.lifespan_context(app):
        await settle()
        api = Api(app)
        async with api.http:
            yield api, time


async def measured(api: Api, name: str) -> tuple[float, float]:
    """How many, and the sum of their seconds."""
    return await api.metric(f"{name}_count"), round(await api.metric(f"{name}_sum"), 6)


async def pass_by(time: FakeTime, seconds: float, *workers: ScriptedWorker) -> None:
    """In steps in which no worker falls silent."""
    for _ in range(round(seconds * 2)):
        for worker in workers:
            worker.beat()
        await time.pass_by(0.5)


async def test_the_piece_that_only_names_the_role_is_no_token() -> None:
    prefill, decode = two_workers(pause_at=1)
    prefill.hold = asyncio.Event()
    async with timed(prefill, decode, **REMOTE) as (api, time):
        asked = asyncio.create_task(api.chat(stream=True, max_tokens=4))
        await settle()
        await pass_by(time, 1.5, prefill, decode)
        assert await measured(api, TTFT_SECONDS) == (0, 0.0)
        prefill.hold.set()
        await settle()
        assert await measured(api, TTFT_SECONDS) == (1, 1.5)
        await pass_by(time, 2.0, prefill, decode)
        decode.resume.set()
        pieces = [event["choices"][0]["delta"] for event in events_of(await asked) if event is not None]
        assert pieces[0].get("role") == "assistant"
        # three gaps, of which the first was long; with the first token they are the whole
        assert await measured(api, ITL_SECONDS) == (3, 2.0)
        assert await measured(api, E2E_SECONDS) == (1, 3.5)


async def test_whoever_produced_a_token_counts_once_and_whoever_did_not_never() -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001) as api:
        await api.complete(prompt="the", max_tokens=4)
        await api.complete(prompt="the", max_tokens=1, stream=True)
        await api.chat(max_tokens=1)
        assert await api.metric(f"{TTFT_SECONDS}_count") == 3, "those of one token, too"
        assert await api.metric(f"{ITL_SECONDS}_count") == 3, "but they have no gap"
        assert (await api.complete(prompt="the", max_tokens=0)).status_code == 200
        assert (await api.complete(prompt="the", max_tokens=-1)).status_code == 400
        assert (await api.complete(prompt="the", model="none")).status_code == 404
        worker.on_generate = lambda job: StepFailed("boom")
        assert (await api.complete(prompt="the")).status_code == 500
        worker.on_generate, worker.pause_at = None, 0
        task, gone, _ = await bare_call(api, {})
        await settle()
        gone.set()
        await task
        assert await api.metric(f"{TTFT_SECONDS}_count") == 3
        # with two prompts in one body there are two first tokens; two samples of one have one
        worker.pause_at = None
        await api.complete(prompt=["the", "the"], max_tokens=2)
        await api.complete(prompt="the", max_tokens=2, n=2)
        assert await api.metric(f"{TTFT_SECONDS}_count") == 6


async def test_a_stream_that_is_resumed_has_one_first_token_and_the_pause_is_a_gap() -> None:
    first, second = ScriptedWorker(Role.DECODE, "d0"), ScriptedWorker(Role.DECODE, "d1")
    for worker in (first, second):
        worker.break_at[3] = WorkerLost("the connection broke", worker_id=worker.ref.worker_id)
    async with serving(first, second, refusal_backoff_s=0.001) as api:
        response = await api.complete(prompt="the", max_tokens=6)
        assert response.json()["usage"]["completion_tokens"] == 6
        assert len(first.generates) + len(second.generates) > 1
        assert await api.metric(f"{TTFT_SECONDS}_count") == 1
        assert await api.metric(f"{ITL_SECONDS}_count") == 5
