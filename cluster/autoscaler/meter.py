"""Meter: from what replicas report, one after the other, to the load at a moment.

Owns the memory that rates need, and who has fallen silent. Reporters have clocks of their own: only whether
their time goes on is looked at, and differences of it. Deterministic; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.load import Load, PoolCount, RouterLoad, WorkerLoad
from cluster.autoscaler.stats import worker_load
from core.ids import Role

# growth is seen over so many parts of two windows, each larger than the one before
_NUM_PARTS = 4


@dataclass(frozen=True, slots=True)
class Report:
    """The last one of a replica: its name, its time, what it says."""

    replica: str
    at: float
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Fleet:
    """A pool's replicas, or the routers: how many run, how many shall, and what they say."""

    num_running: int
    num_target: int
    reports: Sequence[Report] = ()


@dataclass(slots=True)
class _Heard:
    """A replica's time, and ours when it came; of routers also what they said before."""

    at: float
    heard_at: float
    history: list[Report] = field(default_factory=list)


class Meter:
    """One per service."""

    def __init__(self, config: AutoscalingConfig, gpus_per_worker: float = 0.0) -> None:
        self._config = config
        self._gpus_per_worker = gpus_per_worker
        self._heard: dict[str, _Heard] = {}

    def load(self, pools: Mapping[Role, Fleet], routers: Fleet, now: float) -> Load:
        """The load at `now`."""
        names = {report.replica for fleet in (*pools.values(), routers) for report in fleet.reports}
        self._heard = {name: heard for name, heard in self._heard.items() if name in names}
        workers: list[WorkerLoad] = []
        for home, fleet in pools.items():
            for report in self._fresh(fleet, now):
                load = worker_load(f"{home.value}-{report.replica}", home, report.stats)
                if load is not None:
                    workers.append(load)
        fresh = [report for report in self._fresh(routers, now) if "arrived" in report.stats]
        is_known = len(fresh) >= max(1, routers.num_running)
        histories = [self._remember(report) for report in fresh]
        return Load(
            PoolCount(pools[Role.PREFILL].num_target, pools[Role.PREFILL].num_running),
            PoolCount(pools[Role.DECODE].num_target, pools[Role.DECODE].num_running),
            tuple(workers),
            self._router(histories) if is_known else None,
            self._gpus_per_worker,
        )

    def _fresh(self, fleet: Fleet, now: float) -> list[Report]:
        """Reports of those whose time goes on."""
        fresh = []
        for report in fleet.reports:
            heard = self._heard.get(report.replica)
            if heard is None:
                heard = self._heard[report.replica] = _Heard(report.at, now)
            elif report.at > heard.at:
                heard.at, heard.heard_at = report.at, now
            if now - heard.heard_at <= self._config.stale_s:
                fresh.append(report)
        return fresh

    def _remember(self, report: Report) -> list[Report]:
        history = self._heard[report.replica].history
        if not history or report.at > history[-1].at:
            history.append(report)
        oldest = report.at - 2 * self._config.window_s
        while len(history) > 1 and history[1].at <= oldest:
            del history[0]
        return history

    # ------------------------------------------------------------ sums to rates

    def _router(self, histories: Sequence[list[Report]]) -> RouterLoad:
        window_s = self._config.window_s

        def last(name: str) -> float:
            return sum(history[-1].stats.get(name, 0.0) for history in histories)

        def rise(name: str, since_s: float = window_s, until_s: float = 0.0) -> float:
            return sum(_at(h, until_s, name) - _at(h, since_s, name) for h in histories)

        def mean(total: str, count: str) -> float | None:
            for since_s in (window_s, 2 * window_s):
                if (num := rise(count, since_s)) > 0:
                    return rise(total, since_s) / num
            return None

        part_s = 2 * window_s / _NUM_PARTS
        counts = [
            rise("arrived", (_NUM_PARTS - index) * part_s, (_NUM_PARTS - index - 1) * part_s)
            for index in range(_NUM_PARTS)
        ]
        # whoever has only just begun to tell looks as if it grew
        is_long = all(h[-1].at - h[0].at >= 2 * window_s - self._config.period_s for h in histories)
        num_output = mean("output_tokens", "ended")
        return RouterLoad(
            num_open=round(last("open")),
            num_waiting=round(last("waiting")),
            num_waiting_tokens=round(last("waiting_tokens")),
            arrivals_per_s=rise("arrived") / window_s,
            tokens_per_s=rise("arrived_tokens") / window_s,
            num_arrived=round(rise("arrived")),
            growth_per_s=_growth(counts, part_s) if is_long else 0.0,
            cached_share=mean("cached_tokens", "read_tokens") or 0.0,
            num_output_tokens=num_output if num_output is not None else mean("expected_tokens", "arrived"),
            itl_s=mean("gaps_s", "gaps"),
            router_wait_s=mean("router_wait_s", "firsts"),
            queue_wait_s=mean("queue_wait_s", "firsts"),
            transfer_wait_s=mean("transfer_wait_s", "transfers"),
        )


def _at(history: Sequence[Report], ago_s: float, name: str) -> float:
    """A sum as it was `ago_s` before the last report, by the reporter's clock; before the first: as then."""
    at = history[-1].at - ago_s
    value = history[0].stats.get(name, 0.0)
    for report in history:
        if report.at > at + 1e-6:
            break
        value = report.stats.get(name, 0.0)
    return value


def _growth(counts: Sequence[float], part_s: float) -> float:
    """By what share of itself the last count grows each second, if each exceeded the one before and all of
    them say more than chance. One step up is no growth that goes on.
    """
    rises = [later - earlier for earlier, later in pairwise(counts)]
    first, last = counts[0], counts[-1]
    if min(rises) <= 0 or last - first <= 2 * math.sqrt(last + first):
        return 0.0
    return min(rises) / last / part_s
