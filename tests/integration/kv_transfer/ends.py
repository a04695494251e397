"""The two ends of the bridge in one loop, over real gRPC on 127.0.0.1, with or without shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from core.clock import Deadline, MonotonicClock
from core.handoff import HandoffTicket
from core.ids import Role, WorkerRef
from core.kv_layout import KVLayout
from kv_transfer.config import BridgeConfig, CudaIpc, Distributed, ReceiverConfig, SharedMemory
from kv_transfer.cuda_ipc_transport import connect_on_device
from kv_transfer.device_thread import DeviceThread
from kv_transfer.group_acceptor import GroupAcceptor
from kv_transfer.grpc_transport import add_kv_transfer_servicer
from kv_transfer.ipc_acceptor import IpcAcceptor
from kv_transfer.metrics import TransferMetrics
from kv_transfer.pair_group import Groups
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.session import SendSession
from kv_transfer.shm_acceptor import ShmAcceptor
from kv_transfer.shm_memory import create_memory
from kv_transfer.shm_transport import connect_as_configured
from kv_transfer.transport import Connect
from protos.grpc_options import SERVER_OPTIONS
from tests.integration.kv_transfer.host_device import HostDevice
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, make_ticket, worker_ref

# 2 layers × K, V × 2 heads × 16 slots × 32 × 4 bytes = 16 KiB a block
LAYOUT = KVLayout(model="toy", num_layers=2, num_kv_heads=2, head_dim=32, block_size=16)
CLOCK = MonotonicClock()
WAYS: dict[str, dict[str, Any]] = {
    "grpc": {"shm": SharedMemory.NEVER, "cuda_ipc": CudaIpc.NEVER, "distributed": Distributed.NEVER},
    "shm": {"shm": SharedMemory.REQUIRED, "cuda_ipc": CudaIpc.NEVER, "distributed": Distributed.NEVER},
    "cuda_ipc": {"shm": SharedMemory.NEVER, "cuda_ipc": CudaIpc.REQUIRED, "distributed": Distributed.NEVER},
    "distributed": {
        "shm": SharedMemory.NEVER,
        "cuda_ipc": CudaIpc.NEVER,
        "distributed": Distributed.REQUIRED,
    },
}
"""How a BridgeConfig asks for each way; the label under which its payloads are counted."""


def real_groups() -> Groups:
    """As the engine makes them, for a pool on this CPU. Imports torch: seconds, in a new process."""
    from engine.kv.pool import KVPool
    from engine.pair_group import groups_of

    groups = groups_of(KVPool(LAYOUT, 1), "127.0.0.1")
    assert groups is not None
    return groups


def connect_any_way(config: BridgeConfig, device: DeviceThread) -> Connect:
    """All ways there are, as `config` says."""
    groups = None if config.distributed is Distributed.NEVER else real_groups()
    return connect_on_device(config, device, connect_as_configured(config, groups=groups))


class PrefillEnd:
    """A sender with its blocks, whose ids are the indexes in its tickets, and its counters."""

    def __init__(self, decode: WorkerRef, config: BridgeConfig, store: ByteStore) -> None:
        self.ref = worker_ref("prefill-0", Role.PREFILL)
        self.decode = decode
        self.store = store
        self.registry = CollectorRegistry()
        self.device = DeviceThread(HostDevice(store))
        self.connect = connect_any_way(config, self.device)
        self.metrics = TransferMetrics(self.registry)
        self.sender = Sender(store, self.ref, self.connect, CLOCK, self.metrics, config)

    def ticket(self, num_tokens: int) -> HandoffTicket:
        return make_ticket(num_tokens, self.ref, self.decode, self.store.layout)

    def open(self, ticket: HandoffTicket, left_s: float = 20.0) -> SendSession:
        return self.sender.open(ticket, Deadline.after(left_s, CLOCK))

    async def hand_over(self, num_blocks: int) -> HandoffTicket:
        """Blocks 0, 1, … of the store, all at once."""
        ticket = self.ticket(num_blocks * self.store.layout.block_size)
        session = self.open(ticket)
        session.add_blocks(0, range(num_blocks))
        await session.finish(ticket.num_tokens)
        return ticket

    def num_fallbacks(self, reason: str) -> float:
        labels = {"reason": reason}
        return self.registry.get_sample_value("baton_kv_transfer_fallbacks_total", labels) or 0.0


@dataclass
class DecodeEnd:
    """A served receiver; `acceptor` is its staging memory, if it offers any."""

    ref: WorkerRef
    port: StorePort
    receiver: Receiver
    acceptor: ShmAcceptor | None
    device_acceptor: IpcAcceptor
    groups: GroupAcceptor | None
    server: grpc.aio.Server
    registry: CollectorRegistry

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def received_bytes(self, way: str) -> float:
        return self.counted("baton_kv_transfer_bytes_total", transport=way)

    def staging_bytes(self) -> float:
        return self.counted("baton_kv_staging_bytes")

    def device_staging_bytes(self) -> float:
        return self.counted("baton_kv_device_staging_bytes")

    def group_staging_bytes(self) -> float:
        return self.counted("baton_kv_group_staging_bytes")

    def holds(self, ticket: HandoffTicket, store: ByteStore) -> bool:
        """Whether the ticket's blocks are those of prefill's store."""
        indexes = range(ticket.num_blocks)
        return all(self.port.block(ticket.ticket_id, index) == store.block(index) for index in indexes)


@asynccontextmanager
async def decode_end(
    port: StorePort,
    config: ReceiverConfig | None = None,
    create: Callable[[int], int] = create_memory,
) -> AsyncIterator[DecodeEnd]:
    """`create` makes the memory of each pair."""
    config = config or ReceiverConfig()
    registry = CollectorRegistry()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    ref = worker_ref("decode-0", Role.DECODE, address)
    receiver = Receiver(port, ref, port.store.layout, TransferMetrics(registry))
    device = DeviceThread(HostDevice(port.store))
    count = receiver.metrics.set_device_staging_bytes
    device_acceptor = IpcAcceptor(ref.epoch, config.max_device_staging_bytes, count, device)
    receiver.admit(device_acceptor)
    groups = None
    if config.distributed is not Distributed.NEVER:
        groups = GroupAcceptor(ref.epoch, config, receiver.metrics.set_group_staging_bytes, real_groups())
        receiver.admit_groups(groups)
    acceptor = None
    if config.shm is not SharedMemory.NEVER:
        acceptor = ShmAcceptor(ref.epoch, config.max_staging_bytes, receiver.metrics, create)
        receiver.admit(acceptor)
    add_kv_transfer_servicer(server, receiver)
    await server.start()
    try:
        yield DecodeEnd(ref, port, receiver, acceptor, device_acceptor, groups, server, registry)
    finally:
        await server.stop(0)
        await receiver.close()


async def no_task_is_left() -> None:
    """What a server leaves ends by itself, untold."""
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - tasks of others, without events
            await asyncio.sleep(0.01)
