"""TenantMetrics: what each tenant used, was refused, and has left. Labels are configured tenants only. Used
on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core import telemetry
from core.clock import Clock
from core.ids import TenantId
from router.answering import Usage
from router.leases import Leases
from router.metrics import Outcome


class TenantMetrics:
    """Counters for billing and for the operator; one per router."""

    def __init__(self, registry: CollectorRegistry, leases: Leases, clock: Clock) -> None:
        self._tokens = Counter(
            telemetry.TENANT_TOKENS,
            "Tokens of answered calls, by tenant; cached ones are part of the prompt's.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._requests = Counter(
            telemetry.TENANT_REQUESTS, "Calls ended, by tenant.", ("tenant", "outcome"), registry=registry
        )
        self._refusals = Counter(
            telemetry.TENANT_REFUSALS, "Calls refused, by tenant.", ("tenant", "reason"), registry=registry
        )
        self._lost = Counter(
            telemetry.USAGE_LOST, "Usage records that could not be written.", registry=registry
        )
        registry.register(_LimitsCollector(leases, clock))

    def used(self, tenant: TenantId, usage: Usage) -> None:
        self._tokens.labels(tenant, "prompt").inc(usage.num_prompt_tokens)
        self._tokens.labels(tenant, "cached").inc(usage.num_cached_tokens)
        self._tokens.labels(tenant, "output").inc(usage.num_completion_tokens)

    def ended(self, tenant: TenantId, outcome: Outcome, reason: str) -> None:
        self._requests.labels(tenant, outcome.value).inc()
        if outcome is Outcome.REJECTED:
            self._refusals.labels(tenant, reason).inc()

    def usage_lost(self, num: int) -> None:
        self._lost.inc(num)


class _LimitsCollector(Collector):
    """Reads the leases when it is asked."""

    def __init__(self, leases: Leases, clock: Clock) -> None:
        self._leases = leases
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            telemetry.TENANT_LIMIT,
            "Limits by tenant: the whole, and what this router holds of it, free and not.",
            labels=("tenant", "limit", "part"),
        )
        now = self._clock.now()
        for lease in self._leases.all():
            for part, value in (
                ("whole", lease.size),
                ("held", lease.bucket.held),
                ("free", lease.bucket.num_free(now)),
            ):
                family.add_metric((lease.name.tenant, lease.name.kind.value, part), value)
        return [family]
