"""A control service that does not answer: the calls end in time and hold up nobody else."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray

from cluster import registry
from cluster.registry import RegistryClient, RegistryMembership
from cluster.registry_table import Membership


async def test_a_look_up_that_hangs_ends_in_time_and_leaves_the_loops_threads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    waiting: list[str] = []

    def hang(*_: object) -> object:
        waiting.append(threading.current_thread().name)
        answers.wait(30)
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", hang)
    monkeypatch.setattr(registry, "CALL_TIMEOUT_S", 0.02)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    client = RegistryClient()
    membership = RegistryMembership(client)
    try:
        async with asyncio.timeout(5):
            for _ in range(5):
                assert await membership.announcements() == ()
            assert await asyncio.to_thread(lambda: "free") == "free"
            while not waiting:  # noqa: ASYNC110 - a thread raises no event of this loop
                await asyncio.sleep(0.005)
        assert len(waiting) == 1, "look-ups that nobody waits for must not pile up"
    finally:
        answers.set()


async def test_a_slow_look_up_serves_the_calls_after_the_one_that_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    line = Membership((), is_settled=True)

    class Remote:
        async def remote(self) -> Membership:
            return line

    def find(*_: object) -> object:
        answers.wait(30)
        return SimpleNamespace(membership=Remote())

    monkeypatch.setattr(ray, "get_actor", find)
    monkeypatch.setattr(registry, "CALL_TIMEOUT_S", 0.02)
    client = RegistryClient()
    with pytest.raises(ConnectionError):
        await client.call("membership")
    answers.set()
    monkeypatch.setattr(registry, "CALL_TIMEOUT_S", 5.0)
    assert await client.call("membership") is line
