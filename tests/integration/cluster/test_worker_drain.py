"""A worker that is told to go: what runs there ends or is sent on, nothing new comes in, Serve hears it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.config import config_from_settings
from cluster.drain_table import DrainOrder
from cluster.worker_host import WorkerHost
from core.errors import WorkerDraining, WorkerError, WorkerLost
from core.ids import RequestId, Role, WorkerId
from core.jobs import GenerateEvent, GenerateJob, SampleStart
from core.peer_security import PeerSecurity, new_cluster_token
from core.request import FinishReason, Request, SamplingParams
from core.role_change import RoleOrder
from core.worker_status import Announcement
from router.worker_clients import GrpcWorker
from tests.oracle import make_toy_checkpoint

ENDLESS = 30_000
Follow = Callable[[RoleOrder | DrainOrder], None]


class Herald:
    """Where the registry would be: hands the test what the worker gives it."""

    def __init__(self) -> None:
        self.follow: Follow | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.withdrawn: list[WorkerId] = []

    async def keep_announcing(self, announcement: Callable[[], Announcement], follow: Follow) -> None:
        self.follow, self.loop = follow, asyncio.get_running_loop()
        await asyncio.Event().wait()

    async def announce(self, announcement: Announcement) -> RoleOrder | DrainOrder | None:
        return None

    async def withdraw(self, announcement: Announcement) -> None:
        self.withdrawn.append(announcement.ref.worker_id)

    async def members(self) -> tuple[Announcement, ...] | None:
        return None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    return make_toy_checkpoint(folder, eos_token_id=2, max_position_embeddings=2 * ENDLESS)


@dataclass
class Site:
    """A decode worker in a process of its own, as far as it knows, and a router's connection to it, which
    stays until `calls` have ended.
    """

    host: WorkerHost
    herald: Herald
    worker: GrpcWorker
    calls: list[asyncio.Task[list[GenerateEvent]]] = field(default_factory=list)

    def order(self, within_s: float | None) -> None:
        assert self.herald.follow is not None
        assert self.herald.loop is not None
        order = DrainOrder(self.host.ref.worker_id, self.host.ref.epoch, within_s)
        self.herald.loop.call_soon_threadsafe(self.herald.follow, order)


@asynccontextmanager
async def running(checkpoint: Path, stop_s: float = 0.0) -> AsyncIterator[Site]:
    """Stopped at the end, with `stop_s` for what runs then."""
    engine = {"model": str(checkpoint), "num_kv_blocks": 2000, "threads": 1}
    config = config_from_settings({"engine": engine, "cluster": {"drain_timeout_s": 60.0}})
    herald, security = Herald(), PeerSecurity(new_cluster_token())
    host = await asyncio.to_thread(
        WorkerHost, config, Role.DECODE, WorkerId("decode-a"), "127.0.0.1", herald, security
    )
    worker = GrpcWorker(host.ref, security)
    site = Site(host, herald, worker)
    try:
        yield site
    finally:
        await host.stop(stop_s)
        # what the worker said last is read before the connection is closed
        await asyncio.gather(*site.calls, return_exceptions=True)
        await worker.close()


def job(name: str, max_tokens: int) -> GenerateJob:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = Request(RequestId(name), (5, 6, 7, 8), sampling)
    return GenerateJob(request, (SampleStart(0),), ticket_id=None, attempt=0, time_left_s=100.0)


async def read(events: AsyncIterator[GenerateEvent], started: asyncio.Event) -> list[GenerateEvent]:
    seen = []
    async for event in events:
        seen.append(event)
        started.set()
    return seen


async def keep_asking(worker: GrpcWorker) -> None:
    """One short answer after the other."""
    for number in itertools.count():
        await read(worker.generate(job(f"late {number}", 1)), asyncio.Event())


async def until_replaceable(host: WorkerHost) -> None:
    """Serve asks each second, and starts another worker when this raises."""
    while True:
        try:
            host.check_health()
        except WorkerError as error:
            assert "was drained" in error.message  # noqa: PT017 - polled
            return
        await asyncio.sleep(0.01)


async def test_what_runs_has_its_time_and_nothing_new_comes_in(checkpoint: Path) -> None:
    async with running(checkpoint) as site:
        started = asyncio.Event()
        short = asyncio.create_task(read(site.worker.generate(job("short", 300)), started))
        await started.wait()
        site.order(None)
        events = await short
        assert events[-1].delta.finish_reason is FinishReason.LENGTH
        assert sum(len(event.delta.token_ids) for event in events) == 300
        await until_replaceable(site.host)
        assert site.herald.withdrawn == ["decode-a"]
        with pytest.raises((WorkerDraining, WorkerLost)):
            await keep_asking(site.worker)


async def test_what_does_not_end_in_time_is_sent_on_and_newcomers_are_refused_meanwhile(
    checkpoint: Path,
) -> None:
    async with running(checkpoint) as site:
        started = asyncio.Event()
        endless = asyncio.create_task(read(site.worker.generate(job("endless", ENDLESS)), started))
        await started.wait()
        site.order(1000.0)
        with pytest.raises(WorkerDraining):
            await keep_asking(site.worker)
        site.host.check_health()
        assert not endless.done()
        site.order(0.1)
        with pytest.raises(WorkerDraining):
            await endless
        await until_replaceable(site.host)


async def test_a_service_that_stops_does_not_wait_for_the_longer_drain_of_a_worker(checkpoint: Path) -> None:
    async with running(checkpoint, stop_s=0.1) as site:
        started = asyncio.Event()
        endless = asyncio.create_task(read(site.worker.generate(job("endless", ENDLESS)), started))
        site.calls.append(endless)
        await started.wait()
        site.order(1000.0)
        with pytest.raises(WorkerDraining):
            await keep_asking(site.worker)
    with pytest.raises(WorkerDraining):
        await endless
