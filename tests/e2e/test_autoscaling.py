"""The pools of a running service follow what is asked of it: up for a queue, down to nothing, and back, where
counts that leak would keep them (cases 38 and 39).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.ids import Role
from tests.e2e import scaling, wire
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.scaling import ask, asking, replayed, wait_replicas

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaling") / "decisions.jsonl"


@pytest.fixture(scope="module")
def system(fleet: Fleet, log: Path) -> Iterator[System]:
    profile = scaling.profile(
        "scaling",
        log,
        fleet.models.toy(),
        autoscaling__min_prefill_workers=0,
        autoscaling__min_decode_workers=0,
        autoscaling__target_ttft_s=0.2,
    )
    with System(profile, log.parent) as system:
        yield system


def test_a_queue_grows_prefill_alone_nothing_is_zero_and_a_request_wakes_it(
    system: System, log: Path, report: Report
) -> None:
    client = system.client
    with asking(client, 12, lambda number: ask(number, 3000, 2)) as work:
        took = wait_replicas(client, 60.0, prefill=2)
        report("scale", "a queue of prompts: two prefill workers", f"{took:.1f} s")
        assert scaling.replicas(client, scaling.WANTED)["decode"] == 1, "decode has next to nothing to do"
    work.check(2)

    took = wait_replicas(client, 60.0, prefill=0, decode=0)
    report("scale", "nothing is asked: no workers", f"{took:.1f} s")
    ready = wire.request(system.port, "GET", "/ready")
    assert (ready.status, ready.json()["status"]) == (200, "scaled to zero")
    assert ready.json()["asleep"] == ["prefill", "decode"]
    assert wire.request(system.port, "GET", "/health").status == 200

    start = time.monotonic()
    scaling.ask_at_zero(client)
    report("scale", "refusals wake nobody, requests do and are answered", f"{time.monotonic() - start:.1f} s")
    # a count that leaks would keep a worker for ever
    scaling.ask_of_all_kinds(client)
    took = wait_replicas(client, 60.0, prefill=0, decode=0)
    report("scale", "after streams, aborts and refusals: no workers again", f"{took:.1f} s")

    events = replayed(log)
    for role in Role:
        # up for the load, down without it, up for the requests, down without them
        assert scaling.num_reversals(events, role) <= 3, scaling.changes(events, role)
    assert not scaling.controller_errors(system.processes())
