"""Autoscaling on a cluster of several nodes: load up and away, KV, a node that drains, nodes come and go.

Replicas ask for a CPU each, and each node has one or two, so that a replica is a node's business.
"""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cluster.autoscaler.need import Cause
from core import telemetry
from core.ids import Role
from tests.accept.ray_nodes import RayNodes
from tests.e2e import scaling
from tests.e2e.client import Client
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import BATON, Profile, System
from tests.e2e.scaling import ask, asking, replayed, replicas, wait_replicas
from tests.e2e.scrape import rise, scrape, wait_until

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    nodes = RayNodes(tmp_path)
    yield nodes
    nodes.stop()


def test_load_up_adds_replicas_and_load_away_drains_them_without_losing_a_stream(
    nodes: RayNodes, fleet: Fleet, tmp_path: Path, report: Report
) -> None:
    for _ in range(2):
        nodes.add(num_cpus=2)
    log = tmp_path / "decisions.jsonl"
    with nodes.service(waves("nodes", log, fleet.models.toy()), tmp_path) as system:
        client = system.client
        # a long stream goes on through all of it
        with asking(client, 1, lambda number: ask(number, 50, 600)) as long_ones:
            for turn in range(2):
                with wave(client):
                    took = wait_replicas(client, 300.0, prefill=2, decode=2)
                    report("nodes", f"load up, turn {turn + 1}: four replicas", f"{took:.1f} s")
                took = wait_replicas(client, 200.0, prefill=1, decode=1)
                report("nodes", f"load away, turn {turn + 1}: two replicas", f"{took:.1f} s")
        long_ones.check(600)
        report("nodes", "streams that ran meanwhile, all whole", len(long_ones.answers))
        assert not scrape(client).value(telemetry.KV_LEAK_DIFFERENCE)
        assert not scaling.controller_errors(nodes.processes())
    events = replayed(log)
    for role in Role:
        # up and down twice: the three changes of load between them turn it, and nothing else
        assert scaling.num_reversals(events, role) <= 3, scaling.changes(events, role)
    report_replay(report, "nodes", log)


def report_replay(report: Report, grid: str, log: Path) -> None:
    """As an operator would do it: each decision comes out as it did."""
    command = [BATON, "decisions", "replay", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "none of them otherwise" in done.stdout) == (0, True), done.stdout + done.stderr
    report(grid, "decided again", done.stdout.strip())


def waves(name: str, log: Path, model: Path) -> Profile:
    """A service whose pools two kinds of clients grow, and one stream alone does not."""
    return scaling.profile(
        name,
        log,
        model,
        # of 64 places and of a worker's rate: few clients are much, so that the host can start replicas, too
        autoscaling__target_utilization=0.1,
        autoscaling__idle_delay_s=600.0,
        autoscaling__can_flip=False,
        decode__max_num_seqs=64,
    )


@contextmanager
def wave(client: Client) -> Iterator[None]:
    """Prompts to read, and ten streams at a time where six count as one worker's; each ends whole."""
    with (
        asking(client, 2, lambda number: ask(100 + number, 1500, 2), 0.2) as prompts,
        asking(client, 10, lambda number: ask(50_000 + number, 50, 400)) as streams,
    ):
        yield
    prompts.check(2)
    streams.check(400)


def test_kv_that_fills_grows_decode_before_the_first_preemption(
    fleet: Fleet, tmp_path: Path, report: Report
) -> None:
    log = tmp_path / "decisions.jsonl"
    # 28 streams of 3,040 tokens come to 94 % of 90,000 when they end, and nothing else is scarce
    profile = scaling.profile(
        "kv",
        log,
        fleet.models.toy(),
        autoscaling__target_itl_s=5.0,
        autoscaling__window_s=2.0,
        decode__max_num_seqs=80,
        decode_engine__num_kv_blocks=5625,
    )
    with System(profile, tmp_path) as system:
        client = system.client
        before = scrape(client)
        jobs = [partial(client.complete, **ask(number, 40, 3000)) for number in range(28)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(job) for job in jobs]
            took = wait_until(
                lambda: "" if replicas(client, scaling.WANTED).get("decode") == 2 else "one worker", 200.0
            )
            after = scrape(client)
            assert not any(job.done() for job in running), "the pool was as full as it gets before the end"
            assert rise(before, after, telemetry.PREEMPTIONS) == 0
            report("kv", f"decode grows at KV {after.value(telemetry.KV_UTILIZATION):.0%}", f"{took:.1f} s")
            assert [job.result().num_tokens for job in running] == [3000] * len(jobs)
    grown = next(event for event in replayed(log) if event.decision.decode.num_replicas == 2)
    assert grown.decision.decode.need.cause is Cause.KV
    assert grown.decision.prefill.num_replicas == 1
    assert grown.inputs.router is not None
    assert grown.inputs.router.num_waiting == 0


def test_three_times_to_zero_and_back_and_nothing_keeps_or_wakes_a_pool_but_requests(
    fleet: Fleet, tmp_path: Path, report: Report
) -> None:
    log = tmp_path / "decisions.jsonl"
    profile = scaling.profile(
        "zero",
        log,
        fleet.models.toy(),
        autoscaling__min_prefill_workers=0,
        autoscaling__min_decode_workers=0,
    )
    with System(profile, tmp_path) as system:
        client = system.client
        for cycle in range(3):
            scaling.ask_of_all_kinds(client)
            took = wait_replicas(client, 60.0, prefill=0, decode=0)
            report("zero", f"cycle {cycle + 1}: nothing is asked, no workers", f"{took:.1f} s")
            start = time.monotonic()
            scaling.ask_at_zero(client)
            report("zero", f"cycle {cycle + 1}: woken and answered", f"{time.monotonic() - start:.1f} s")
        wait_replicas(client, 60.0, prefill=0, decode=0)
        # nobody asks: it stays so
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            assert replicas(client, scaling.WANTED) == {"prefill": 0, "decode": 0}
            time.sleep(1.0)
        assert not scaling.controller_errors(system.processes())
    replayed(log)


