"""The index of a router, fed by workers' real feeds over real gRPC, on connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from core.block_hash import BlockHash
from core.clock import MonotonicClock
from core.errors import InvalidRequest
from core.ids import Epoch, Role, TicketId, WorkerId, WorkerRef
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SampleStart,
    SnapshotJob,
    WatchEvent,
)
from core.peer_security import PeerSecurity
from core.worker_status import Announcement, BlockEvent, BlockEventKind, WorkerStatus
from kv_transfer.feed import Feed
from protos.service import serve_worker
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.worker_clients import GrpcWorker
from router.worker_entry import WorkerState
from router.worker_table import WorkerTable
from tests.unit.router.scripted import LAYOUT, new_request

WAIT_S = 10.0


def _name(number: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16).digest())


class Line:
    """A way to the worker's port that can be cut, and be joined again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self.is_cut = False
        self.num_calls = 0

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self.is_cut = True
        for end in self._ends:
            end.transport.abort()

    async def close(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        self.num_calls += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends |= {writer, far_writer}
        with contextlib.suppress(OSError):
            await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
        self._ends -= {writer, far_writer}


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


class FedWorker:
    """A worker that has blocks and a load, told by a real feed. `door` holds its pages back."""

    def __init__(self) -> None:
        self.ref = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(5), "")
        self.feed = Feed(self.ref.epoch, repeat_s=0.1)
        self.door = asyncio.Event()
        self.door.set()
        self.pages: list[BlockPage] = []

    def announcement(self) -> Announcement:
        return Announcement(self.ref, "toy", LAYOUT, 512, 1, "here", "prefill", 100_000)

    def store(self, *numbers: int) -> None:
        self.feed.append([BlockEvent(BlockEventKind.STORED, _name(number)) for number in numbers])

    def report(self) -> None:
        self.feed.publish_status(WorkerStatus(self.ref, False, 0, 0, 0, 0, 100, 100, 0, 0, 0, 8))

    def watch(self) -> AsyncIterator[WatchEvent]:
        return self.feed.subscribe()

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        await self.door.wait()
        self.pages.append(self.feed.page(job))
        return self.pages[-1]

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        self.feed.arrived(job.request.num_prompt_tokens, len(job.samples), 3)
        raise InvalidRequest("this worker only tells what it holds")

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        raise InvalidRequest("this worker only tells what it holds")

    async def lend(self, job: LendJob) -> LendResult:
        raise InvalidRequest("this worker only tells what it holds")

    async def cancel(self, job: CancelJob) -> None:
        return None

    async def metrics(self) -> bytes:
        return b""


class Site:
    """The worker, the line to it, and routers that know it."""

    def __init__(self, worker: FedWorker, line: Line) -> None:
        self.worker = worker
        self.line = line
        self.tables: list[WorkerTable] = []

    async def announcements(self) -> tuple[Announcement, ...]:
        return (self.worker.announcement(),)

    async def router(self) -> WorkerTable:
        config = RouterConfig(membership_poll_s=0.05, reconnect_s=0.05)
        table = WorkerTable(config, self, GrpcWorker, MonotonicClock())
        self.tables.append(table)
        await table.start()
        return table


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    worker = FedWorker()
    worker.feed.start(asyncio.get_running_loop())
    worker.report()
    server: Any
    server, port = await serve_worker(worker, "127.0.0.1", PeerSecurity())
    line = Line(port)
    worker.ref = replace(worker.ref, address=f"127.0.0.1:{await line.open()}")
    site = Site(worker, line)
    yield site
    for table in site.tables:
        await table.stop()
    worker.feed.close()
    await line.close()
    await server.stop(grace=None)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the other side of the socket sets no event
            await asyncio.sleep(0.005)


def _is_right(table: WorkerTable, site: Site) -> bool:
    index, (count, _) = table.index, site.worker.feed.digest
    worker_id = site.worker.ref.worker_id
    return index.confidence(worker_id) == 1.0 and index.num_blocks(worker_id) == count


async def test_a_router_that_starts_serves_at_once_and_learns_what_is_there_in_pieces(site: Site) -> None:
    site.worker.door.clear()
    site.worker.store(*range(3000))
    table = await site.router()
    await _until(lambda: bool(table.usable(Role.PREFILL)))
    assert table.index.match([_name(0)]) == {}
    assert table.index.confidence(site.worker.ref.worker_id) < 1
    site.worker.store(3000)  # what is new is known before what is old
    await _until(lambda: table.index.match([_name(3000)]) == {"p": 1})
    site.worker.door.set()
    await _until(lambda: _is_right(table, site))
    assert table.index.match([_name(number) for number in range(3001)]) == {"p": 3001}
    assert len(site.worker.pages) >= 6
    assert max(len(page.hashes) for page in site.worker.pages) <= 512


async def test_a_stream_that_is_cut_is_joined_again_and_only_what_it_missed_is_fetched(site: Site) -> None:
    site.worker.store(*range(2000))
    table = await site.router()
    await _until(lambda: _is_right(table, site))
    (entry,) = table.entries()
    site.worker.pages.clear()
    site.line.cut()
    await _until(lambda: entry.state is WorkerState.DEAD)
    assert table.index.match([_name(0), _name(1)]) == {"p": 2}, "what is known of it stays"
    assert table.index.confidence(entry.ref.worker_id) < 1
    site.worker.store(2000, 2001)
    site.line.is_cut = False
    await _until(lambda: entry.state is WorkerState.ALIVE and _is_right(table, site))
    assert table.index.match([_name(2000), _name(2001)]) == {"p": 2}
    assert 2 <= sum(len(page.hashes) for page in site.worker.pages) < 20, "their two parts, of 4,096"
    assert site.line.num_calls == 2
    metrics = RouterMetrics()
    metrics.watch_table(table)
    text = generate_latest(metrics.registry).decode()
    assert 'baton_index_blocks{worker="p"} 2002.0' in text
    assert 'baton_index_repairs_total{reason="joined"} 2.0' in text
    assert 'baton_index_confidence{worker="p"} 1.0' in text


async def test_what_one_router_places_the_others_know_as_soon_as_it_has_arrived(site: Site) -> None:
    first, second = await site.router(), await site.router()
    await _until(lambda: bool(first.usable(Role.PREFILL) and second.usable(Role.PREFILL)))
    (mine,), (theirs,) = first.entries(), second.entries()
    assert theirs.num_ahead_tokens == 0
    job = _job(40)
    with pytest.raises(InvalidRequest):
        await mine.worker.prefill(job)
    await _until(lambda: theirs.num_ahead_tokens == 40)
    site.worker.report()  # the load as the worker counts it takes its place
    await _until(lambda: theirs.num_ahead_tokens == 0)


def _job(num_tokens: int) -> PrefillJob:
    request = replace(new_request(), prompt_token_ids=tuple(range(3, 3 + num_tokens)))
    return PrefillJob(request, (SampleStart(0),), TicketId(""), None, 1, 30.0)
