"""TransferMetrics: what crossed the bridge, by transport, and what went wrong, by side and code.

Bytes and the seconds of a transfer are counted by the receiver only, after its checks, each block once: a
worker's own sum is what it really received. How much of it prefill's steps have hidden is counted by the
sender. Counted on the IO loop; rendered from any thread.
"""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core import telemetry
from core.errors import ServingError
from kv_transfer.pair_book import PairBook

Side = Literal["sender", "receiver"]

_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferMetrics:
    """One per registry, shared by a worker's sender and receiver."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pairs = PairBook(registry)
        self._bytes = Counter(
            telemetry.KV_TRANSFER_BYTES,
            "KV payload bytes received, verified and written",
            ["transport"],
            registry=registry,
        )
        self._seconds = Histogram(
            telemetry.KV_TRANSFER_SECONDS,
            "From a ticket's first frame to its commit, including the prefill steps in between",
            ["transport"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._pushing = Histogram(
            telemetry.KV_PUSH_SECONDS,
            "Of a committed ticket: the time in which computed blocks waited for their acknowledgement",
            ["transport"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._exposed = Histogram(
            telemetry.KV_EXPOSED_SECONDS,
            "Of a committed ticket: from its last computed token to the acknowledged commit",
            ["transport"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._fallbacks = Counter(
            telemetry.KV_TRANSFER_FALLBACKS,
            "Tickets whose payload did not go the best way that was wanted, by reason",
            ["reason"],
            registry=registry,
        )
        self._staging_bytes = Gauge(
            telemetry.KV_STAGING_BYTES,
            "Shared memory set aside for prefill workers of this host, at its decode worker",
            registry=registry,
        )
        self._device_staging_bytes = Gauge(
            telemetry.KV_DEVICE_STAGING_BYTES,
            "Memory of the device set aside for prefill workers of this host, at its decode worker",
            registry=registry,
        )
        self._group_staging_bytes = Gauge(
            telemetry.KV_GROUP_STAGING_BYTES,
            "Memory of process groups with prefill workers, at its decode worker",
            registry=registry,
        )
        self._failures = Counter(
            telemetry.KV_TRANSFER_FAILURES,
            "Offers, pushes and commits that ended in an error, as each side saw them",
            ["side", "code"],
            registry=registry,
        )

    def count_bytes(self, transport: str, num_bytes: int) -> None:
        self._bytes.labels(transport).inc(num_bytes)

    def observe_seconds(self, transport: str, seconds: float) -> None:
        self._seconds.labels(transport).observe(seconds)

    def observe_handover(self, transport: str, push_s: float, exposed_s: float) -> None:
        """A ticket was committed. `1 - exposed_s / push_s` is the share that prefill's steps have hidden."""
        self._pushing.labels(transport).observe(push_s)
        self._exposed.labels(transport).observe(exposed_s)

    def count_fallback(self, reason: str) -> None:
        self._fallbacks.labels(reason).inc()

    def set_staging_bytes(self, num_bytes: int) -> None:
        self._staging_bytes.set(num_bytes)

    def set_device_staging_bytes(self, num_bytes: int) -> None:
        self._device_staging_bytes.set(num_bytes)

    def set_group_staging_bytes(self, num_bytes: int) -> None:
        self._group_staging_bytes.set(num_bytes)

    def count_failure(self, side: Side, error: ServingError) -> None:
        """By the error's code, one of ours: a peer's unknown code was decoded as a plain ServingError."""
        self._failures.labels(side, error.code).inc()