def test_a_worker_that_decode_can_spare_reads_prompts_before_a_replica_is_started(
    fleet: Fleet, tmp_path: Path, report: Report
) -> None:
    log = tmp_path / "decisions.jsonl"
    profile = scaling.profile(
        "flip",
        log,
        fleet.models.toy(),
        autoscaling__target_utilization=0.1,
        autoscaling__scale_down_delay_s=60.0,
        autoscaling__idle_delay_s=600.0,
        # what waits for prefill has its place on decode, and must not look like decode's own need
        decode__max_num_seqs=512,
    )
    profile = dataclasses.replace(profile, num_decode=2)
    with System(profile, tmp_path) as system:
        client = system.client

        def roles() -> dict[str, int]:
            counts = scrape(client).by_label(telemetry.WORKERS, "role", state="alive")
            return {role: round(count) for role, count in counts.items()}

        with asking(client, 1, lambda number: ask(5000 + number, 50, 400), 1.0) as long_ones:
            time.sleep(12.0)  # what decode can spare has to be known for a while
            with asking(client, 2, lambda number: ask(number, 3000, 2), 0.1) as many:
                took = wait_until(lambda: "" if roles().get("prefill") == 2 else str(roles()), 60.0, 0.3)
                report("flip", "a queue of prompts: a decode worker reads, too", f"{took:.1f} s")
            many.check(2)
            took = wait_until(lambda: "" if roles().get("decode") == 2 else str(roles()), 200.0, 0.3)
            report("flip", "without it, it goes home", f"{took:.1f} s")
        long_ones.check(400)
    events = replayed(log)
    ordered = [flip for event in events for flip in event.decision.flips]
    assert [flip.role for flip in ordered] == [Role.PREFILL, Role.DECODE], ordered
    first = next(index for index, event in enumerate(events) if event.decision.flips)
    assert all(event.decision.prefill.num_replicas == 1 for event in events[: first + 1])


def test_a_node_that_is_to_go_away_loses_no_stream(
    nodes: RayNodes, fleet: Fleet, tmp_path: Path, report: Report
) -> None:
    for _ in range(3):
        nodes.add()
    profile = scaling.profile("drain", tmp_path / "decisions.jsonl", fleet.models.toy())
    with nodes.service(profile, tmp_path) as system:
        client = system.client
        with asking(client, 2, lambda number: ask(number, 60, 400)) as work:
            wait_until(lambda: "" if work.answers else "no answer yet", 60.0)
            first = next(iter(nodes.workers("decode")))
            start = time.monotonic()
            said = subprocess.run(
                [BATON, "drain", first, "--within", "120", "--address", nodes.address],
                env=nodes.environment,
                capture_output=True,
                text=True,
                check=True,
            )
            assert "drains" in said.stdout

            def still_there() -> str:
                where = {role: nodes.workers(role) for role in ("prefill", "decode")}
                is_gone = all(found and first not in found for found in where.values())
                return "" if is_gone else f"workers: {where}"

            wait_until(still_there, 200.0, 0.5)
            report("drain", "a node has no workers any more", f"{time.monotonic() - start:.1f} s")
            num_before = len(work.answers)
            wait_until(lambda: "" if len(work.answers) > num_before + 2 else "no new answers", 60.0)
        work.check(400)
        report("drain", "streams meanwhile, all whole", len(work.answers))


def test_rays_autoscaler_starts_nodes_for_replicas_and_ends_them_when_they_are_empty(
    fleet: Fleet, tmp_path: Path, report: Report
) -> None:
    log = tmp_path / "decisions.jsonl"
    nodes = RayNodes(tmp_path, max_nodes=4)
    try:
        assert nodes.num_raylets() == 1, "the head alone, which has no room"
        with nodes.service(waves("elastic", log, fleet.models.toy()), tmp_path) as system:
            client = system.client
            assert nodes.num_raylets() == 3, "the head, and one node for each replica"
            with asking(client, 1, lambda number: ask(number, 50, 600)) as long_ones:
                with wave(client):
                    took = wait_replicas(client, 300.0, prefill=2, decode=2)
                    report("elastic", "load up: four replicas", f"{took:.1f} s")
                    assert nodes.num_raylets() == 5
                    assert [len(nodes.workers(role)) for role in Role] == [2, 2], "a node each"
                start = time.monotonic()
                wait_replicas(client, 200.0, prefill=1, decode=1)
                wait_until(lambda: "" if nodes.num_raylets() == 3 else "nodes are left", 120.0, 0.5)
                report("elastic", "load away: their nodes are gone", f"{time.monotonic() - start:.1f} s")
            long_ones.check(600)
            report("elastic", "streams that ran meanwhile, all whole", len(long_ones.answers))
            assert not scrape(client).value(telemetry.KV_LEAK_DIFFERENCE)
        wait_until(lambda: "" if nodes.num_raylets() == 1 else "nodes without a service", 120.0, 0.5)
    finally:
        nodes.stop()
    events = replayed(log)
    for role in Role:
        assert scaling.num_reversals(events, role) <= 1, scaling.changes(events, role)
    report_replay(report, "elastic", log)
