"""The live status page: GET /dashboard, its files, and /dashboard/state, which the page asks every second.

Owns what is told of workers, flows and calls, never anything of what was said. The page and its files hold no
data and are served to anybody; the state tells of all tenants, so it needs an operator's key where keys are
asked for, as /metrics does. A strict Content-Security-Policy: nothing is loaded from elsewhere, nothing runs
inline. Lives on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from core.clock import Clock
from core.pair_status import PairStatus
from router.config import RouterConfig
from router.header_fields import header_fields
from router.metrics import RouterMetrics
from router.recent_calls import RecentCalls
from router.tenants import Tenants
from router.worker_entry import WorkerEntry
from router.worker_table import WorkerTable

_FOLDER = Path(__file__).with_name("dashboard")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


class StatusPage:
    """The routes of the page. With several routers each tells of its own calls; the page tells them apart by
    `router.id` and shows them together.
    """

    def __init__(
        self,
        config: RouterConfig,
        model: str,
        table: WorkerTable,
        metrics: RouterMetrics,
        tenants: Tenants,
        recent: RecentCalls,
        clock: Clock,
    ) -> None:
        self._config = config
        self._model = model
        self._table = table
        self._metrics = metrics
        self._tenants = tenants
        self._recent = recent
        self._clock = clock
        self._started_at = clock.now()
        self._files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}

    def routes(self) -> list[Route]:
        return [
            Route("/dashboard", self.page),
            Route("/dashboard/state", self.state),
            Route("/dashboard/{name}", self.file),
        ]

    async def page(self, request: HTTPRequest) -> Response:
        return self._file("index.html")

    async def file(self, request: HTTPRequest) -> Response:
        return self._file(request.path_params["name"])

    async def state(self, request: HTTPRequest) -> Response:
        """Raises Unauthorized or Forbidden, as /metrics does."""
        self._tenants.operator_at(header_fields(request.headers.raw))
        headers = {**_HEADERS, "cache-control": "no-store"}
        return Response(orjson.dumps(self.told()), headers=headers, media_type="application/json")

    def told(self) -> dict[str, Any]:
        """Milliseconds, tokens and blocks; what is not known is None."""
        now = self._clock.now()
        return {
            "now_s": time.time(),
            "router": {
                "id": self._metrics.router_id,
                "model": self._model,
                "policy": str(self._config.policy),
                "plan": str(self._config.plan),
                "uptime_s": round(now - self._started_at, 1),
                "waiting": self._metrics.num_waiting,
                "running": self._metrics.num_running,
            },
            "totals": self._recent.totals(now),
            "workers": [self._worker(entry, now) for entry in _ordered(self._table.entries())],
            "flows": self._recent.flows(now),
            "calls": self._recent.calls(),
        }

    def _worker(self, entry: WorkerEntry, now: float) -> dict[str, Any]:
        told = entry.announcement
        worker_id = entry.ref.worker_id
        return {
            "id": worker_id,
            "role": entry.ref.role.value,
            "home_role": told.home.value,
            "epoch": f"{entry.ref.epoch:016x}",
            "state": "draining" if entry.is_draining else entry.state.value,
            "node": told.node,
            "heard_s": round(max(0.0, now - entry.heard_at), 1),
            "reserved": entry.num_reserved_seqs,
            "index_confidence": round(self._table.index.confidence(worker_id), 3),
            "status": None if entry.status is None else _status(entry),
        }

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise HTTPException(404)
        headers: Mapping[str, str] = {**_HEADERS, "cache-control": "no-cache"}
        return Response(content, headers=dict(headers), media_type=_TYPES[Path(name).suffix])


def _status(entry: WorkerEntry) -> dict[str, Any]:
    status = entry.status
    assert status is not None
    return {
        "waiting": status.num_waiting,
        "running": status.num_running,
        "waiting_tokens": status.num_waiting_tokens,
        "max_running": status.max_num_seqs,
        "blocks": {
            "held": status.num_held_blocks,
            "cached": status.num_cached_blocks,
            "free": status.num_free_blocks,
            "quarantined": status.num_quarantined_blocks,
        },
        "block_size": entry.announcement.layout.block_size,
        "kv_utilization": round(status.kv_utilization, 4),
        "prefill_tokens_per_s": round(status.prefill_tokens_per_s, 1),
        "step_ms": round(status.step_s * 1e3, 3),
        "pairs": [_pair(pair) for pair in status.pairs],
    }


def _pair(pair: PairStatus) -> dict[str, Any]:
    return {
        "to": pair.worker_id,
        "to_epoch": f"{pair.epoch:016x}",
        "transport": pair.transport or None,
        "gb_per_s": round(pair.bytes_per_s / 1e9, 3) if pair.bytes_per_s else None,
        "bytes": dict(pair.num_bytes),
        "fallbacks": dict(pair.fallbacks),
        "is_warm": pair.is_warm,
        "problem": pair.problem or None,
    }


def _ordered(entries: tuple[WorkerEntry, ...]) -> list[WorkerEntry]:
    return sorted(entries, key=lambda entry: (entry.ref.role.value, entry.ref.worker_id))
