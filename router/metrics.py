"""RouterMetrics: what the router counts about requests, placements and workers.

Owns the router's registry and its label values, all from closed sets: nothing that a client sends becomes a
label. The merged scrape of all workers is in `exposition`. Used on the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core import telemetry
from core.errors import AdmissionError, Cancelled, RequestError, ServingError
from core.telemetry import TTFTPart
from router.decision import Plan
from router.index_metrics import IndexCollector
from router.reuse_metrics import ReuseMetrics
from router.stamps import Stall
from router.work_meter import WorkMeter
from router.worker_table import WorkerTable

_TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_PART_BUCKETS = (0.0001, 0.0005, 0.001, *_TTFT_BUCKETS)
_ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class Outcome(StrEnum):
    """Each started request ends in exactly one of these."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ABORTED = "aborted"
    REJECTED = "rejected"


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """How a request that ended by `error` is counted, and the reason: an error code of ours."""
    if not isinstance(error, ServingError):
        return Outcome.FAILED, ServingError.code
    if isinstance(error, RequestError | AdmissionError):
        return Outcome.REJECTED, error.code
    if isinstance(error, Cancelled):
        return Outcome.ABORTED, error.code
    return Outcome.FAILED, error.code


@dataclass(frozen=True, slots=True)
class RequestLabels:
    """`endpoint` is one of ours; `model` is empty unless it is a model that is served."""

    endpoint: str
    model: str = ""


