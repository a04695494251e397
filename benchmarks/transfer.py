"""The bridge against what it stands on: gRPC against a bare gRPC byte stream, shared memory against a memcpy,
a process group (gloo) against gRPC.

Prefill's end runs in this process, decode's in a child, each with a real pool of blocks; decode's pool is
written on a step thread, as a worker's is. All variants move the same payload in turn, round by round, so
that whatever else the machine does falls on each of them. One line each: the median of the rounds, and the
median of the ratios within the rounds. A handover is timed from the first block added to the commit's reply.

The last line is of the payload's own path through shared memory, without the messages: prefill gathers blocks
into a slot and sums them up, decode copies them to its blocks and verifies them. The two work at the same
time, so the slower one decides; each is measured alone, in one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.pool_port import PoolPort
from core.block_hash import BlockHash
from core.clock import Deadline, MonotonicClock
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.kv_layout import KVLayout
from core.peer_security import PeerSecurity
from engine.kv.pool import KVPool
from engine.pair_group import groups_of
from kv_transfer.codec import PayloadCheck, payload_checksum
from kv_transfer.config import BridgeConfig, Distributed, ReceiverConfig, SharedMemory
from kv_transfer.group_acceptor import offer_groups
from kv_transfer.grpc_transport import add_kv_transfer_servicer
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.shm_acceptor import offer_shared_memory
from kv_transfer.shm_transport import connect_as_configured
from protos.grpc_options import CHANNEL_OPTIONS, SERVER_OPTIONS

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "135m-fp32": KVLayout("m", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16),
    "8b-bf16": KVLayout("m", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16"),
}
WAYS = {
    "grpc": BridgeConfig(shm=SharedMemory.NEVER, distributed=Distributed.NEVER),
    "shm": BridgeConfig(shm=SharedMemory.REQUIRED, distributed=Distributed.NEVER),
    "distributed": BridgeConfig(shm=SharedMemory.NEVER, distributed=Distributed.REQUIRED),
}
BARE = "/bare/Push"
PARTS = ("gather", "checksum", "scatter", "scatter and verify")


async def serve(layout: KVLayout, num_blocks: int) -> None:
    """Decode's end, until its standard input ends: prints epoch and port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    ref = WorkerRef(WorkerId("decode"), Role.DECODE, new_epoch(), "")
    receiver = Receiver(
        PoolPort(filled(layout, num_blocks, 0), range(num_blocks)),
        ref,
        layout,
        TransferMetrics(CollectorRegistry()),
    )
    offer_shared_memory(receiver, ReceiverConfig())
    offer_groups(receiver, ReceiverConfig(), PeerSecurity(), groups_of(KVPool(layout, 1), "127.0.0.1"))
    add_kv_transfer_servicer(server, receiver)

    async def take(frames: AsyncIterator[bytes], context: Any) -> None:
        async for frame in frames:
            await context.write(len(frame).to_bytes(8, "little"))

    handlers = {"Push": grpc.stream_stream_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    await server.start()
    print(json.dumps({"epoch": ref.epoch, "port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    await receiver.close()
    os._exit(0)  # the step thread sleeps


def filled(layout: KVLayout, num_blocks: int, seed: int) -> KVPool:
    """A pool of random bytes, every page of it touched."""
    pool = KVPool(layout, num_blocks)
    pool.tensor.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return pool


@asynccontextmanager
async def decode_process(layout: str, num_blocks: int) -> AsyncIterator[tuple[WorkerRef, int]]:
    """The worker's ref and its process id."""
    command = [sys.executable, "-m", "benchmarks.transfer", "--serve", layout, "--blocks", str(num_blocks)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = json.loads(await process.stdout.readline())
        address = f"127.0.0.1:{said['port']}"
        yield WorkerRef(WorkerId("decode"), Role.DECODE, Epoch(said["epoch"]), address), process.pid
    finally:
        process.stdin.close()
        await process.wait()


def processor_s(*pids: int) -> float:
    """Processor time that the threads which live in these processes have had."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Handover:
    """One way over the bridge, over a connection that stays open."""

    def __init__(self, pool: KVPool, decode: WorkerRef, config: BridgeConfig) -> None:
        self._pool, self._decode = pool, decode
        self._ref = WorkerRef(WorkerId("prefill"), Role.PREFILL, new_epoch(), "")
        self._clock = MonotonicClock()
        metrics = TransferMetrics(CollectorRegistry())
        groups = groups_of(pool, "127.0.0.1")
        connect = connect_as_configured(config, groups=groups)
        self.pairs = metrics.pairs
        self._sender = Sender(pool, self._ref, connect, self._clock, metrics, config)

    async def meet(self) -> None:
        """Make the pair ready, as a worker does when the other one appears."""
        self._sender.expect([self._decode])
        while not any(pair.is_warm for pair in self.pairs.statuses()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)

    async def first(self) -> float:
        """Seconds of the next handover with its offer."""
        started = time.perf_counter()
        await self()
        return time.perf_counter() - started

    async def __call__(self) -> float:
        layout, num_blocks = self._pool.layout, self._pool.num_blocks
        num_tokens = num_blocks * layout.block_size
        hashes = tuple(BlockHash(index.to_bytes(16, "little")) for index in range(num_blocks))
        ticket = HandoffTicket(
            new_ticket_id(), RequestId("r"), self._ref, self._decode, layout, num_tokens, hashes
        )
        session = self._sender.open(ticket, Deadline.after(60.0, self._clock))
        await session.offered()
        started = time.perf_counter()
        session.add_blocks(0, range(num_blocks))
        await session.finish(num_tokens)
        return time.perf_counter() - started

    async def close(self) -> None:
        await self._sender.close()


class BareStream:
    """The pool's bytes as ready-made messages through gRPC; the far end answers each and drops it.

    Messages of their own, as a payload has: one that is sent again and again would be read from a cache.
    """

    def __init__(self, decode: WorkerRef, pool: KVPool, config: BridgeConfig) -> None:
        payload = pool.tensor.view(torch.uint8).numpy().tobytes()
        firsts = range(0, len(payload), config.frame_bytes)
        self._messages = [payload[first : first + config.frame_bytes] for first in firsts]
        self._window = max(1, config.max_bytes_in_flight // config.frame_bytes)
        self._channel = grpc.aio.insecure_channel(decode.address, options=CHANNEL_OPTIONS)
        channel: Any = self._channel  # its published stubs do not know that serializers may be left out
        self._push = channel.stream_stream(BARE)

    async def __call__(self) -> float:
        call, window = self._push(), asyncio.Semaphore(self._window)
        started = time.perf_counter()

        async def read() -> None:
            for _ in self._messages:
                await call.read()
                window.release()

        reading = asyncio.create_task(read())
        for message in self._messages:
            await window.acquire()
            await call.write(message)
        await reading
        elapsed = time.perf_counter() - started
        call.cancel()
        return elapsed

    async def close(self) -> None:
        await self._channel.close(None)


class Memcpy:
    """One thread copies the payload from one place to another, both larger than any cache together."""

    def __init__(self, num_bytes: int) -> None:
        self._source = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
        self._target = np.ones_like(self._source)

    async def __call__(self) -> float:
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started


def stages(pool: KVPool, frame_bytes: int) -> Iterator[tuple[str, float]]:
    """Seconds that the payload takes in each part of its path through shared memory."""
    layout = pool.layout
    run = max(1, frame_bytes // layout.block_bytes)
    slot = memoryview(bytearray(run * layout.block_bytes))
    ticket_id = new_ticket_id()
    runs = [range(first, min(first + run, pool.num_blocks)) for first in range(0, pool.num_blocks, run)]

    def timed(act: Callable[[range, memoryview], object]) -> float:
        started = time.perf_counter()
        for ids in runs:
            act(ids, slot[: len(ids) * layout.block_bytes])
        return time.perf_counter() - started

    yield "gather", timed(pool.read_blocks_into)
    yield "checksum", timed(lambda _, part: payload_checksum(ticket_id, part))
    yield "scatter", timed(pool.write_blocks)
    yield (
        "scatter and verify",
        timed(lambda ids, part: pool.write_blocks(ids, part, PayloadCheck(ticket_id, 0, 0).observe)),
    )


async def measure(options: argparse.Namespace) -> None:
    layout = LAYOUTS[options.layout]
    num_blocks = layout.num_blocks(options.tokens)
    num_bytes = num_blocks * layout.block_bytes
    grpc_config, shm_config, group_config = (WAYS[name] for name in ("grpc", "shm", "distributed"))
    pool = filled(layout, num_blocks, 1)
    scratch = filled(layout, num_blocks, 2)
    async with decode_process(options.layout, num_blocks) as (decode, pid):
        variants: dict[str, Any] = {
            "grpc": Handover(pool, decode, grpc_config),
            "bare grpc": BareStream(decode, pool, grpc_config),
            "shm": Handover(pool, decode, shm_config),
            "distributed": Handover(pool, decode, group_config),
            "memcpy": Memcpy(num_bytes),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        work: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(-options.warm_up, options.rounds):
            for name, act in variants.items():
                before = processor_s(os.getpid(), pid)
                elapsed = await act()
                if number >= 0:
                    times[name].append(elapsed)
                    work[name].append(processor_s(os.getpid(), pid) - before)
            for name, elapsed in stages(scratch, shm_config.staged_frame_bytes):
                if number >= 0:
                    times.setdefault(name, []).append(elapsed)
        for name in ("grpc", "bare grpc", "shm", "distributed"):
            await variants[name].close()
    rates = {name: num_bytes / 1e6 / statistics.median(found) for name, found in times.items()}
    what = f"{options.layout}, {options.tokens} tokens, {num_bytes / 1e6:.1f} MB, {options.rounds} rounds"
    frames = {
        "grpc": grpc_config.frame_bytes,
        "shm": shm_config.staged_frame_bytes,
        "distributed": group_config.group_frame_bytes,
    }
    for name, base in (("grpc", "bare grpc"), ("shm", "memcpy"), ("distributed", "grpc")):
        frame = frames[name]
        window = max(grpc_config.max_bytes_in_flight, 0 if name == "grpc" else 4 * frame)
        paired = statistics.median(b / a for a, b in zip(times[name], times[base], strict=True))
        best = min(times[base]) / min(times[name])
        print(
            f"transfer {name}: {rates[name]:.0f} MB/s, {base} {rates[base]:.0f} MB/s, ratio {paired:.2f}, "
            f"of the best rounds {best:.2f}; processor time {1e3 * statistics.median(work[name]):.1f} ms "
            f"against {1e3 * statistics.median(work[base]):.1f}; {what}; "
            f"frames of {frame >> 20} MiB, {window >> 20} MiB in flight"
        )
    print(path_line(times, num_bytes))


def path_line(times: dict[str, list[float]], num_bytes: int) -> str:
    """`… of memcpy` with and without checksums, in the median round and of the best times of each part."""
    rounds = list(zip(*(times[name] for name in ("memcpy", *PARTS)), strict=True))
    ratios = [path_ratios(*found) for found in rounds]
    whole, bare = (statistics.median(column) for column in zip(*ratios, strict=True))
    best_whole, best_bare = path_ratios(*(min(times[name]) for name in ("memcpy", *PARTS)))
    parts = (f"{name} {num_bytes / 1e6 / min(times[name]):.0f}" for name in ("memcpy", *PARTS))
    return (
        f"transfer shm, payload path: {whole:.2f} of memcpy with checksums, {bare:.2f} without, of the best "
        f"rounds {best_whole:.2f} and {best_bare:.2f}; best MB/s: {', '.join(parts)}"
    )


def path_ratios(
    memcpy: float, gather: float, checksum: float, scatter: float, verify: float
) -> tuple[float, float]:
    return memcpy / max(gather + checksum, verify), memcpy / max(gather, scatter)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", choices=list(LAYOUTS), default="135m-fp32")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--serve", choices=list(LAYOUTS), help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        asyncio.run(serve(LAYOUTS[options.serve], options.blocks))
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
