"""The ASGI application: routes, their wiring, and the life of what stands behind them.

Owns no logic of its own. Started and stopped by the ASGI lifespan, on the server's event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import orjson
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from core.clock import Clock, MonotonicClock
from core.errors import RequestError, ServingError, UnknownModel
from core.ids import Role
from router.accounts import Accounts
from router.admission import Admission
from router.api_call import ApiCall, chat_call, completion_call
from router.capture import captures_of
from router.chat_schema import ChatBody
from router.chat_wire import ChatWire
from router.completion_schema import CompletionBody
from router.completion_wire import CompletionWire
from router.config import RouterConfig
from router.debug_route import DebugRoute
from router.drain_route import DrainDesk, DrainRoute
from router.endpoint import Endpoint, Rooms
from router.exposition import WorkerExpositions, merge
from router.header_fields import header_fields
from router.http_errors import error_body, error_headers
from router.leases import Leases
from router.limits import LimitOwner, SoleOwner
from router.metrics import RouterMetrics
from router.pipeline import Pipeline
from router.recent_calls import RecentCalls
from router.role_route import RoleRoute
from router.role_watch import RoleDesk, RoleWatch
from router.schema import parse
from router.served_model import ServedModel
from router.status_page import StatusPage
from router.tenants import Tenants
from router.tracing import tracing_of
from router.worker_table import Sleep, WorkerTable
from router.workers import Connect, MembershipSource


def create_app(
    config: RouterConfig,
    model: ServedModel,
    membership: MembershipSource,
    connect: Connect,
    *,
    limit_owner: LimitOwner | None = None,
    roles: RoleDesk | None = None,
    drains: DrainDesk | None = None,
    num_routers: int = 1,
    asleep: Callable[[], Collection[Role]] = tuple,
    clock: Clock | None = None,
    chance: random.Random | None = None,
    sleep: Sleep = asyncio.sleep,
) -> Starlette:
    """The router's HTTP application for `model`, on the workers that `membership` names and `connect`
    reaches.

    Calling `app.state.close()` on the event loop ends open requests with a typed error: the service stops.
    `asleep`: roles without a worker that wake for the next request, so that the service is ready.
    `limit_owner` hands out the tenants' limits to the `num_routers` routers (None: this one has them all);
    `roles` decides who changes its role, `drains` who is drained and replaced (None: nobody is). `clock`,
    `chance` and `sleep` are for tests.
    """
    clock = clock or MonotonicClock()
    metrics = RouterMetrics()
    table = WorkerTable(config, membership, connect, clock, sleep)
    metrics.watch_table(table)
    pipeline = Pipeline(config, table, metrics, clock, chance or random.Random(), sleep)
    leases = Leases(limit_owner or SoleOwner(), clock, config.tenants.lease_s, num_routers)
    admission = Admission(config, model, table, metrics, clock, leases)
    tenants = Tenants(config.tenants, sleep)
    accounts = Accounts(config, model.name, leases, metrics, clock)
    tracing = tracing_of(config.tracing, clock)
    captures = captures_of(config.capture, chance or random.Random())
    recent = RecentCalls()
    rooms = Rooms(config, model, admission, pipeline, metrics, tenants, accounts, recent, tracing, captures)
    role_watch = RoleWatch(table, roles, clock, sleep)
    pages = _Pages(config, model, table, metrics, tenants, asleep, role_watch)
    status_page = StatusPage(config, model.name, table, metrics, tenants, recent, clock)

    def read_completion(body: Any, max_context: int) -> ApiCall:
        return completion_call(parse(CompletionBody, body), model, config, max_context)

    def read_chat(body: Any, max_context: int) -> ApiCall:
        return chat_call(parse(ChatBody, body), model, config, max_context)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await table.start()
        tasks = [
            asyncio.create_task(tenants.keep_keys(), name="keys"),
            asyncio.create_task(leases.keep(), name="leases"),
            asyncio.create_task(role_watch.run(), name="roles"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await leases.leave()
            await asyncio.to_thread(accounts.stop)
            if captures is not None:
                await asyncio.to_thread(captures.close)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            await pipeline.stop()
            await table.stop()

    token_bytes = model.tokenizer.bytes
    completions = Endpoint("completions", rooms, read_completion, CompletionWire(token_bytes))
    chat = Endpoint("chat", rooms, read_chat, ChatWire(token_bytes))
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/debug/route", DebugRoute(rooms, read_completion, read_chat).answer, methods=["POST"]),
            Route("/admin/role", RoleRoute(table, roles, tenants).answer, methods=["POST"]),
            Route("/admin/drain", DrainRoute(table, drains, tenants, clock).answer, methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/", pages.models),
            Route("/v1/models/{model_id:path}", pages.model),
            Route("/health", pages.health),
            Route("/ready", pages.ready),
            Route("/metrics", pages.metrics),
            *status_page.routes(),
        ],
        exception_handlers={HTTPException: pages.refused, ServingError: pages.failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.close = pipeline.close
    app.state.metrics = metrics
    return app


class _Pages:
    """The small GET routes."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        table: WorkerTable,
        metrics: RouterMetrics,
        tenants: Tenants,
        asleep: Callable[[], Collection[Role]],
        role_watch: RoleWatch,
    ) -> None:
        self._tenants = tenants
        self._asleep = asleep
        self._role_watch = role_watch
        self._model = model
        self._table = table
        self._metrics = metrics
        self._expositions = WorkerExpositions(config.metrics_timeout_s)

    async def models(self, request: HTTPRequest) -> Response:
        self._tenants.caller(header_fields(request.headers.raw).get("authorization"))
        return _json({"object": "list", "data": [self._model_object()]})

    async def model(self, request: HTTPRequest) -> Response:
        self._tenants.caller(header_fields(request.headers.raw).get("authorization"))
        name = request.path_params["model_id"]
        if name != self._model.name:
            raise UnknownModel(f"the model {name[:100]!r} does not exist", param="model")
        return _json(self._model_object())

    async def health(self, request: HTTPRequest) -> Response:
        """The router itself is alive."""
        return _json({"status": "ok"})

    async def ready(self, request: HTTPRequest) -> Response:
        """Whether requests can be answered. A decode worker can do all by itself, and if none is left a
        prefill worker becomes one within a second; what is missing is named. A pool that sleeps is woken by
        the next request, which waits for it.
        """
        counts = {role: len(self._table.usable(role)) for role in Role}
        asleep = [role.value for role in self._asleep() if counts[role] == 0]
        has_decode = counts[Role.DECODE] > 0 or self._role_watch.is_filling
        is_ready = has_decode or Role.DECODE.value in asleep
        status = "ready" if has_decode else "scaled to zero" if is_ready else "not ready"
        body = {
            "status": status,
            **({"asleep": asleep} if asleep else {}),
            "degraded": [role.value for role, count in counts.items() if count == 0],
            "workers": {role.value: count for role, count in counts.items()},
        }
        return _json(body, 200 if is_ready else 503)

    async def metrics(self, request: HTTPRequest) -> Response:
        """They tell of all tenants, so they need an operator's key where keys are asked for."""
        self._tenants.operator(header_fields(request.headers.raw).get("authorization"))
        others = await self._expositions.fetch(self._table.entries())
        # behind one address several routers answer in turn: their series must not be taken for one
        text = merge(self._metrics.exposition().decode(), others, {"router": self._metrics.router_id})
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def refused(self, request: HTTPRequest, error: Exception) -> Response:
        """No such path, or not with this method."""
        assert isinstance(error, HTTPException)
        status = error.status_code
        self._metrics.responded("other", status)
        body = error_body(RequestError("there is no such path" if status == 404 else error.detail))
        return _json(body, status, dict(error.headers or {}))

    async def failed(self, request: HTTPRequest, error: Exception) -> Response:
        """A small page that was refused."""
        assert isinstance(error, ServingError)
        self._metrics.responded("other", error.http_status)
        return _json(error_body(error), error.http_status, error_headers(error))

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "baton",
        }


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")
