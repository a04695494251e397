"""Prefill to decode between two processes whose pools are on one device, by each transport that there is.

python -m benchmarks.gpu.handoff [--rows FILE] [--toy]

A handoff is timed from the offer to the acknowledged commit, all blocks at once: nothing is hidden behind
computing. Against the bare copy of as many bytes from the device to pinned memory and back, which a way over
the host cannot beat; `cuda_ipc` stays on the device, and is held against the bare copy there. Decode's blocks
are compared with prefill's by digest; exits with 1 if they differ.
Where the bridge cannot be imported, it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from benchmarks.gpu import needs
from benchmarks.gpu.rows import HEADER, Row, RowFile
from benchmarks.gpu.timing import Timer, device_here

if TYPE_CHECKING:
    from core.handoff import HandoffTicket
    from core.ids import WorkerRef
    from core.kv_layout import KVLayout
    from engine.kv.pool import KVPool
    from kv_transfer.config import BridgeConfig

_ROOT = Path(__file__).resolve().parents[2]
_WHAT = "handoff between processes"
_NUM_TOKENS, _NUM_TOY_TOKENS = (1000, 8000), (70,)
_RUNS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    file = RowFile(options.rows)
    print(HEADER)
    if fault := needs.handoff_fault():
        file.add(Row(_WHAT, "all transports", math.nan, "GB/s", note=f"skipped, {fault}"))
        return 0
    device = device_here()
    asyncio.run(_measure(file, Timer(device), device, options.toy or device.type == "cpu"))
    return 0 if file.is_right else 1


async def _measure(file: RowFile, timer: Timer, device: torch.device, is_toy: bool) -> None:
    # loaded late: they may be missing, see above
    from core.kv_layout import KVLayout
    from engine.kv.pool import KVPool
    from kv_transfer.config import BridgeConfig, CudaIpc, SharedMemory

    ways = {
        "grpc": BridgeConfig(shm=SharedMemory.NEVER, cuda_ipc=CudaIpc.NEVER),
        "shm": BridgeConfig(shm=SharedMemory.REQUIRED, cuda_ipc=CudaIpc.NEVER),
        "cuda_ipc": BridgeConfig(shm=SharedMemory.NEVER, cuda_ipc=CudaIpc.REQUIRED),
    }
    layout = KVLayout("random", 32, 8, 128, 16, "bfloat16")
    if is_toy:
        layout = KVLayout("random", 2, 2, 16, 16)
    counts = _NUM_TOY_TOKENS if is_toy else _NUM_TOKENS
    num_blocks = layout.num_blocks(max(counts))
    pool = KVPool(layout, num_blocks, device)
    pool.tensor.normal_()
    with _decode_process(layout, num_blocks, device) as end:
        for num_tokens in counts:
            num_bytes = layout.num_blocks(num_tokens) * layout.block_bytes
            through_host = "copy to the host and back", _through_host(timer, num_bytes) / 1e9
            on_device = "copy on the device", _on_device(timer, num_bytes) / 1e9
            for way, config in ways.items():
                times, is_right = await _hand_over(pool, end, config, num_tokens, 1 if is_toy else _RUNS)
                seconds = statistics.median(times) if timer.is_real else math.nan
                file.add(
                    Row(
                        _WHAT,
                        f"{way}, {num_tokens} tokens, {num_bytes / 1e6:.1f} MB",
                        num_bytes / seconds / 1e9,
                        "GB/s",
                        *(on_device if way == "cuda_ipc" else through_host),
                        is_right=is_right,
                        note=f"{1e3 * seconds:.1f} ms" if timer.is_real else "",
                    )
                )


class _DecodeEnd:
    """The other process: whom to send to, and what it holds."""

    def __init__(self, ref: WorkerRef, questions: IO[str], answers: IO[str]) -> None:
        self.ref = ref
        self._questions, self._answers = questions, answers

    async def digest(self, ticket: HandoffTicket) -> str:
        self._questions.write(ticket.ticket_id + "\n")
        self._questions.flush()
        return (await asyncio.to_thread(self._answers.readline)).strip()


@contextmanager
def _decode_process(layout: KVLayout, num_blocks: int, device: torch.device) -> Iterator[_DecodeEnd]:
    from benchmarks.gpu.handoff_ends import DECODE, decode_command
    from core.ids import Epoch, Role, WorkerRef

    command = decode_command(layout, num_blocks, device.type)
    process = subprocess.Popen(
        command, cwd=_ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline().split()
        if len(said) != 2:
            raise RuntimeError("decode's process did not start")
        ref = WorkerRef(DECODE, Role.DECODE, Epoch(int(said[0])), f"127.0.0.1:{said[1]}")
        yield _DecodeEnd(ref, process.stdin, process.stdout)
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def _hand_over(
    pool: KVPool, end: _DecodeEnd, config: BridgeConfig, num_tokens: int, runs: int
) -> tuple[list[float], bool]:
    """Seconds of each of `runs`, after one that does not count, and whether decode has prefill's bytes."""
    from prometheus_client import CollectorRegistry

    from benchmarks.gpu.handoff_ends import PREFILL, digest, ipc_memory, make_ticket
    from core.clock import Deadline, MonotonicClock
    from core.ids import Role, WorkerRef, new_epoch
    from kv_transfer.cuda_ipc_transport import connect_on_device
    from kv_transfer.device_thread import DeviceThread
    from kv_transfer.metrics import TransferMetrics
    from kv_transfer.sender import Sender
    from kv_transfer.shm_transport import connect_as_configured

    clock, device = MonotonicClock(), DeviceThread(ipc_memory(pool))
    connect = connect_on_device(config, device, connect_as_configured(config))
    ref = WorkerRef(PREFILL, Role.PREFILL, new_epoch(), "")
    metrics = TransferMetrics(CollectorRegistry())
    sender = Sender(pool, ref, connect, clock, metrics, config)
    block_ids = list(range(pool.layout.num_blocks(num_tokens)))
    times, is_right = [], True
    try:
        for _ in range(runs + 1):
            pool.tensor.mul_(-1.0)  # other bytes each time: nothing old passes for new
            expected = digest(pool, block_ids)
            ticket = make_ticket(num_tokens, ref, end.ref, pool.layout)
            begin = time.perf_counter()
            session = sender.open(ticket, Deadline.after(60.0, clock))
            session.add_blocks(0, block_ids)
            await session.finish(num_tokens)
            times.append(time.perf_counter() - begin)
            is_right &= await end.digest(ticket) == expected
    finally:
        await sender.close()
        device.close()
    return times[1:], is_right


def _through_host(timer: Timer, num_bytes: int) -> float:
    """Bytes per second from the device to pinned memory and back, one after the other."""
    if not timer.is_real:
        return math.nan
    source = torch.ones(num_bytes, dtype=torch.uint8, device=timer.device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def both() -> None:
        pinned.copy_(source, non_blocking=True)
        source.copy_(pinned, non_blocking=True)

    return num_bytes / timer.seconds(both, is_cold=False)


def _on_device(timer: Timer, num_bytes: int) -> float:
    """Bytes per second from one place of the device to another."""
    if not timer.is_real:
        return math.nan
    source = torch.ones(num_bytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return num_bytes / timer.seconds(lambda: target.copy_(source), is_cold=False)


if __name__ == "__main__":
    sys.exit(main())
