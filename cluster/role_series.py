"""RoleSeries: the metrics of a process that has had one role or the other, as one text.

Owns the series of each role that it had, which outlive the role, and those of the changes. Written on the IO
loop, rendered from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cluster.config import BatonConfig
from core import telemetry
from core.ids import Role
from core.role_change import RoleCause, RoleChange, RoleOrder
from decode_worker.metrics import DecodeSeries
from prefill_worker.metrics import PrefillSeries
from router.exposition import merge

_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RoleSeries:
    """One per process."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config
        self._prefill: PrefillSeries | None = None
        self._decode: DecodeSeries | None = None
        self._registry = CollectorRegistry()
        role = Gauge(telemetry.WORKER_ROLE, "1 for the role that it has", ("role",), registry=self._registry)
        changes = Counter(
            telemetry.ROLE_CHANGES,
            "Changes of the worker's role, by the role that it took and the cause",
            ("role", "cause"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            telemetry.ROLE_CHANGE_SECONDS,
            "How long changes took: leaving the old role (drain), starting the new one (start)",
            ("role", "part"),
            buckets=_SECONDS_BUCKETS,
            registry=self._registry,
        )
        self._has = {each: role.labels(each.value) for each in Role}
        self._changes = {
            (each, cause): changes.labels(each.value, cause.value) for each in Role for cause in RoleCause
        }

    @property
    def prefill(self) -> PrefillSeries:
        if self._prefill is None:
            self._prefill = PrefillSeries(self._config.prefill.model)
        return self._prefill

    @property
    def decode(self) -> DecodeSeries:
        if self._decode is None:
            self._decode = DecodeSeries(self._config.decode.model)
        return self._decode

    def begins(self, role: Role) -> None:
        """The worker has this role from now on."""
        for each, gauge in self._has.items():
            gauge.set(each is role)

    def rests(self, role: Role) -> None:
        """It has left this role."""
        (self.prefill if role is Role.PREFILL else self.decode).rest()

    def observe(self, order: RoleOrder, change: RoleChange) -> None:
        """An order was carried out."""
        self._changes[order.role, order.cause].inc()
        self._seconds.labels(order.role.value, "drain").observe(change.drain_s)
        self._seconds.labels(order.role.value, "start").observe(change.start_s)

    def text(self) -> bytes:
        """All of them in Prometheus' text format, told apart by `role`."""
        roles: list[tuple[Mapping[str, str], str]] = [
            ({"role": role.value}, generate_latest(series.registry).decode())
            for role, series in ((Role.PREFILL, self._prefill), (Role.DECODE, self._decode))
            if series is not None
        ]
        return merge(generate_latest(self._registry).decode(), roles)
