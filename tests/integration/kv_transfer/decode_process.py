"""A decode worker's end of the bridge as a process: prints its epoch and port, then serves until killed."""

from __future__ import annotations

import asyncio
import sys

import grpc.aio
from prometheus_client import CollectorRegistry

from core.ids import Role
from core.peer_security import PeerSecurity
from kv_transfer.config import CudaIpc, Distributed, ReceiverConfig, SharedMemory
from kv_transfer.device_thread import DeviceThread
from kv_transfer.group_acceptor import offer_groups
from kv_transfer.grpc_transport import add_kv_transfer_servicer
from kv_transfer.ipc_acceptor import offer_device_memory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.shm_acceptor import offer_shared_memory
from protos.grpc_options import SERVER_OPTIONS
from tests.integration.kv_transfer.ends import real_groups
from tests.integration.kv_transfer.host_device import HostDevice
from tests.unit.kv_transfer.doubles import LAYOUT, ByteStore, StorePort, worker_ref


async def main() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    ref = worker_ref("decode-0", Role.DECODE, f"127.0.0.1:{port}")
    reservations = StorePort(ByteStore(64), 64)
    receiver = Receiver(reservations, ref, LAYOUT, TransferMetrics(CollectorRegistry()))
    config = ReceiverConfig(
        shm=SharedMemory.REQUIRED, cuda_ipc=CudaIpc.REQUIRED, distributed=Distributed.REQUIRED
    )
    offer_shared_memory(receiver, config)
    offer_device_memory(receiver, config, DeviceThread(HostDevice(reservations.store)))
    if sys.argv[1] == "distributed":
        offer_groups(receiver, config, PeerSecurity(), real_groups())
    add_kv_transfer_servicer(server, receiver)
    await server.start()
    sys.stdout.write(f"{ref.epoch} {port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
