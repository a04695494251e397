"""ShmAcceptor: shared memory as decode's staging memory, one for each prefill process of this host.

Owns how a memfd is passed on and mapped; who gets one is `staging_acceptor`'s business. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace

from core.errors import InvalidConfig
from core.ids import Epoch
from kv_transfer.config import ReceiverConfig, SharedMemory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.shm_handshake import (
    MAX_PACKET_BYTES,
    Fallback,
    Hello,
    NotAttached,
    encode_grant,
)
from kv_transfer.shm_memory import StagingMemory, create_memory
from kv_transfer.staging_acceptor import StagingAcceptor
from kv_transfer.transport import SHM, OfferedStaging

_log = logging.getLogger(__name__)


class ShmAcceptor(StagingAcceptor[StagingMemory]):
    """Raises OSError or AttributeError where the system has no memfd, too. `create` makes the memory of a
    pair; decode maps it read-only.
    """

    def __init__(
        self,
        own_epoch: Epoch,
        max_bytes: int,
        metrics: TransferMetrics,
        create: Callable[[int], int] = create_memory,
    ) -> None:
        self.label, self.is_on_device = SHM, False
        os.close(create_memory(0))  # whether the system has it at all
        self._create = create
        super().__init__(own_epoch, max_bytes, metrics.set_staging_bytes)

    def offer(self, offered: OfferedStaging) -> OfferedStaging:
        return replace(offered, shm=self.address)

    async def lend(self, connection: socket.socket, hello: Hello, staging_id: int) -> StagingMemory:
        loop = asyncio.get_running_loop()
        try:
            descriptor = self._create(hello.num_bytes)
        except OSError as error:
            raise NotAttached(Fallback.UNSUPPORTED, repr(error)) from error
        try:
            memory = StagingMemory(descriptor, hello.num_bytes, is_writable=False)
            try:
                socket.send_fds(connection, [encode_grant(staging_id)], [descriptor])
                proof = await loop.sock_recv(connection, MAX_PACKET_BYTES)
                if not secrets.compare_digest(proof, memory.decode_nonce):
                    raise OSError("it does not see what was written into the memory")
            except BaseException:
                memory.close()
                raise
        finally:
            os.close(descriptor)
        return memory

    async def take_back(self, connection: socket.socket, memory: StagingMemory, last_word: bytes) -> None:
        memory.close()


def offer_shared_memory(receiver: Receiver, config: ReceiverConfig) -> None:
    """Let `receiver` take payloads through shared memory, as `config` says; on the running loop.

    Where the system cannot, it goes without, and says so. Raises InvalidConfig if it is required.
    """
    if config.shm is SharedMemory.NEVER:
        return
    try:
        acceptor = ShmAcceptor(receiver.epoch, config.max_staging_bytes, receiver.metrics)
    except (OSError, AttributeError) as error:
        if config.shm is SharedMemory.REQUIRED:
            raise InvalidConfig(f"shared memory is required, but cannot be had: {error!r}") from error
        _log.warning("no shared memory for prefill workers of this host: %r", error)
        return
    receiver.admit(acceptor)
