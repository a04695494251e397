"""POST /admin/drain: take a worker out of service; another one is started in its place. For operators.

Owns the shape of body and answer, and seeing that the worker has heard it; who may go is decided behind
DrainDesk. Lives on the event loop.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import orjson
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from core.clock import Clock
from core.errors import InvalidRequest, NoWorkerAvailable, WorkerError
from core.ids import Epoch, WorkerId
from router.body_reader import read_body
from router.header_fields import header_fields
from router.json_body import parse_json
from router.tenants import Tenants
from router.worker_table import WorkerTable

_MAX_BYTES = 4096
_READ_S = 10.0
_MAX_WITHIN_S = 86_400.0
# a worker announces itself each second, and says at once that it drains
_HEARD_WITHIN_S = 10.0
_LOOK_S = 0.5


class DrainDesk(Protocol):
    """Who decides about workers that go."""

    async def drain(self, worker_id: WorkerId, within_s: float | None, is_forced: bool) -> Epoch:
        """Have it drained, `within_s` or as long as is configured; which process is meant. Raises
        UnknownWorker, LastOfRole unless forced, or ConnectionError while whoever decides is away.
        """
        ...


class DrainRoute:
    """The page."""

    def __init__(self, table: WorkerTable, desk: DrainDesk | None, tenants: Tenants, clock: Clock) -> None:
        self._table = table
        self._desk = desk
        self._tenants = tenants
        self._clock = clock

    async def answer(self, http: HTTPRequest) -> Response:
        """`{"worker", "within_s"?, "force"?}` to the same, once the worker takes no new work. Raises
        ServingError: InvalidRequest names the field, UnknownWorker, LastOfRole, or that it was not heard.
        """
        self._tenants.operator_at(header_fields(http.headers.raw))
        body = parse_json(await read_body(http.scope, http.receive, _MAX_BYTES, _READ_S))
        worker_id, within_s, is_forced = _read(body)
        if self._desk is None:
            raise NoWorkerAvailable("nobody would start another worker in its place: it cannot be drained")
        try:
            epoch = await self._desk.drain(worker_id, within_s, is_forced)
        except ConnectionError as error:
            raise NoWorkerAvailable(f"nobody decides about workers at present: {error}") from error
        deadline = self._clock.now() + _HEARD_WITHIN_S
        while self._takes_work(worker_id, epoch):
            if self._clock.now() >= deadline:
                raise WorkerError("the worker has not heard that it is to go", worker_id=worker_id)
            await self._table.wait_for_change(_LOOK_S)
        return Response(orjson.dumps({"worker": worker_id, "draining": True}), media_type="application/json")

    def _takes_work(self, worker_id: WorkerId, epoch: Epoch) -> bool:
        return any(
            entry.ref.worker_id == worker_id and entry.announcement.block_epoch == epoch and entry.is_usable
            for entry in self._table.entries()
        )


def _read(body: Any) -> tuple[WorkerId, float | None, bool]:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in body:
        if name not in ("worker", "within_s", "force"):
            raise InvalidRequest(f"there is no field {name[:40]!r}", param=name[:40])
    worker, within_s, force = body.get("worker"), body.get("within_s"), body.get("force", False)
    if not isinstance(worker, str) or not worker:
        raise InvalidRequest("worker must be a worker's name", param="worker")
    if within_s is not None:
        is_number = isinstance(within_s, int | float) and not isinstance(within_s, bool)
        if not is_number or not math.isfinite(within_s) or not 0 <= within_s <= _MAX_WITHIN_S:
            raise InvalidRequest(f"within_s must be 0 to {_MAX_WITHIN_S:.0f} seconds", param="within_s")
    if not isinstance(force, bool):
        raise InvalidRequest("force must be true or false", param="force")
    return WorkerId(worker), within_s, force
