"""The placement policies that `benchmarks.router` compares: ours, the other routers', simple rules.

Owns their settings: ours has its defaults, the others' are the best of `grid` on the tuning part of the
trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.rivals import CacheAware, CacheAwareRouter, KvCost, KvCostRouter
from cluster.simulator.choosing import Chooser
from router.config import PolicySetting


@dataclass(frozen=True, slots=True)
class Policy:
    """`make` is of another router; without it, one of ours."""

    name: str
    setting: PolicySetting = PolicySetting.COST
    make: Callable[[], Chooser] | None = None


def kv_cost(cost: KvCost) -> Callable[[], Chooser]:
    return lambda: KvCostRouter(cost)


def cache_aware(settings: CacheAware) -> Callable[[], Chooser]:
    return lambda: CacheAwareRouter(settings)


def policies(is_aggregated: bool) -> list[Policy]:
    """All of them, tuned for the deployment."""
    dynamo, gateway = TUNED[is_aggregated]
    return [
        Policy("ours"),
        Policy("kv cost, tuned", make=kv_cost(dynamo)),
        Policy("kv cost, defaults", make=kv_cost(KvCost())),
        Policy("cache_aware, tuned", make=cache_aware(gateway)),
        Policy("cache_aware, defaults", make=cache_aware(CacheAware())),
        Policy("prefix_affinity", PolicySetting.PREFIX_AFFINITY),
        Policy("least_loaded", PolicySetting.LEAST_LOADED),
        Policy("power_of_two", PolicySetting.POWER_OF_TWO),
        Policy("round_robin", PolicySetting.ROUND_ROBIN),
    ]


TUNED = {
    False: (
        KvCost(local_tokens=16384, local_ratio=1.0),
        CacheAware(threshold=0.6, abs_limit=2, rel_limit=1.2),
    ),
    True: (KvCost(is_product=True), CacheAware(threshold=0.6, abs_limit=64, rel_limit=1.2)),
}


def grid(is_aggregated: bool) -> Iterator[Policy]:
    """What the other routers are tried with."""
    if is_aggregated:
        costs = [KvCost(scale=scale) for scale in (0.5, 1.0, 2.0, 4.0)]
    else:
        costs = [KvCost(local_tokens=tokens) for tokens in (0, 2048, 8192, 32768)]
        costs += [KvCost(local_tokens=tokens, local_ratio=1.0) for tokens in (1024, 4096, 8192, 16384, 32768)]
    costs += [KvCost(credit=0.75), KvCost(is_product=True), KvCost(decay=1.0), KvCost(temperature=0.05)]
    for cost in costs:
        yield Policy(repr(cost), make=kv_cost(cost))
    for threshold, limit in itertools.product((0.1, 0.3, 0.6), (2, 8, 64)):
        settings = CacheAware(threshold=threshold, abs_limit=limit, rel_limit=1.2)
        yield Policy(repr(settings), make=cache_aware(settings))
    if not is_aggregated:
        settings = CacheAware(threshold=0.3, abs_limit=8, rel_limit=1.2, is_decode_cache_aware=True)
        yield Policy(repr(settings), make=cache_aware(settings))
