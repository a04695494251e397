"""The bridge between processes of one host: messages over gRPC, payloads through shared memory.

Owns how prefill asks for that memory, and the choice of the ways that a worker's transports have. Lives on
the IO loop.
"""

from __future__ import annotations

from collections.abc import Callable

from core.ids import Epoch, WorkerRef
from core.peer_security import PeerSecurity
from kv_transfer.config import BridgeConfig, SharedMemory
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.shm_handshake import Attachment, attach
from kv_transfer.staged_transport import StagedTransport, StagingWish, Underlying
from kv_transfer.transport import SHM, OfferedStaging, StagingAddress

_NOTHING_TO_SHOW = PeerSecurity()


def connect_as_configured(
    config: BridgeConfig, security: PeerSecurity = _NOTHING_TO_SHOW
) -> Callable[[WorkerRef], Underlying]:
    """Transports between processes, as `config.shm` says. Decode tells where its memory is in a reply to an
    offer, so only to those who have shown what `security` holds.
    """
    if config.shm is SharedMemory.NEVER:
        return lambda ref: GrpcTransport(ref, security)
    return lambda ref: ShmTransport(ref, config, security)


class ShmTransport(StagedTransport):
    """Over gRPC to one decode worker, and through a memfd if it is on this host."""

    name = SHM

    def __init__(
        self, ref: WorkerRef, config: BridgeConfig, security: PeerSecurity = _NOTHING_TO_SHOW
    ) -> None:
        wish = StagingWish(
            config.staging_bytes,
            config.staged_frame_bytes,
            config.shm is SharedMemory.REQUIRED,
            config.attach_s,
            config.attach_again_s,
        )
        super().__init__(GrpcTransport(ref, security), wish)

    def address(self, offered: OfferedStaging) -> StagingAddress | None:
        return offered.shm

    async def attach(
        self, offered: OfferedStaging, receiver_epoch: Epoch, sender_epoch: Epoch, num_bytes: int
    ) -> Attachment:
        assert offered.shm is not None
        return await attach(offered.shm, receiver_epoch, sender_epoch, num_bytes, self._wish.attach_s)
