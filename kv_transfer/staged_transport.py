"""Messages over gRPC, payloads through staging memory of the pair, whichever kind of memory that is.

Owns prefill's end of a pair's staging memory: asks for it at the first offer, hands out slots, knows when one
may be used again, and gives the memory back. Whatever stands in the way, payloads go the next way instead
(the transport that this one stands on), frame by frame, unless this one is required. What the memory is, and
how it is asked for, is its subclasses' business. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from core.errors import HandoffError, ServingError, StagingLost, WorkerLost
from core.handoff import HandoffTicket
from core.ids import TicketId
from kv_transfer.codec import decode_ack
from kv_transfer.shm_handshake import Fallback, NotAttached
from kv_transfer.shm_slots import Slot
from kv_transfer.staging import Attached, Staging
from kv_transfer.transport import (
    Carriage,
    CommitClaim,
    CommitReceipt,
    Fence,
    OfferedStaging,
    Pair,
    Place,
    PushStream,
    Room,
    Transport,
)

_log = logging.getLogger(__name__)

_MAX_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class StagingWish:
    """How a way wants its memory: bytes of it, bytes of a frame, whether nothing else will do, how long
    attaching may take and when it may be tried again, and the prefix of its reasons in metrics.
    """

    staging_bytes: int
    frame_bytes: int
    is_required: bool
    attach_s: float
    attach_again_s: float
    prefix: str = ""


class Underlying(Transport, Protocol):
    """A transport that another one can stand on: what follows an offer's reply is a step of its own."""

    async def offer_and_ask(
        self, ticket: HandoffTicket, time_left_s: float
    ) -> tuple[tuple[int, ...], OfferedStaging]: ...

    async def ask(self, pair: Pair) -> OfferedStaging:
        """Where decode offers what, without a ticket. Raises what an offer would."""
        ...

    async def prepare(self, pair: Pair, offered: OfferedStaging) -> None:
        """Attach what can be attached. Raises HandoffError when what is required cannot be had."""
        ...


