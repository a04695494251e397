"""ScalingNews: what routers know of the autoscaler: what it wants, and why. Values, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.autoscaler.decision_log import DecisionEvent
from core.ids import Role


@dataclass(frozen=True, slots=True)
class PoolNews:
    """`need` is None while it is unknown."""

    role: Role
    num_wanted: int
    num_applied: int
    num_running: int
    need: float | None
    rule: str


@dataclass(frozen=True, slots=True)
class ScalingNews:
    """The last decision. `num_flips`: changes of role that it ordered."""

    pools: tuple[PoolNews, ...]
    num_flips: int

    def of(self, role: Role) -> PoolNews:
        return next(pool for pool in self.pools if pool.role is role)


def news_of(event: DecisionEvent) -> ScalingNews:
    applied = {Role.PREFILL: event.applied_prefill, Role.DECODE: event.applied_decode}
    pools = tuple(
        PoolNews(
            role,
            event.decision.pool(role).num_replicas,
            applied[role],
            event.inputs.pool(role).num_running,
            event.decision.pool(role).need.num_workers,
            event.decision.pool(role).rule.value,
        )
        for role in Role
    )
    return ScalingNews(pools, len(event.decision.flips))


@dataclass(frozen=True, slots=True)
class ScalingCounts:
    """Since the registry started: decisions by pool and rule, changes of role."""

    decisions: tuple[tuple[str, str, int], ...] = ()
    num_flips: int = 0

    def after(self, news: ScalingNews) -> ScalingCounts:
        counts = {(pool, rule): count for pool, rule, count in self.decisions}
        for item in news.pools:
            key = (item.role.value, item.rule)
            counts[key] = counts.get(key, 0) + 1
        return ScalingCounts(
            tuple((pool, rule, count) for (pool, rule), count in sorted(counts.items())),
            self.num_flips + news.num_flips,
        )


class ScalingCollector(Collector):
    """The autoscaler's series, made when they are asked for."""

    def __init__(self, latest: Callable[[], tuple[ScalingNews | None, ScalingCounts]]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        news, counts = self._latest()
        if news is None:
            return
        numbers = {
            "wanted": "Replicas that the autoscaler wants.",
            "applied": "Replicas that Serve aims at.",
            "running": "Replicas that run.",
        }
        for name, text in numbers.items():
            gauge = GaugeMetricFamily(f"baton_autoscaling_{name}_replicas", text, labels=("pool",))
            for pool in news.pools:
                gauge.add_metric((pool.role.value,), getattr(pool, f"num_{name}"))
            yield gauge
        need = GaugeMetricFamily(
            "baton_autoscaling_need_workers",
            "Workers that the load needs, in fractions; missing while unknown.",
            labels=("pool",),
        )
        for pool in news.pools:
            if pool.need is not None:
                need.add_metric((pool.role.value,), pool.need)
        yield need
        decisions = CounterMetricFamily(
            "baton_autoscaling_decisions", "Decisions, by the rule that made them.", labels=("pool", "rule")
        )
        for pool_name, rule, count in counts.decisions:
            decisions.add_metric((pool_name, rule), count)
        yield decisions
        flips = CounterMetricFamily("baton_autoscaling_flips", "Changes of role that were ordered.")
        flips.add_metric((), counts.num_flips)
        yield flips
