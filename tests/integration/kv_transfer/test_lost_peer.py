"""A decode process that is killed or frozen is noticed within seconds, whatever prefill was doing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from core.clock import Deadline, MonotonicClock
from core.errors import TransferTimeout, WorkerLost
from core.ids import Epoch, Role, WorkerId, WorkerRef
from kv_transfer.config import BridgeConfig, CudaIpc, Distributed, SharedMemory
from kv_transfer.device_thread import DeviceThread
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.transport import Fence
from tests.integration.kv_transfer.ends import connect_any_way
from tests.integration.kv_transfer.host_device import HostDevice
from tests.unit.kv_transfer.doubles import LAYOUT, PREFILL, ByteStore, failure_of, make_ticket, until

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def decode_process(way: str = "grpc") -> AsyncIterator[tuple[WorkerRef, int]]:
    """The worker's ref and its process id. It offers process groups for that way only: torch takes time."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.kv_transfer.decode_process",
        way,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 100)
        epoch, port = map(int, line.split())
        yield WorkerRef(WorkerId("decode-0"), Role.DECODE, Epoch(epoch), f"127.0.0.1:{port}"), process.pid
    finally:
        if process.returncode is None:
            process.kill()  # a stopped process, too
        await process.wait()


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 3.5)])
async def test_a_call_to_a_killed_or_frozen_decode_worker_fails_in_time(
    number: signal.Signals, within_s: float
) -> None:
    async with decode_process() as (ref, pid):
        transport = GrpcTransport(ref)
        ticket = make_ticket(16, decode=ref)
        await transport.offer(ticket, 30.0)
        os.kill(pid, number)
        started = time.monotonic()
        error = await failure_of(transport.keepalive(Fence.of(ticket)))
        assert isinstance(error, WorkerLost)
        assert time.monotonic() - started < within_s
        await transport.close()


def own_mappings() -> int:
    gc.collect()  # of earlier tests
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:baton-staging") + maps.count("memfd:baton-device")


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (signal.SIGKILL, "grpc"),
        (signal.SIGSTOP, "grpc"),
        (signal.SIGKILL, "shm"),
        (signal.SIGSTOP, "shm"),
        (signal.SIGKILL, "cuda_ipc"),
        (signal.SIGKILL, "distributed"),
        (signal.SIGSTOP, "distributed"),
    ],
)
async def test_a_session_whose_decode_worker_dies_in_mid_push_ends_within_the_bounded_silence(
    number: signal.Signals, way: str
) -> None:
    async with decode_process(way) as (ref, pid):
        clock = MonotonicClock()
        store = ByteStore(64, LAYOUT, seed=1)
        config = BridgeConfig(
            shm=SharedMemory.AUTO if way == "shm" else SharedMemory.NEVER,
            cuda_ipc=CudaIpc.AUTO if way == "cuda_ipc" else CudaIpc.NEVER,
            distributed=Distributed.AUTO if way == "distributed" else Distributed.NEVER,
        )
        device = DeviceThread(HostDevice(store))
        connect = connect_any_way(config, device)
        metrics = TransferMetrics(CollectorRegistry())
        sender = Sender(store, PREFILL, connect, clock, metrics, config)
        session = sender.open(make_ticket(64 * 4, decode=ref), Deadline.after(60, clock))
        session.add_blocks(0, range(32))
        await session.offered()
        await asyncio.sleep(0.2)
        assert own_mappings() == (way in ("shm", "cuda_ipc"))
        os.kill(pid, number)
        started = time.monotonic()
        session.add_blocks(32, range(32, 64))
        assert isinstance(await failure_of(session.finish(256)), TransferTimeout)
        assert time.monotonic() - started < 7.0
        await sender.close()
        assert time.monotonic() - started < 10.0
        await until(lambda: own_mappings() == 0, 5.0)  # a device's memory is unmapped on its own thread
        device.close()
