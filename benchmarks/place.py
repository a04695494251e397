"""How long placing a request takes, and what the index of cached blocks weighs.

`python -m benchmarks.place` fills the real worker table of a router through the workers' own feeds (no
network), places requests on it with the real placer, and prints one line for each size: hashing of the
prompt's blocks, then finding candidates, choosing and reserving. The first line is the size that has a bar:
8,192 tokens, 64 workers (half of each role), a million blocks; place p99 <= 1 ms, hashing <= 3 ms. The others
change one of the three. Processor time beside it tells what a busy machine adds. A quarter of the prompt is
cached on every second worker. Exit status 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.block_hash import BlockHash, hash_blocks, root_hash
from core.clock import MonotonicClock
from core.errors import InvalidRequest
from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SnapshotJob,
    WatchEvent,
)
from core.kv_layout import KVLayout
from core.request import Request, SamplingParams
from core.worker_status import Announcement, BlockEvent, BlockEventKind, StepCost, WorkerStatus
from kv_transfer.feed import Feed
from router.collector import collect_less_often
from router.config import RouterConfig
from router.decision import Demand
from router.metrics import RouterMetrics
from router.placer import Placer
from router.setbacks import Setbacks
from router.worker_table import WorkerTable
from router.workers import InProcessWorker, Worker

LAYOUT = KVLayout("model", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
COST = StepCost(decode_s=0.01, stream_s=0.0005, prefill_s=0.01, token_s=0.0001)
PLACE_MS, HASH_MS = 1.0, 3.0


@dataclass(frozen=True, slots=True)
class Size:
    num_tokens: int = 8192
    num_workers: int = 64
    num_blocks: int = 1_000_000


SIZES = (
    Size(),
    Size(num_tokens=1024),
    Size(num_tokens=32768),
    Size(num_workers=8),
    Size(num_workers=256),
    Size(num_blocks=10_000),
    Size(num_blocks=100_000),
)


class FeedWorker:
    """A worker that has only blocks and a load to tell of."""

    def __init__(self, ref: WorkerRef, num_blocks: int) -> None:
        self.ref = ref
        self.feed = Feed(ref.epoch)
        self._num_blocks = num_blocks

    def announcement(self) -> Announcement:
        role = self.ref.role.value
        return Announcement(self.ref, "m", LAYOUT, 65536, 1, self.ref.worker_id, role, self._num_blocks)

    def status(self) -> WorkerStatus:
        free = self._num_blocks // 2
        counts = (0, 0, 0, 0, self._num_blocks, free, self._num_blocks - free, 0, 0, 256)
        return WorkerStatus(self.ref, False, *counts, alone=COST, beside=COST)

    def watch(self) -> AsyncIterator[WatchEvent]:
        return self.feed.subscribe()

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        return self.feed.page(job)

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        raise InvalidRequest("this worker only tells what it holds")

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        raise InvalidRequest("this worker only tells what it holds")

    async def lend(self, job: LendJob) -> LendResult:
        raise InvalidRequest("this worker only tells what it holds")

    async def cancel(self, job: CancelJob) -> None:
        return None

    async def metrics(self) -> bytes:
        return b""


class Cluster:
    """The table of one router, filled for `size`."""

    def __init__(self, size: Size, chance: random.Random) -> None:
        self.tokens = [chance.randrange(49_000) for _ in range(size.num_tokens)]
        names = hash_blocks(root_hash("", LAYOUT.fingerprint), self.tokens, LAYOUT.block_size)
        self._shared = names[: max(1, len(names) // 4)]
        self._size = size
        self._chance = chance
        self._open: list[Callable[[], None]] = []
        num_each = size.num_blocks // size.num_workers
        roles = (Role.PREFILL, Role.DECODE)
        refs = [
            WorkerRef(WorkerId(f"w{index}"), roles[index % 2], Epoch(1), "")
            for index in range(size.num_workers)
        ]
        self.workers = {ref: FeedWorker(ref, 4 * num_each) for ref in refs}
        clock = MonotonicClock()
        self.table = WorkerTable(RouterConfig(suspect_after_s=600.0), self, self._connect, clock)
        self.placer = Placer(RouterConfig(), self.table, RouterMetrics(), clock, chance)

    async def announcements(self) -> tuple[Announcement, ...]:
        return tuple(worker.announcement() for worker in self.workers.values())

    def _connect(self, ref: WorkerRef) -> Worker:
        return InProcessWorker(self.workers[ref])

    async def fill(self) -> float:
        """Bytes that the router needs for each block of a worker."""
        loop = asyncio.get_running_loop()
        num_each = self._size.num_blocks // self._size.num_workers
        for index, worker in enumerate(self.workers.values()):
            names = list(self._shared if index % 4 < 2 else ())[:num_each]
            events = [_stored(name, parent) for name, parent in zip(names, [None, *names], strict=False)]
            while len(events) < num_each:
                events.append(_stored(BlockHash(self._chance.randbytes(16)), None))
            worker.feed.append(events)
            worker.feed.publish_status(worker.status())
            worker.feed.start(loop)
        before = _resident_bytes()
        await self.table.start()
        deadline = time.monotonic() + 300.0
        while min(self.table.index.num_blocks(ref.worker_id) for ref in self.workers) < num_each:
            if time.monotonic() > deadline:
                raise TimeoutError("the index was not filled within 300 s")
            await asyncio.sleep(0.05)
        return (_resident_bytes() - before) / self._size.num_blocks

    def place(self, number: int) -> tuple[float, float, float]:
        """Seconds of hashing and of placing one request that shares the cached beginning, and the processor
        time of the latter.
        """
        tokens = (
            *self.tokens[: len(self.tokens) // 4],
            *self._chance.choices(range(49_000), k=len(self.tokens)),
        )
        tokens = tokens[: len(self.tokens)]
        request = Request(RequestId(f"r{number}"), tokens, SamplingParams(max_tokens=64, seed=1))
        setbacks = Setbacks(self.placer.config, self.placer.clock)
        began = time.perf_counter()
        search = self.placer.seek(request, tokens, Demand(len(tokens), num_output_tokens=64))
        search.name_blocks()
        hashed, computed = time.perf_counter(), time.thread_time()
        chosen = search.choose(setbacks, self.placer.clock.now())
        ended, computed = time.perf_counter(), time.thread_time() - computed
        assert chosen is not None
        if chosen.placed is not None:
            self._open.append(chosen.placed.close)
        if len(self._open) > self._size.num_workers:
            self._open.pop(self._chance.randrange(len(self._open)))()
        return hashed - began, ended - hashed, computed


def _stored(name: BlockHash, parent: BlockHash | None) -> BlockEvent:
    return BlockEvent(BlockEventKind.STORED, name, parent)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1e3


async def measure(size: Size, num_requests: int) -> bool:
    """Print the line of one size; whether the bars were met."""
    chance = random.Random(7)
    cluster = Cluster(size, chance)
    bytes_per_block = await cluster.fill()
    hashing, placing, computing = [], [], []
    for number in range(num_requests):
        if number % 20 == 0:
            await asyncio.sleep(0)
        hash_s, place_s, computed_s = cluster.place(number)
        hashing.append(hash_s)
        placing.append(place_s)
        computing.append(computed_s)
    hash_ms, place_ms = _percentile(hashing, 99), _percentile(placing, 99)
    print(
        f"{size.num_tokens:>6} tokens {size.num_workers:>4} workers {size.num_blocks:>8} blocks: "
        f"hash p50 {_percentile(hashing, 50):.2f} p99 {hash_ms:.2f} ms, "
        f"place p50 {_percentile(placing, 50):.3f} p99 {place_ms:.3f} ms "
        f"(processor {_percentile(computing, 50):.3f} and {_percentile(computing, 99):.3f}), "
        f"index {bytes_per_block:.0f} B/block",
        flush=True,
    )
    await cluster.table.stop()
    for worker in cluster.workers.values():
        worker.feed.close()
    return place_ms <= PLACE_MS and hash_ms <= HASH_MS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="placed at each size")
    parser.add_argument("--first-only", action="store_true", help="only the size with the bar")
    options = parser.parse_args()
    collect_less_often()  # as a router's process does
    is_met = asyncio.run(measure(SIZES[0], options.requests))
    for size in () if options.first_only else SIZES[1:]:
        asyncio.run(measure(size, options.requests))
    print(f"bars (place p99 <= {PLACE_MS} ms, hashing p99 <= {HASH_MS} ms): {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
