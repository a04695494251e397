"""`POST /admin/drain`: it answers when the worker takes no new work, and says plainly what cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from core.errors import LastOfRole, UnknownWorker
from core.ids import Epoch, Role, WorkerId
from router.app import create_app
from router.config import RouterConfig
from tests.doubles import FakeTime, settle
from tests.unit.router.api import Api, Members, new_model, serving
from tests.unit.router.model_answers import error_message
from tests.unit.router.scripted import ScriptedWorker, new_status


class Desk:
    """Takes orders down; what comes of them is the test's business."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.orders: list[tuple[str, float | None, bool]] = []
        self.epoch = worker.announcement().block_epoch
        self.failure: Exception | None = None

    async def drain(self, worker_id: WorkerId, within_s: float | None, is_forced: bool) -> Epoch:
        self.orders.append((worker_id, within_s, is_forced))
        if self.failure is not None:
            raise self.failure
        return self.epoch


@asynccontextmanager
async def draining(desk: Desk, *workers: ScriptedWorker) -> AsyncIterator[tuple[Api, FakeTime]]:
    members, time = Members(workers), FakeTime()
    app = create_app(
        RouterConfig(), new_model(), members, members.connect, drains=desk, clock=time, sleep=time.sleep
    )
    async with app.router.lifespan_context(app):
        await settle()
        api = Api(app)
        async with api.http:
            yield api, time


async def test_it_answers_when_the_worker_says_that_it_takes_no_new_work() -> None:
    goes, stays = ScriptedWorker(Role.DECODE, "d0"), ScriptedWorker(Role.DECODE, "d1")
    desk = Desk(goes)
    async with draining(desk, goes, stays) as (api, _):
        asked = asyncio.create_task(api.http.post("/admin/drain", json={"worker": "d0", "within_s": 7}))
        await settle()
        assert not asked.done()
        goes.status = new_status(goes.ref, is_draining=True)
        goes.beat()
        response = await asked
        assert (response.status_code, response.json()) == (200, {"worker": "d0", "draining": True})
        assert desk.orders == [("d0", 7, False)]
        assert (await api.http.get("/ready")).json()["workers"] == {"prefill": 0, "decode": 1}


async def test_a_worker_that_does_not_hear_it_is_an_error_after_a_while() -> None:
    worker = ScriptedWorker(Role.DECODE, "d0")
    async with draining(Desk(worker), worker) as (api, time):
        asked = asyncio.create_task(api.http.post("/admin/drain", json={"worker": "d0", "force": True}))
        await settle()
        for _ in range(11):
            worker.beat()
            await time.pass_by(1.0)
        assert "has not heard" in error_message(await asked, 503, None, "worker_error")


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (UnknownWorker("there is no worker 'x'", param="worker"), 404, "unknown_worker"),
        (LastOfRole("d0 is the last decode worker", param="worker"), 409, "last_of_role"),
        (ConnectionError("registry: TimeoutError"), 503, "no_worker_available"),
    ],
)
async def test_what_cannot_be_is_told(failure: Exception, status: int, code: str) -> None:
    worker = ScriptedWorker(Role.DECODE, "d0")
    desk = Desk(worker)
    desk.failure = failure
    async with draining(desk, worker) as (api, _):
        response = await api.http.post("/admin/drain", json={"worker": "d0"})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "worker"),
        ({"worker": ""}, "worker"),
        ({"worker": "d0", "within_s": "7"}, "within_s"),
        ({"worker": "d0", "within_s": True}, "within_s"),
        ({"worker": "d0", "within_s": -1}, "within_s"),
        ({"worker": "d0", "within_s": 1e9}, "within_s"),
        ({"worker": "d0", "force": 1}, "force"),
        ({"worker": "d0", "when": 1}, "when"),
    ],
)
async def test_a_wrong_field_is_named_and_nobody_is_drained(body: dict[str, Any], param: str) -> None:
    worker = ScriptedWorker(Role.DECODE, "d0")
    desk = Desk(worker)
    async with draining(desk, worker) as (api, _):
        error_message(await api.http.post("/admin/drain", json=body), 400, param)
        assert desk.orders == []


async def test_where_nobody_would_replace_a_worker_none_is_drained() -> None:
    async with serving(ScriptedWorker(Role.DECODE, "d0")) as api:
        response = await api.http.post("/admin/drain", json={"worker": "d0"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker_available")
