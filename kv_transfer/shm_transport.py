"""The bridge between processes of one host: messages over gRPC, payloads through shared memory.

Owns how prefill asks for that memory, and the order of the ways between processes: shared memory, a process
group, gRPC. Lives on the IO loop.
"""

from __future__ import annotations

from collections.abc import Callable

from core.ids import WorkerRef
from core.peer_security import PeerSecurity
from kv_transfer.config import BridgeConfig, SharedMemory
from kv_transfer.group_transport import connect_in_groups
from kv_transfer.pair_group import Groups
from kv_transfer.shm_handshake import Attachment, Fallback, attach, obstacle_of
from kv_transfer.staged_transport import StagedTransport, StagingWish, Underlying
from kv_transfer.transport import SHM, OfferedStaging, Pair

_NOTHING_TO_SHOW = PeerSecurity()


def connect_as_configured(
    config: BridgeConfig, security: PeerSecurity = _NOTHING_TO_SHOW, groups: Groups | None = None
) -> Callable[[WorkerRef], Underlying]:
    """Transports between processes, as `config.shm` and `config.distributed` say; `groups` makes process
    groups. Decode tells where its memory is in a reply to an offer, so only to those who have shown what
    `security` holds. Raises InvalidConfig if groups are required, but there are none.
    """
    connect = connect_in_groups(config, security, groups)
    if config.shm is SharedMemory.NEVER:
        return connect
    return lambda ref: ShmTransport(connect(ref), config)


class ShmTransport(StagedTransport):
    """To one decode worker, through a memfd if it is on this host, else by `inner`."""

    name = SHM

    def __init__(self, inner: Underlying, config: BridgeConfig) -> None:
        wish = StagingWish(
            config.staging_bytes,
            config.staged_frame_bytes,
            config.shm is SharedMemory.REQUIRED,
            config.attach_s,
            config.attach_again_s,
        )
        super().__init__(inner, wish)

    def obstacle(self, offered: OfferedStaging) -> Fallback | None:
        return obstacle_of(offered.shm)

    async def attach(self, offered: OfferedStaging, pair: Pair, num_bytes: int) -> Attachment:
        assert offered.shm is not None
        return await attach(
            offered.shm, pair.decode.epoch, pair.prefill.epoch, num_bytes, self._wish.attach_s
        )