class StagedTransport(ABC):
    """To one decode worker, which may be on this host or not."""

    name: str

    def __init__(self, inner: Underlying, wish: StagingWish) -> None:
        self._inner = inner
        self._wish = wish
        self._staging: Staging | None = None
        self._fallback = Fallback.NOT_OFFERED
        self._try_again_at = float("-inf")
        self._again_s = wish.attach_again_s
        self._attaching: asyncio.Task[None] | None = None
        self._is_closed = False

    @abstractmethod
    def obstacle(self, offered: OfferedStaging) -> Fallback | None:
        """Why decode need not be asked for this kind of memory, if so."""

    @abstractmethod
    async def attach(self, offered: OfferedStaging, pair: Pair, num_bytes: int) -> Attached:
        """Memory of `num_bytes`. Raises NotAttached."""

    @property
    def staging(self) -> Staging | None:
        """The memory, if it is attached now."""
        return self._staging if self._staging is not None and self._staging.is_open else None

    @property
    def carriage(self) -> Carriage:
        if (staging := self.staging) is not None:
            return Carriage(self.name, self._wish.frame_bytes, is_on_device=staging.is_on_device)
        inner = self._inner.carriage
        fallback = inner.fallback or self._wish.prefix + self._fallback
        return Carriage(inner.way, inner.frame_bytes, fallback, inner.is_on_device)

    async def meet(self, pair: Pair) -> None:
        await self.prepare(pair, await self._inner.ask(pair))

    async def ask(self, pair: Pair) -> OfferedStaging:
        return await self._inner.ask(pair)

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        """Raises HandoffError, too, when a way is required and cannot be had."""
        held, offered = await self._inner.offer_and_ask(ticket, time_left_s)
        try:
            await self.prepare(Pair.of(ticket), offered)
        except HandoffError:
            await self._take_back(ticket, time_left_s)
            raise
        return held

    async def offer_and_ask(
        self, ticket: HandoffTicket, time_left_s: float
    ) -> tuple[tuple[int, ...], OfferedStaging]:
        return await self._inner.offer_and_ask(ticket, time_left_s)

    async def prepare(self, pair: Pair, offered: OfferedStaging) -> None:
        if self.staging is not None and self.staging.slots.is_worn:
            self.staging.give_up("decode does not let go of most of its slots")
        if self.staging is None:
            await self._attach(offered, pair)
        if self.staging is None:
            if self._wish.is_required:
                raise self._refusal()
            await self._inner.prepare(pair, offered)

    async def open_push(self) -> StagedPush:
        return StagedPush(self, await self._inner.open_push())

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        receipt = await self._inner.commit(fence, claim)
        self._release(fence.ticket_id)
        return receipt

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        await self._inner.abort(fence, reason, time_left_s)
        self._release(fence.ticket_id)

    async def keepalive(self, fence: Fence) -> None:
        await self._inner.keepalive(fence)

    async def close(self) -> None:
        self._is_closed = True
        if self._attaching is not None:
            self._attaching.cancel()
            await asyncio.gather(self._attaching, return_exceptions=True)
        if self._staging is not None:
            self._staging.close()
        await self._inner.close()

    async def take_slot(self, num_bytes: int) -> tuple[Staging, Slot] | None:
        """A slot for a payload, waiting for one; None when it has to go the next way. Raises HandoffError if
        it must not.
        """
        staging = self.staging
        if staging is not None and num_bytes <= staging.slots.slot_bytes:
            slot = await staging.slots.take()
            if slot is not None:
                return staging, slot
            staging.give_up("decode has not let go of any of its slots")
        if self._wish.is_required:
            raise self._refusal()
        return None

    async def _attach(self, offered: OfferedStaging, pair: Pair) -> None:
        """Attach once for all offers that come meanwhile; not again soon after it failed. Where the last try
        took all of its time, offers go the next way and do not wait for another one.
        """
        if self._staging is not None:
            self._staging, self._fallback = None, Fallback.LOST
        obstacle = self.obstacle(offered)
        if obstacle is not None:
            self._fallback = obstacle
            return
        is_waited_for = self._fallback is not Fallback.TIMEOUT or self._wish.is_required
        if self._attaching is None or self._attaching.done():
            if asyncio.get_running_loop().time() < self._try_again_at or self._is_closed:
                return
            self._attaching = asyncio.create_task(self._try_to_attach(offered, pair))
        if is_waited_for:
            await asyncio.shield(self._attaching)

    async def _try_to_attach(self, offered: OfferedStaging, pair: Pair) -> None:
        block_bytes = pair.layout.block_bytes
        max_run = max(1, self._wish.frame_bytes // block_bytes)
        slot_bytes = -(-max_run * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = self._wish.staging_bytes // slot_bytes * slot_bytes
        try:
            if num_bytes == 0:
                raise NotAttached(
                    Fallback.LIMIT, f"the staging memory is less than a frame of {slot_bytes} bytes"
                )
            attachment = await self.attach(offered, pair, num_bytes)
        except NotAttached as error:
            self._fallback = error.reason
            # an offer may wait for a try: where it is in vain, they become rare
            self._try_again_at = asyncio.get_running_loop().time() + self._again_s
            self._again_s = min(2 * self._again_s, max(_MAX_AGAIN_S, self._wish.attach_again_s))
            _log.warning("no %s with decode worker %s: %s", self.name, pair.decode.worker_id, error)
        else:
            self._staging = Staging(attachment, slot_bytes)
            self._again_s = self._wish.attach_again_s

    async def _take_back(self, ticket: HandoffTicket, time_left_s: float) -> None:
        """What decode reserved is of no use; if it cannot be told, its own silence rule ends the ticket."""
        try:
            await self._inner.abort(Fence.of(ticket), "no staging memory", time_left_s)
        except ServingError as error:
            _log.info("decode was not told of the abort of ticket %s: %r", ticket.ticket_id, error)

    def _refusal(self) -> HandoffError:
        return HandoffError(f"{self.name} is required, but there is none", reason=str(self._fallback))

    def _release(self, ticket_id: TicketId) -> None:
        if self.staging is not None:
            self.staging.slots.release(ticket_id)


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    """A slot that is filled for a frame, and how the frame names it."""

    staging: Staging
    slot: Slot
    place: Place
    num_bytes: int


class StagedPush:
    """One Push stream, of whose frames each may have a slot that its acknowledgement frees."""

    def __init__(self, transport: StagedTransport, push: PushStream) -> None:
        self._transport = transport
        self._push = push
        self._ticket_id: TicketId | None = None
        self._filling: _Filling | None = None
        self._sent: deque[_Filling | None] = deque()

    async def room(self, ticket_id: TicketId, num_bytes: int) -> Room | None:
        assert self._filling is None, "the last room was not used"
        self._ticket_id = ticket_id
        taken = await self._transport.take_slot(num_bytes)
        if taken is None:
            return await self._push.room(ticket_id, num_bytes)
        staging, slot = taken
        self._filling = _Filling(staging, slot, staging.place(slot), num_bytes)
        return Room(slot.memory[:num_bytes], self._filling.place)

    async def send(self, frame: bytes) -> None:
        # from here on decode may read the slot, whatever becomes of this call
        filled, self._filling = self._filling, None
        self._sent.append(filled)
        if filled is not None:
            filled.staging.publish(filled.place, filled.slot, filled.num_bytes)
        await self._push.send(frame)

    async def acks(self) -> AsyncIterator[bytes]:
        async for data in self._push.acks():
            error = decode_ack(data).error
            filled = self._sent[0] if self._sent else None
            if isinstance(error, StagingLost) and filled is not None:
                filled.staging.give_up("decode does not know it")
                raise WorkerLost("the staging memory is gone; what is not acknowledged is sent again")
            if error is None and self._sent:
                self._sent.popleft()
                if filled is not None:
                    filled.staging.slots.give_back(filled.slot)
            yield data

    async def close(self) -> None:
        await self._push.close()
        if self._filling is not None:  # no frame ever named it
            self._filling.staging.slots.give_back(self._filling.slot)
            self._filling = None
        for filled in self._sent:
            if filled is not None:
                assert self._ticket_id is not None
                filled.staging.slots.quarantine(self._ticket_id, (filled.slot,))
        self._sent.clear()
