"""The registry actor under SIGKILL, in a real Ray cluster: nobody who asks or announces notices."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import ray

from cluster.registry import RegistryClient, RegistryHerald, RegistryMembership, start_registry
from cluster.registry_table import LAPSE_S
from core.ids import Role, WorkerId, WorkerRef, new_epoch
from core.kv_layout import KVLayout
from core.worker_status import Announcement

LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16)


def line(name: str) -> Announcement:
    ref = WorkerRef(WorkerId(name), Role.DECODE, new_epoch(), "127.0.0.1:1")
    return Announcement(ref, "m", LAYOUT, max_context=64, pid=1, node="n", home_pool="decode", num_blocks=4)


@pytest.fixture(scope="module")
def registry() -> Iterator[object]:
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield start_registry()
        ray.shutdown()


def registry_pids() -> set[int]:
    """Processes below this one that carry the actor's name."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ray::Registry" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


async def wait_for(membership: RegistryMembership, names: set[str], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while {str(item.ref.worker_id) for item in await membership.announcements()} != names:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_killed_registry_is_not_noticed_and_fills_again(registry: object) -> None:
    heralds = [asyncio.create_task(RegistryHerald(RegistryClient()).keep_announcing(lambda: alive))]
    alive, gone = line("alive"), line("gone")
    gone_herald = asyncio.create_task(RegistryHerald(RegistryClient()).keep_announcing(lambda: gone))
    membership = RegistryMembership(RegistryClient())
    await wait_for(membership, {"alive", "gone"})

    (victim,) = registry_pids()
    os.kill(victim, signal.SIGKILL)
    gone_herald.cancel()
    # a router that asks all the time sees both, through the death and the empty table of the newborn actor
    killed_at = time.monotonic()
    longest_s = 0.0
    while time.monotonic() - killed_at < LAPSE_S:
        asked_at = time.monotonic()
        found = {str(item.ref.worker_id) for item in await membership.announcements()}
        longest_s = max(longest_s, time.monotonic() - asked_at)
        if not registry_pids() - {victim}:
            assert found == {"alive", "gone"}
        assert "alive" in found
        await asyncio.sleep(0.05)
    assert longest_s < 2.0

    # a router that starts now finds the worker in the new actor; the one that went with the old is forgotten
    await wait_for(RegistryMembership(RegistryClient()), {"alive"})
    await wait_for(membership, {"alive"})
    assert registry_pids() != {victim}
    for herald in heralds:
        herald.cancel()


async def test_a_withdrawn_worker_is_gone_at_once(registry: object) -> None:
    herald = RegistryHerald(RegistryClient())
    leaving = line("leaving")
    task = asyncio.create_task(herald.keep_announcing(lambda: leaving))
    membership = RegistryMembership(RegistryClient())
    await wait_for(membership, {"leaving"} | {str(i.ref.worker_id) for i in await membership.announcements()})
    task.cancel()
    await herald.withdraw(leaving)
    fresh = RegistryMembership(RegistryClient())
    assert "leaving" not in {str(item.ref.worker_id) for item in await fresh.announcements()}
