"""GroupAcceptor: decode's ends of process groups, one for each prefill worker that asks.

Owns who gets one, and their bound. A group is one incarnation of prefill's: only its frames are served from
it. Its memory is freed when the group was destroyed, which waits for a payload under way to come, to break
off, or to take too long. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from core.ids import Epoch
from core.peer_security import PeerSecurity
from kv_transfer.config import ReceiverConfig
from kv_transfer.device_thread import DeviceSpan
from kv_transfer.group_attachment import GroupLimits
from kv_transfer.group_messages import NONCE_BYTES, GroupLine, decode_message, next_message, refusal
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.group_transport import usable_groups
from kv_transfer.pair_group import Groups
from kv_transfer.receiver import Receiver
from kv_transfer.shm_handshake import Fallback, NotAttached
from kv_transfer.transport import DISTRIBUTED, GroupAddress, OfferedStaging, Place
from protos import kv_transfer_pb2 as pb

_log = logging.getLogger(__name__)

_FORM_S = 2.0


def offer_groups(
    receiver: Receiver, config: ReceiverConfig, security: PeerSecurity, groups: Groups | None
) -> None:
    """Let `receiver` take payloads through `groups`, as `config.distributed` says. Raises InvalidConfig if it
    is required, but there are none.
    """
    usable = usable_groups(config.distributed, security, groups)
    if usable is not None:
        receiver.admit_groups(
            GroupAcceptor(receiver.epoch, config, receiver.metrics.set_group_staging_bytes, usable)
        )


class GroupAcceptor:
    """A StagingArea; `serve` is called for each stream that asks for a group."""

    label = DISTRIBUTED

    def __init__(
        self, own_epoch: Epoch, config: ReceiverConfig, on_bytes: Callable[[int], None], groups: Groups
    ) -> None:
        """`on_bytes` hears how many bytes groups have, whenever that changes."""
        self._own_epoch = own_epoch
        self._max_bytes = config.max_group_staging_bytes
        self._limits = GroupLimits(_FORM_S, config.group_s)
        self._on_bytes = on_bytes
        self._groups = groups
        self._num_bytes = 0
        self._receivers: dict[int, tuple[Epoch, GroupReceiver]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def is_on_device(self) -> bool:
        return self._groups.backend == "nccl"

    @property
    def num_bytes(self) -> int:
        """Of groups that are not destroyed yet."""
        return self._num_bytes

    @property
    def num_awaited(self) -> int:
        """Payloads that were announced and have not come, of all groups."""
        return sum(receiver.num_awaited for _, receiver in self._receivers.values())

    def offer(self, offered: OfferedStaging) -> OfferedStaging:
        return replace(offered, group=GroupAddress(self._groups.backend))

    async def find(self, place: Place, num_bytes: int, sender_epoch: Epoch) -> memoryview | DeviceSpan | None:
        """See StagingArea; waits for the payload."""
        found = self._receivers.get(place.staging_id)
        if found is None or found[0] != sender_epoch:
            return None
        return await found[1].arrival(place.offset, num_bytes)

    async def serve(self, messages: AsyncIterator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
        """One group, from its hello until the stream or the group ends."""
        try:
            async with asyncio.timeout(_FORM_S):
                hello = self._admitted(await next_message(messages))
        except (NotAttached, TimeoutError) as error:
            _log.warning("a prefill worker may not form a group: %r", error)
            if isinstance(error, NotAttached):
                await send(refusal(error.reason))
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        line, group_id, nonce = GroupLine(send), secrets.randbits(64), secrets.token_bytes(NONCE_BYTES)
        self._count(hello.num_bytes)
        receiver = GroupReceiver(hello.num_bytes, line, lambda: self._count(-hello.num_bytes))
        self._receivers[group_id] = (Epoch(hello.sender_epoch), receiver)
        try:
            line.post(pb.GroupMessage(grant=pb.GroupGrant(group_id=group_id, nonce=nonce)))
            receiver.form(self._groups, self._limits, (hello.nonce, nonce))
            await self._follow(messages, receiver)
        finally:
            del self._receivers[group_id]
            receiver.close()
            await line.finish()

    async def close(self) -> None:
        """Prefill workers see their streams end and send over gRPC."""
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, messages: AsyncIterator[bytes], receiver: GroupReceiver) -> None:
        reading = asyncio.create_task(self._read(messages, receiver))
        try:
            await asyncio.wait((reading, receiver.broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[bytes], receiver: GroupReceiver) -> None:
        try:
            async for data in messages:
                receiver.hear(decode_message(data))
        except NotAttached as error:
            _log.warning("a prefill worker's group is ended: %s", error)

    def _admitted(self, message: pb.GroupMessage) -> pb.GroupHello:
        """Whoever may form a group; raises NotAttached. That it may call at all, gRPC has seen to."""
        if message.WhichOneof("kind") != "hello":
            raise NotAttached(Fallback.BROKEN, "it does not say hello")
        hello = message.hello
        if hello.receiver_epoch != self._own_epoch:
            raise NotAttached(Fallback.REFUSED, "it means another incarnation")
        if hello.backend != self._groups.backend or len(hello.nonce) != NONCE_BYTES:
            raise NotAttached(Fallback.UNSUPPORTED, f"its backend is {hello.backend[:40]!r}")
        if hello.num_bytes < 1 or self._num_bytes + hello.num_bytes > self._max_bytes:
            raise NotAttached(Fallback.LIMIT, f"groups have {self._num_bytes} of {self._max_bytes} bytes")
        return hello

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._on_bytes(self._num_bytes)
