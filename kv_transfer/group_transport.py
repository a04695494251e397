"""The bridge between workers anywhere: messages over gRPC, payloads through a process group of the pair.

Owns how prefill asks for a group, and whether it does. Lives on the IO loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.errors import InvalidConfig
from core.ids import WorkerRef
from core.peer_security import PeerSecurity
from kv_transfer.config import BridgeConfig, Distributed
from kv_transfer.group_attachment import GroupAttachment, GroupLimits, attach_group
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.pair_group import Groups
from kv_transfer.shm_handshake import Fallback
from kv_transfer.staged_transport import StagedTransport, StagingWish, Underlying
from kv_transfer.transport import DISTRIBUTED, OfferedStaging, Pair

_log = logging.getLogger(__name__)


def connect_in_groups(
    config: BridgeConfig, security: PeerSecurity, groups: Groups | None
) -> Callable[[WorkerRef], Underlying]:
    """Transports over gRPC, with groups as `config.distributed` says. Raises InvalidConfig if those are
    required, but there are none.
    """
    usable = usable_groups(config.distributed, security, groups)
    if usable is None:
        return lambda ref: GrpcTransport(ref, security)
    return lambda ref: GroupTransport(GrpcTransport(ref, security), config, usable)


def usable_groups(wanted: Distributed, security: PeerSecurity, groups: Groups | None) -> Groups | None:
    """`groups`, if they are wanted: what goes through them is not encrypted, so with TLS only if they are
    required. Raises InvalidConfig if they are required, but there are none.
    """
    if wanted is Distributed.REQUIRED:
        if groups is None:
            raise InvalidConfig("bridge.distributed is required, but torch.distributed has no backend here")
        if security.tls is not None:
            _log.warning("bridge.distributed is required: KV payloads travel outside of TLS")
        return groups
    return groups if wanted is Distributed.AUTO and security.tls is None else None


class GroupTransport(StagedTransport):
    """To one decode worker, wherever it is."""

    name = DISTRIBUTED

    def __init__(self, inner: GrpcTransport, config: BridgeConfig, groups: Groups) -> None:
        wish = StagingWish(
            config.group_staging_bytes,
            config.group_frame_bytes,
            config.distributed is Distributed.REQUIRED,
            config.attach_s,
            config.attach_again_s,
            prefix="distributed_",
        )
        super().__init__(inner, wish)
        self._connection = inner
        self._groups = groups
        self._limits = GroupLimits(config.attach_s, config.group_s)

    def obstacle(self, offered: OfferedStaging) -> Fallback | None:
        if offered.group is None:
            return Fallback.NOT_OFFERED
        return None if offered.group.backend == self._groups.backend else Fallback.UNSUPPORTED

    async def attach(self, offered: OfferedStaging, pair: Pair, num_bytes: int) -> GroupAttachment:
        return await attach_group(self._groups, self._connection, pair, num_bytes, self._limits)
