"""POST /admin/role: have a worker take the other role. For operators.

Owns the shape of body and answer; who may change is decided behind RoleDesk. Lives on the event loop.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from core.errors import InvalidRequest, NoWorkerAvailable
from core.ids import Role, WorkerId
from core.role_change import RoleCause
from router.body_reader import read_body
from router.header_fields import header_fields
from router.json_body import parse_json
from router.role_watch import RoleDesk
from router.tenants import Tenants
from router.worker_table import WorkerTable

_MAX_BYTES = 4096
_READ_S = 10.0


class RoleRoute:
    """The page."""

    def __init__(self, table: WorkerTable, desk: RoleDesk | None, tenants: Tenants) -> None:
        self._table = table
        self._desk = desk
        self._tenants = tenants

    async def answer(self, http: HTTPRequest) -> Response:
        """`{"worker", "role", "force"?}` to what became of it, once the worker serves that role. Raises
        ServingError: InvalidRequest names the field, UnknownWorker, LastOfRole, or what the worker said.
        """
        self._tenants.operator_at(header_fields(http.headers.raw))
        body = parse_json(await read_body(http.scope, http.receive, _MAX_BYTES, _READ_S))
        worker_id, role, is_forced = _read(body)
        if self._desk is None:
            raise NoWorkerAvailable("the roles of these workers cannot be changed")
        try:
            order = await self._desk.order(worker_id, role, RoleCause.OPERATOR, is_forced)
            change = None if order is None else await self._desk.carry_out(order)
        except ConnectionError as error:
            raise NoWorkerAvailable(f"nobody decides about roles at present: {error}") from error
        await self._table.refresh()
        answer = {
            "worker": worker_id,
            "role": role.value,
            "changed": change is not None,
            "drain_ms": 0.0 if change is None else round(change.drain_s * 1e3, 1),
            "start_ms": 0.0 if change is None else round(change.start_s * 1e3, 1),
        }
        return Response(orjson.dumps(answer), media_type="application/json")


def _read(body: Any) -> tuple[WorkerId, Role, bool]:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in body:
        if name not in ("worker", "role", "force"):
            raise InvalidRequest(f"there is no field {name[:40]!r}", param=name[:40])
    worker, role, force = body.get("worker"), body.get("role"), body.get("force", False)
    if not isinstance(worker, str) or not worker:
        raise InvalidRequest("worker must be a worker's name", param="worker")
    if role not in tuple(Role):
        raise InvalidRequest("role must be prefill or decode", param="role")
    if not isinstance(force, bool):
        raise InvalidRequest("force must be true or false", param="force")
    return WorkerId(worker), Role(role), force
