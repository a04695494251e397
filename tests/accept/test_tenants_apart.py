"""Acceptance, tenants: no time tells one of another's prompts; limits hold over two routers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from router.api_keys import KeyScope
from tests.e2e.client import Client
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import Profile
from tests.e2e.limits import Flood
from tests.e2e.tenant_keys import add_key
from tests.e2e.tenant_timing import measure

NUM, LENGTH = 200, 128
LIMIT, COMING = 240, 120
SECONDS = 180.0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "shared"])
def test_a_guessed_prefix_of_another_tenant_takes_as_long_as_a_cold_one(
    fleet: Fleet, report: Report, tmp_path: Path, is_shared: bool
) -> None:
    keys = tmp_path / "keys.json"
    a, b = add_key(keys, "a"), add_key(keys, "b")
    settings = {
        "router.tenants.keys_file": str(keys),
        "router.tenants.share_prefixes": is_shared,
        "engine.kv_cache_bytes": 1 << 30,
    }
    profile = Profile("apart", settings, api_key=add_key(keys, "w", KeyScope.OPERATOR))
    with fleet.once(profile, fleet.models.bundled) as system:
        clients = [Client(system.port, api_key=key) for key in (a, b)]
        measure(*clients, fleet.models.bundled, 5, LENGTH, seed=1)  # warm
        timing = measure(*clients, fleet.models.bundled, NUM, LENGTH, seed=2)
    report("g", "prefixes shared" if is_shared else "tenants apart", timing)
    if is_shared:
        assert timing.num_samples_hit >= NUM
        assert timing.p_value < 1e-6
    else:
        assert timing.num_hits == 0
        assert timing.p_value > 0.01
        assert abs(timing.ratio - 1) < 0.03


@pytest.mark.timeout(900)
def test_limits_are_exact_over_two_routers_and_those_who_wait_as_told_get_in(
    fleet: Fleet, report: Report, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    names = ("eager", "polite")
    made = {name: add_key(keys, name) for name in names}
    settings = {
        "router.tenants.keys_file": str(keys),
        "router.tenants.limits": [
            {"name": "eager", "max_requests_per_minute": LIMIT},
            {"name": "polite", "max_requests_per_minute": COMING},
        ],
        "cluster.num_routers": 2,
    }
    operator = add_key(keys, "w", KeyScope.OPERATOR)
    profile = Profile("two-routers", settings, is_local=False, api_key=operator)
    with fleet.once(profile, fleet.models.path("toy")) as system:
        time.sleep(6.0)  # the owner of the limits has heard of both routers
        floods = {name: Flood(Client(system.port, api_key=made[name])) for name in names}
        threads = [
            threading.Thread(target=floods["eager"].insist, args=(2.5 * LIMIT / 60, SECONDS)),
            threading.Thread(target=floods["polite"].come_back, args=(1.5 * COMING / 60, SECONDS)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    eager, polite = floods["eager"], floods["polite"]
    report("g", f"{LIMIT} a minute over two routers, 2.5 times as many asked", eager)
    report("g", "told when to come back, over two routers", polite)
    assert eager.most_in_a_minute() <= 1.02 * LIMIT
    assert eager.num_let_in(SECONDS) >= 0.98 * LIMIT * SECONDS / 60
    assert polite.most_in_a_minute() <= 1.02 * COMING
    assert polite.share_of_returns() >= 0.9
