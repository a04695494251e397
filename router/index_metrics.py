"""IndexCollector: what the index of cached blocks knows, and how well.

Reads the index when it is asked, so a worker that is gone leaves no series behind. Labels are the workers
that are known at present and closed sets. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core import telemetry
from router.block_view import Doubt
from router.prefix_index import PrefixIndex
from router.view_repairs import ViewRepairs


class IndexCollector(Collector):
    """`index` and what mends it."""

    def __init__(self, index: PrefixIndex, repairs: ViewRepairs) -> None:
        self._index = index
        self._repairs = repairs

    def collect(self) -> Iterable[Metric]:
        views = self._index.views()
        blocks = GaugeMetricFamily(
            telemetry.INDEX_BLOCKS, "Blocks that a worker is known to hold.", labels=("worker",)
        )
        confidence = GaugeMetricFamily(
            telemetry.INDEX_CONFIDENCE, "How far what is known of a worker is trusted.", labels=("worker",)
        )
        drift = GaugeMetricFamily(
            telemetry.INDEX_DRIFT_BLOCKS,
            "Blocks by which a worker's count and ours differed when its digest last did not fit.",
            labels=("worker",),
        )
        lag = GaugeMetricFamily(
            telemetry.INDEX_EVENT_LAG_SECONDS,
            "How long a worker's last block events had waited to be sent, the way here not counted.",
            labels=("worker",),
        )
        for view in views:
            labels = (view.worker_id,)
            blocks.add_metric(labels, view.num_blocks)
            confidence.add_metric(labels, view.confidence)
            drift.add_metric(labels, view.drift)
            lag.add_metric(labels, view.lag_s)
        repairs = CounterMetricFamily(
            telemetry.INDEX_REPAIRS,
            "Views that were fetched anew: first heard of, events missing, digest wrong; and failures to.",
            labels=("reason",),
        )
        tally = self._index.tally
        for doubt in Doubt:
            repairs.add_metric((doubt.value,), tally.num_repairs[doubt])
        repairs.add_metric(("failed",), self._repairs.num_failed)
        predicted = GaugeMetricFamily(
            telemetry.INDEX_PREDICTIONS, "Requests whose blocks are expected and not told yet."
        )
        predicted.add_metric((), self._index.num_predictions)
        mismatches = CounterMetricFamily(
            telemetry.INDEX_DIGEST_MISMATCHES, "Digests that did not fit the view of a worker."
        )
        mismatches.add_metric((), tally.num_mismatches)
        ignored = CounterMetricFamily(
            telemetry.INDEX_EVENTS_IGNORED, "Block events that came twice, too late, or of a former process."
        )
        ignored.add_metric((), tally.num_ignored)
        return [blocks, confidence, drift, lag, repairs, predicted, mismatches, ignored]
