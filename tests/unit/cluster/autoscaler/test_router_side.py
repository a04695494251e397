"""A router's knowledge of pools that sleep: ready without them, but not for ever."""

from __future__ import annotations

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.news import PoolNews, ScalingCollector, ScalingCounts, ScalingNews
from cluster.autoscaler.router_side import RouterScaling
from core.ids import Role


class Router:
    def __init__(self) -> None:
        self.time = 10.0
        self.scaling = RouterScaling(AutoscalingConfig(startup_s=5.0), self.unasked, self)
        self.counts = ScalingCounts()

    async def unasked(self) -> tuple[ScalingNews | None, ScalingCounts]:
        raise AssertionError

    def now(self) -> float:
        return self.time

    def hear(self, applied: int, running: int) -> tuple[Role, ...]:
        news = ScalingNews(
            (
                PoolNews(Role.PREFILL, 1, 1, 1, 0.5, "hold"),
                PoolNews(Role.DECODE, applied, applied, running, None, "wake" if applied else "sleep"),
            ),
            0,
        )
        self.counts = self.counts.after(news)
        self.scaling.take(news, self.counts)
        return self.scaling.asleep()


def test_a_pool_that_was_never_at_zero_does_not_sleep_while_it_starts() -> None:
    router = Router()
    assert router.scaling.asleep() == ()
    assert router.hear(applied=1, running=0) == ()


def test_a_pool_sleeps_until_it_runs_or_is_late() -> None:
    router = Router()
    assert router.hear(applied=0, running=0) == (Role.DECODE,)
    router.time += 1000.0
    assert router.hear(applied=0, running=0) == (Role.DECODE,)
    assert router.hear(applied=1, running=0) == (Role.DECODE,)
    assert router.hear(applied=1, running=1) == ()
    router.hear(applied=0, running=0)
    router.time += 16.0
    assert router.hear(applied=1, running=0) == ()


def test_the_series_tell_what_is_wanted_and_leave_out_what_is_unknown() -> None:
    router = Router()
    assert list(ScalingCollector(router.scaling.latest).collect()) == []
    router.hear(applied=0, running=0)
    router.hear(applied=2, running=0)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in ScalingCollector(router.scaling.latest).collect()
        for sample in family.samples
    }
    assert samples["baton_autoscaling_wanted_replicas", "decode"] == 2
    assert samples["baton_autoscaling_need_workers", "prefill"] == 0.5
    assert ("baton_autoscaling_need_workers", "decode") not in samples
    assert samples["baton_autoscaling_decisions_total", "decode", "sleep"] == 1
    assert samples["baton_autoscaling_decisions_total", "prefill", "hold"] == 2
