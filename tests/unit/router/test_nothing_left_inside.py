"""What the router reports to the autoscaler returns to nothing, however requests end (case 39).

A count that leaks would keep a pool of workers, or wake one, for ever.
"""

from __future__ import annotations

import asyncio

import pytest

from core.errors import StepFailed, WorkerLost
from core.ids import Role
from tests.doubles import settle
from tests.unit.router.api import Api, serving
from tests.unit.router.model_answers import REMOTE, bare_call, two_workers
from tests.unit.router.scripted import ScriptedWorker

INSIDE = ("open", "waiting", "waiting_tokens")


def inside(api: Api) -> tuple[float, ...]:
    stats = api.app.state.metrics.work.stats()
    return tuple(stats[name] for name in INSIDE)


def num_arrived(api: Api) -> float:
    return float(api.app.state.metrics.work.stats()["arrived"])


async def abort(api: Api, number: int) -> None:
    task, gone, _ = await bare_call(api, {"stream": number % 2 == 0, "max_tokens": 50}, f"gone-{number}")
    await settle()
    assert inside(api)[0] == 1
    gone.set()
    await task


async def test_streams_refusals_and_aborts_in_turn_leave_nothing_inside() -> None:
    prefill, decode = two_workers()
    async with serving(prefill, decode, **REMOTE) as api:
        for number in range(5):
            await api.complete(prompt="the", stream=True, max_tokens=4)
            assert (await api.complete(prompt="the", max_tokens=-1)).status_code == 400
            decode.pause_at = number % 3 + 1
            await abort(api, number)
            decode.pause_at = None
            prefill.hold = asyncio.Event()
            await abort(api, number)
            prefill.hold = None
            assert inside(api) == (0, 0, 0)
        assert num_arrived(api) == 15


@pytest.mark.parametrize("failure", [StepFailed("boom"), WorkerLost("gone")])
async def test_failures_leave_nothing_inside(failure: Exception) -> None:
    worker = ScriptedWorker(Role.DECODE, "d")
    worker.on_generate = lambda job: failure  # type: ignore[assignment, return-value]
    async with serving(worker, max_failures=1, refusal_backoff_s=0.001, worker_wait_s=0.05) as api:
        for stream in (False, True):
            await api.complete(prompt="the", stream=stream)
        assert inside(api) == (0, 0, 0)


async def test_requests_that_wait_for_a_pool_that_sleeps_count_until_their_clients_leave() -> None:
    """During a cold start: five wait, two leave, the others time out."""
    async with serving(worker_wait_s=30.0) as api:
        calls = [await bare_call(api, {"timeout": None, "stream": True}, f"w{number}") for number in range(5)]
        await settle()
        assert inside(api)[:2] == (5, 5)
        for task, gone, _ in calls[:2]:
            gone.set()
            await task
        assert inside(api)[:2] == (3, 3)
        assert inside(api)[2] > 0
        for task, gone, _ in calls[2:]:
            gone.set()
            await task
        assert inside(api) == (0, 0, 0)


async def test_whoever_is_refused_at_the_door_wakes_nobody() -> None:
    """Nothing that is refused arrives: not a wrong body, not a model that is not here, not one too many."""
    async with serving(worker_wait_s=30.0, max_concurrency=1, max_queue=1) as api:
        for body in ({"max_tokens": -1}, {"model": "none"}, {"prompt": 7}, {"temperature": "warm"}):
            assert (await api.complete(**{"prompt": "the", **body})).status_code in (400, 404)
        assert (num_arrived(api), inside(api)) == (0, (0, 0, 0))
        waiting = [await bare_call(api, {}, f"w{number}") for number in range(2)]
        await settle()
        before = (num_arrived(api), inside(api))
        assert before[1][1] > 0, "those that wait for the pool wake it"
        for _ in range(5):
            assert (await api.complete(prompt="the")).status_code == 429
        assert (num_arrived(api), inside(api)) == before
        for task, gone, _ in waiting:
            gone.set()
            await task
        assert inside(api) == (0, 0, 0)
