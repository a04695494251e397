"""Scrape: the numbers of /metrics, and what they must say of a system at rest.

Owns the reading of the exposition and the definition of idle. Values only; a scrape does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from core import telemetry
from tests.e2e.client import Client

SETTLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics."""

    families: dict[str, Metric]
    seconds: float

    def value(self, name: str, **labels: str) -> float:
        """Sum over the samples `name` (counters with or without `_total`) whose labels include `labels`."""
        wanted = {name, f"{name}_total"}
        return sum(
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name in wanted and all(sample.labels.get(key) == labels[key] for key in labels)
        )

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Like `value`, one sum for each value of `label`."""
        wanted = {name, f"{name}_total"}
        sums: dict[str, float] = {}
        for family in self.families.values():
            for sample in family.samples:
                if sample.name in wanted and all(sample.labels.get(key) == labels[key] for key in labels):
                    key = sample.labels.get(label, "")
                    sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def counters(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Each sample that may only rise."""
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            if family.type in ("counter", "histogram")
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    @property
    def has_workers(self) -> bool:
        """Whether any worker's series are in it."""
        return telemetry.NUM_RUNNING in self.families

    @property
    def num_running(self) -> float:
        return self.value(telemetry.NUM_RUNNING)

    @property
    def num_waiting(self) -> float:
        return self.value(telemetry.NUM_WAITING)

    @property
    def num_held_blocks(self) -> float:
        return self.value(telemetry.KV_BLOCKS, state="held") + self.value(
            telemetry.KV_BLOCKS, state="quarantined"
        )

    def why_not_idle(self) -> str:
        """Empty when nothing runs, waits, holds a block or a ticket, and no block is missing."""
        facts = {
            "requests in the router": self.value(telemetry.ROUTER_REQUESTS),
            "running": self.num_running,
            "waiting": self.num_waiting,
            "held blocks": self.num_held_blocks,
            "leak difference": self.value(telemetry.KV_LEAK_DIFFERENCE),
            "live tickets": sum(
                count
                for state, count in self.by_label(telemetry.TICKETS, "state").items()
                if state not in ("released", "aborted", "expired")
            ),
        }
        return ", ".join(f"{name} {value:g}" for name, value in facts.items() if value)


def scrape(client: Client) -> Scrape:
    """With the series of workers in it."""
    reading = scrape_anything(client)
    names = sorted(reading.families)
    assert reading.has_workers, f"no {telemetry.NUM_RUNNING} in the scrape: {names}"
    return reading


def scrape_anything(client: Client) -> Scrape:
    """Perhaps of a moment at which no worker answers."""
    text, seconds = client.metrics_text()
    return Scrape({family.name: family for family in text_string_to_metric_families(text)}, seconds)


def wait_until(condition: Callable[[], str], timeout_s: float, every_s: float = 0.1) -> float:
    """Poll until `condition` gives no reason to wait on; returns the seconds it took."""
    start = time.monotonic()
    while True:
        reason = condition()
        elapsed = time.monotonic() - start
        if not reason:
            return elapsed
        assert elapsed < timeout_s, f"after {elapsed:.1f} s still: {reason}"
        time.sleep(every_s)


def wait_idle(client: Client, timeout_s: float = SETTLE_S) -> float:
    """Until the system is idle; returns the seconds it took."""
    return wait_until(lambda: scrape(client).why_not_idle(), timeout_s)


def wait_begun(client: Client, before: Scrape, num_requests: int) -> None:
    """Until all requests have come and a token was generated: counts do not pass by unseen, as gauges may."""

    def missing() -> str:
        after = scrape(client)
        has_begun = rise(before, after, telemetry.GENERATED_TOKENS) > 0
        num_started = rise(before, after, telemetry.REQUESTS_STARTED)
        return "" if has_begun and num_started == num_requests else f"{num_started:g} requests"

    wait_until(missing, 10.0, 0.01)


def rise(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)
