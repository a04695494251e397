"""The bridge between processes of one host: messages over gRPC, payloads through shared memory.

Owns prefill's end of a pair's staging memory: asks for it at the first offer, fills slots, knows when a slot
may be used again, and gives the memory back by closing its connection. Whatever stands in the way, payloads
go over gRPC instead, frame by frame, unless shared memory is required. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import deque
from collections.abc import AsyncIterator

from core.errors import HandoffError, ServingError, StagingLost, WorkerLost
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerRef
from kv_transfer.codec import decode_ack
from kv_transfer.config import BridgeConfig, SharedMemory
from kv_transfer.grpc_transport import GrpcPush, GrpcTransport
from kv_transfer.shm_handshake import Attachment, Fallback, NotAttached, attach, host_id
from kv_transfer.shm_slots import Slot, Slots
from kv_transfer.transport import (
    SHM,
    Carriage,
    CommitClaim,
    CommitReceipt,
    Connect,
    Fence,
    Place,
    Room,
    StagingAddress,
)

_log = logging.getLogger(__name__)


def connect_as_configured(config: BridgeConfig) -> Connect:
    """Transports between processes, as `config.shm` says."""
    if config.shm is SharedMemory.NEVER:
        return GrpcTransport
    return lambda ref: ShmTransport(ref, config)


class Staging:
    """The memory of one pair, while it is attached."""

    def __init__(self, attachment: Attachment, slot_bytes: int) -> None:
        self.staging_id = attachment.staging_id
        self.slots = Slots(attachment.memory.slots, slot_bytes)
        self.is_open = True
        self._memory = attachment.memory
        self._connection = attachment.connection
        asyncio.get_running_loop().add_reader(self._connection, self._hear)

    def give_up(self, why: str) -> None:
        """Close it; a later offer asks for new memory."""
        if self.is_open:
            _log.warning("staging memory %x is given up: %s", self.staging_id, why)
            self.close()

    def close(self) -> None:
        """Nothing is written to the memory any more: decode gives it back."""
        if self.is_open:
            self.is_open = False
            self.slots.close()
            self._memory.close()
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()

    def _hear(self) -> None:
        """Decode says nothing on the connection but that it is over."""
        try:
            if self._connection.recv(1):
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.info("the connection of staging %x broke: %r", self.staging_id, error)
        self.close()


class ShmTransport:
    """To one decode worker, which may be on this host or not."""

    name = SHM

    def __init__(self, ref: WorkerRef, config: BridgeConfig) -> None:
        self._grpc = GrpcTransport(ref)
        self._config = config
        self._host_id = host_id()
        self._staging: Staging | None = None
        self._fallback = Fallback.NOT_OFFERED
        self._try_again_at = float("-inf")
        self._attaching: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def staging(self) -> Staging | None:
        """The memory, if it is attached now."""
        return self._staging if self._staging is not None and self._staging.is_open else None

    @property
    def carriage(self) -> Carriage:
        if self.staging is not None:
            return Carriage(self._config.staged_frame_bytes)
        return Carriage(fallback=self._fallback)

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        """Raises HandoffError, too, when shared memory is required and cannot be had."""
        held, address = await self._grpc.offer_and_ask(ticket, time_left_s)
        if self.staging is not None and self.staging.slots.is_worn:
            self.staging.give_up("decode does not let go of most of its slots")
        if self.staging is None:
            await self._attach(address, ticket)
        if self.staging is None and self._config.shm is SharedMemory.REQUIRED:
            await self._take_back(ticket, time_left_s)
            raise self._refusal()
        return held

    async def open_push(self) -> ShmPush:
        return ShmPush(self, await self._grpc.open_push())

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        receipt = await self._grpc.commit(fence, claim)
        self._release(fence.ticket_id)
        return receipt

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        await self._grpc.abort(fence, reason, time_left_s)
        self._release(fence.ticket_id)

    async def keepalive(self, fence: Fence) -> None:
        await self._grpc.keepalive(fence)

    async def close(self) -> None:
        self._is_closed = True
        if self._attaching is not None:
            self._attaching.cancel()
            await asyncio.gather(self._attaching, return_exceptions=True)
        if self._staging is not None:
            self._staging.close()
        await self._grpc.close()

    async def take_slot(self, num_bytes: int) -> tuple[Staging, Slot] | None:
        """A slot for a payload, waiting for one; None when it has to travel in its frame. Raises HandoffError
        if it must not.
        """
        staging = self.staging
        if staging is not None and num_bytes <= staging.slots.slot_bytes:
            slot = await staging.slots.take()
            if slot is not None:
                return staging, slot
            staging.give_up("decode has not let go of any of its slots")
        if self._config.shm is SharedMemory.REQUIRED:
            raise self._refusal()
        return None

    async def _attach(self, address: StagingAddress | None, ticket: HandoffTicket) -> None:
        """Attach once for all offers that come meanwhile; not again soon after it failed."""
        if self._staging is not None:
            self._staging, self._fallback = None, Fallback.LOST
        if address is None:
            self._fallback = Fallback.NOT_OFFERED
        elif not self._host_id or address.host_id != self._host_id:
            self._fallback = Fallback.OTHER_HOST
        elif self._attaching is not None and not self._attaching.done():
            await asyncio.shield(self._attaching)
        elif asyncio.get_running_loop().time() >= self._try_again_at and not self._is_closed:
            self._attaching = asyncio.create_task(self._try_to_attach(address, ticket))
            await asyncio.shield(self._attaching)

    async def _try_to_attach(self, address: StagingAddress, ticket: HandoffTicket) -> None:
        block_bytes = ticket.layout.block_bytes
        max_run = max(1, self._config.staged_frame_bytes // block_bytes)
        slot_bytes = -(-max_run * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = self._config.staging_bytes // slot_bytes * slot_bytes
        epochs = (ticket.decode.epoch, ticket.prefill.epoch)
        try:
            if num_bytes == 0:
                raise NotAttached(Fallback.LIMIT, f"staging_bytes is less than a frame of {slot_bytes} bytes")
            attachment = await attach(address, *epochs, num_bytes, self._config.attach_s)
        except NotAttached as error:
            self._fallback = error.reason
            self._try_again_at = asyncio.get_running_loop().time() + self._config.attach_again_s
            worker_id = ticket.decode.worker_id
            _log.warning(
                "no shared memory with decode worker %s, which is on this host: %s", worker_id, error
            )
        else:
            self._staging = Staging(attachment, slot_bytes)

    async def _take_back(self, ticket: HandoffTicket, time_left_s: float) -> None:
        """What decode reserved is of no use; if it cannot be told, its own silence rule ends the ticket."""
        try:
            await self._grpc.abort(Fence.of(ticket), "no shared memory", time_left_s)
        except ServingError as error:
            _log.info("decode was not told of the abort of ticket %s: %r", ticket.ticket_id, error)

    def _refusal(self) -> HandoffError:
        return HandoffError("shared memory is required, but there is none", reason=str(self._fallback))

    def _release(self, ticket_id: TicketId) -> None:
        if self.staging is not None:
            self.staging.slots.release(ticket_id)


class ShmPush:
    """One Push stream: frames over gRPC, of which each may have a slot that its acknowledgement frees."""

    def __init__(self, transport: ShmTransport, push: GrpcPush) -> None:
        self._transport = transport
        self._push = push
        self._ticket_id: TicketId | None = None
        self._filling: tuple[Staging, Slot] | None = None
        self._sent: deque[tuple[Staging, Slot] | None] = deque()

    async def room(self, ticket_id: TicketId, num_bytes: int) -> Room | None:
        assert self._filling is None, "the last room was not used"
        self._ticket_id = ticket_id
        self._filling = await self._transport.take_slot(num_bytes)
        if self._filling is None:
            return None
        staging, slot = self._filling
        return Room(slot.memory[:num_bytes], Place(staging.staging_id, slot.offset))

    async def send(self, frame: bytes) -> None:
        # from here on decode may read the slot, whatever becomes of this call
        self._sent.append(self._filling)
        self._filling = None
        await self._push.send(frame)

    async def acks(self) -> AsyncIterator[bytes]:
        async for data in self._push.acks():
            error = decode_ack(data).error
            place = self._sent[0] if self._sent else None
            if isinstance(error, StagingLost) and place is not None:
                place[0].give_up("decode does not know it")
                raise WorkerLost("the staging memory is gone; what is not acknowledged is sent again")
            if error is None and self._sent:
                self._sent.popleft()
                if place is not None:
                    staging, slot = place
                    staging.slots.give_back(slot)
            yield data

    async def close(self) -> None:
        await self._push.close()
        if self._filling is not None:  # no frame ever named it
            staging, slot = self._filling
            staging.slots.give_back(slot)
            self._filling = None
        for place in self._sent:
            if place is not None:
                assert self._ticket_id is not None
                staging, slot = place
                staging.slots.quarantine(self._ticket_id, (slot,))
        self._sent.clear()
