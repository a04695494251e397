"""Decode's end of the bridge as a process with a pool of its own, and what prefill's end shares with it.

Decode's process prints its epoch and port; then it answers each ticket id on its standard input with a digest
of the blocks that it holds for that ticket, read back from its pool. Writes run on a step thread, as a
worker's do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

import grpc.aio
import xxhash
from prometheus_client import CollectorRegistry

from benchmarks.pool_port import PoolPort
from core.block_hash import hash_blocks, root_hash
from core.handoff import HandoffTicket
from core.ids import RequestId, Role, TicketId, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.kv_layout import KVLayout
from engine.gpu.ipc_cuda import share_pool
from engine.gpu.ipc_host import HostIpcSource
from engine.gpu.ipc_memory import PoolIpcMemory
from engine.kv.pool import KVPool
from kv_transfer.config import ReceiverConfig
from kv_transfer.device_thread import DeviceThread
from kv_transfer.grpc_transport import add_kv_transfer_servicer
from kv_transfer.ipc_acceptor import offer_device_memory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.shm_acceptor import offer_shared_memory
from protos.grpc_options import SERVER_OPTIONS

DECODE = WorkerId("decode-0")
PREFILL = WorkerId("prefill-0")


def digest(pool: KVPool, block_ids: list[int]) -> str:
    """Of these blocks' bytes, in this order."""
    return xxhash.xxh3_64_hexdigest(pool.read_blocks(block_ids))


def make_ticket(num_tokens: int, prefill: WorkerRef, decode: WorkerRef, layout: KVLayout) -> HandoffTicket:
    names = hash_blocks(root_hash("", layout.fingerprint, ""), range(num_tokens), layout.block_size)
    return HandoffTicket(new_ticket_id(), RequestId("r"), prefill, decode, layout, num_tokens, tuple(names))


def ipc_memory(pool: KVPool) -> PoolIpcMemory:
    """The pool's GPU; on a CPU what stands for one, so that all but the driver's calls is run here."""
    return share_pool(pool) or PoolIpcMemory(pool, HostIpcSource())


def decode_command(layout: KVLayout, num_blocks: int, device: str) -> list[str]:
    """What starts decode's end, in the repository's root."""
    command = [sys.executable, "-m", "benchmarks.gpu.handoff_ends", "--layout", json.dumps(asdict(layout))]
    return [*command, "--num-blocks", str(num_blocks), "--device", device]


async def serve(layout: KVLayout, num_blocks: int, device: str) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    ref = WorkerRef(DECODE, Role.DECODE, new_epoch(), f"127.0.0.1:{port}")
    # backwards, so that a block's place is not its index
    pool = KVPool(layout, num_blocks, device)
    reservations = PoolPort(pool, range(num_blocks)[::-1])
    receiver = Receiver(reservations, ref, layout, TransferMetrics(CollectorRegistry()))
    config = ReceiverConfig()
    offer_shared_memory(receiver, config)
    offer_device_memory(receiver, config, DeviceThread(ipc_memory(pool)))
    add_kv_transfer_servicer(server, receiver)
    await server.start()
    print(ref.epoch, port, flush=True)
    while question := await asyncio.to_thread(sys.stdin.readline):
        held = await reservations.read(TicketId(question.strip()))
        print(xxhash.xxh3_64_hexdigest(held), flush=True)
    await server.stop(0)
    await receiver.close()
    reservations.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    asyncio.run(serve(KVLayout(**json.loads(options.layout)), options.num_blocks, options.device))


if __name__ == "__main__":
    main()