class RouterMetrics:
    """Counters and histograms; one per router. `work` is counted for the autoscaler."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.work = WorkMeter()
        self.num_waiting = self.num_running = 0
        self.router_id = secrets.token_hex(4)
        labels = ("endpoint", "model")
        self._started = Counter(
            telemetry.REQUESTS_STARTED, "Requests received.", labels, registry=self.registry
        )
        self._ended = Counter(
            telemetry.REQUESTS,
            "Requests ended, by outcome and by finish reason or error code.",
            (*labels, "outcome", "reason"),
            registry=self.registry,
        )
        self._ttft = Histogram(
            telemetry.TTFT_SECONDS,
            "From the arrival of a request to its first token, each prompt.",
            labels,
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._itl = Histogram(
            telemetry.ITL_SECONDS,
            "Between two tokens of one sample.",
            labels,
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self._parts = Histogram(
            telemetry.TTFT_PART_SECONDS,
            "Where the time to first token went; the sums of all parts are that of baton_ttft_seconds.",
            ("part",),
            buckets=_PART_BUCKETS,
            registry=self.registry,
        )
        self._transfer_waits = Histogram(
            telemetry.TRANSFER_WAIT_SECONDS,
            "How long decode waited for the KV of an answer.",
            buckets=_PART_BUCKETS,
            registry=self.registry,
        )
        self._stalls = Histogram(
            telemetry.ITL_STALL_SECONDS,
            "Pauses of running answers whose cause is known.",
            ("cause",),
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self._e2e = Histogram(
            telemetry.E2E_SECONDS,
            "From the arrival of a request to the end of its answer.",
            labels,
            buckets=_E2E_BUCKETS,
            registry=self.registry,
        )
        self._responses = Counter(
            telemetry.HTTP_RESPONSES, "HTTP responses.", ("endpoint", "status"), registry=self.registry
        )
        self._placements = Counter(
            telemetry.PLACEMENTS, "Placements, by plan.", ("plan",), registry=self.registry
        )
        self._retries = Counter(
            telemetry.RETRIES, "Placements that failed, by error code.", ("reason",), registry=self.registry
        )
        self.reuse = ReuseMetrics(self.registry)
        self._cached = Counter(
            telemetry.PREDICTED_CACHED_TOKENS,
            "Prompt tokens cached on the prefill worker, as predicted at placement and as found there.",
            ("kind",),
            registry=self.registry,
        )
        self._predictions = Histogram(
            telemetry.PREDICTION_RATIO,
            "Actual by predicted time of a part of a request's way: reading (queue and prefill), handoff.",
            ("part",),
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )
        self._running = Gauge(
            telemetry.ROUTER_REQUESTS, "Requests inside the router.", ("state",), registry=self.registry
        )
        self._places = Gauge(
            telemetry.ROUTER_PLACES,
            "Requests that may run at once; the rest wait in the router.",
            registry=self.registry,
        )

    def started(self, labels: RequestLabels) -> None:
        self._started.labels(labels.endpoint, labels.model).inc()

    def ended(self, labels: RequestLabels, outcome: Outcome, reason: str, seconds: float) -> None:
        self._ended.labels(labels.endpoint, labels.model, outcome.value, reason).inc()
        if outcome is Outcome.SUCCEEDED:
            self._e2e.labels(labels.endpoint, labels.model).observe(seconds)

    def first_token(self, labels: RequestLabels, seconds: float, parts: Mapping[TTFTPart, float]) -> None:
        """The first token of a prompt; `parts` add up to `seconds`."""
        self._ttft.labels(labels.endpoint, labels.model).observe(seconds)
        for part, part_s in parts.items():
            self._parts.labels(part.value).observe(part_s)

    def paused(self, transfer_wait_s: float | None, stalls: Iterable[Stall]) -> None:
        """How long an answer that has ended had waited for its KV and stood still."""
        if transfer_wait_s is not None:
            self._transfer_waits.observe(transfer_wait_s)
        for stall in stalls:
            self._stalls.labels(stall.cause.value).observe(stall.seconds)

    def next_tokens(self, labels: RequestLabels, num_tokens: int, seconds: float) -> None:
        """`num_tokens` came together `seconds` after the last one."""
        histogram = self._itl.labels(labels.endpoint, labels.model)
        for _ in range(num_tokens):
            histogram.observe(seconds / num_tokens)

    def responded(self, endpoint: str, status: int) -> None:
        self._responses.labels(endpoint, str(status)).inc()

    def placed(self, plan: Plan) -> None:
        self._placements.labels(plan.value).inc()

    def retried(self, error: ServingError) -> None:
        self._retries.labels(error.code).inc()

    def predicted_cached(self, num_predicted: int, num_actual: int) -> None:
        self._cached.labels("predicted").inc(num_predicted)
        self._cached.labels("actual").inc(num_actual)

    def predicted(self, part: str, predicted_ms: float, actual_ms: float) -> None:
        """How long a part of a request's way took, against what was predicted when it was placed."""
        self._predictions.labels(part).observe(actual_ms / max(0.1, predicted_ms))

    def waiting(self, num_waiting: int, num_running: int) -> None:
        self.num_waiting, self.num_running = num_waiting, num_running
        self._running.labels("waiting").set(num_waiting)
        self._running.labels("running").set(num_running)

    def watch_places(self, num_places: Callable[[], float]) -> None:
        """Export how many requests may run at once, asked for at each scrape."""
        self._places.set_function(num_places)

    def watch_table(self, table: WorkerTable) -> None:
        """Export how many workers there are, by role and state, and what is known of their blocks."""
        self.registry.register(_WorkersCollector(table))
        self.registry.register(IndexCollector(table.index, table.repairs))

    def exposition(self) -> bytes:
        """The router's own series in Prometheus' text format."""
        return generate_latest(self.registry)


class _WorkersCollector(Collector):
    """Counts the table when it is asked, so that it cannot go stale."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(telemetry.WORKERS, "Known workers.", labels=("role", "state"))
        counts: dict[tuple[str, str], int] = {}
        for entry in self._table.entries():
            state = "draining" if entry.is_draining else entry.state.value
            key = (entry.ref.role.value, state)
            counts[key] = counts.get(key, 0) + 1
        for key, count in sorted(counts.items()):
            family.add_metric(key, count)
        return [family]
