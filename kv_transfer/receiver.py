"""Receiver: decode's end of the bridge. Nothing reaches the port that was not checked, or whose check, for a
payload that can only be checked once it was copied, does not come with it.

Owns the table of offered tickets (bounded; the least recently used are forgotten, their late frames are
refused) and counts what arrived. Who owns which block, and when a ticket expires, is the port's business.
Lives on one asyncio loop; used by the gRPC servicer and by loopback.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Coroutine
from functools import partial
from typing import Any, TypeVar

from core.clock import Clock, MonotonicClock
from core.errors import (
    LayoutMismatch,
    ServingError,
    StagingLost,
    StaleEpoch,
    TicketExpired,
    TransferCorrupt,
)
from core.handoff import HandoffTicket
from core.ids import Epoch, TicketId, WorkerRef
from core.kv_layout import KVLayout
from kv_transfer.codec import Ack, Frame, payload_seed
from kv_transfer.device_memory import DeviceCopy
from kv_transfer.device_thread import DeviceSpan
from kv_transfer.group_messages import refusal
from kv_transfer.incoming import IncomingTicket
from kv_transfer.intake import Intake, SendAck
from kv_transfer.metrics import TransferMetrics
from kv_transfer.pair_group import GroupServer
from kv_transfer.shm_handshake import Fallback
from kv_transfer.transport import (
    CommitClaim,
    CommitReceipt,
    Fence,
    OfferedStaging,
    Payload,
    Place,
    ReservationPort,
    StagingArea,
    WriteCheck,
)
from protos.transfer_codec import VERSION

_MAX_TICKETS = 4096


T = TypeVar("T")


def _start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose waiters may all go away: its error was still seen by the port."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
    return task


class Receiver:
    """Answers Offer, Push, Commit, Abort and KeepAlive; each is idempotent. Errors are ServingErrors."""

    def __init__(
        self,
        port: ReservationPort,
        own_ref: WorkerRef,
        layout: KVLayout,
        metrics: TransferMetrics,
        clock: Clock | None = None,
    ) -> None:
        self._port = port
        self._ref = own_ref
        self._layout = layout
        self.metrics = metrics
        self._clock = clock if clock is not None else MonotonicClock()
        self._tickets: OrderedDict[TicketId, IncomingTicket] = OrderedDict()
        self._staging: list[StagingArea] = []
        self._groups: GroupServer | None = None

    def admit(self, staging: StagingArea) -> None:
        """Take frames whose payload lies in `staging`, and tell prefill workers of it; closed with this."""
        self._staging.append(staging)

    def admit_groups(self, groups: GroupServer) -> None:
        """`admit`, for memory that process groups write to."""
        self._groups = groups
        self.admit(groups)

    async def serve_group(self, messages: AsyncIterator[bytes], send: SendAck) -> None:
        """One pair's process group, from its hello to its end."""
        if self._groups is None:
            await send(refusal(Fallback.NOT_OFFERED))
            return
        await self._groups.serve(messages, send)

    @property
    def epoch(self) -> Epoch:
        """The worker's incarnation."""
        return self._ref.epoch

    @property
    def offered_staging(self) -> OfferedStaging:
        """Where prefill workers of this host find staging memory, if anywhere."""
        offered = OfferedStaging()
        for area in self._staging:
            offered = area.offer(offered)
        return offered

    def meet(self, prefill: WorkerRef, layout: KVLayout, receiver_epoch: Epoch) -> OfferedStaging:
        """Where `prefill` finds staging memory for blocks of `layout`. Raises StaleEpoch, LayoutMismatch."""
        self._check_own_epoch(receiver_epoch)
        self._check_layout(prefill, layout)
        return self.offered_staging

    def check_version(self, prefill: str, version: int) -> None:
        """Raises LayoutMismatch, naming both sides, for one who speaks another version of the bridge."""
        if version != VERSION:
            raise self._mismatch(prefill, [f"version of the bridge: {version} vs {VERSION}"])

    async def offer(
        self, ticket: HandoffTicket, time_left_s: float, receiver_epoch: Epoch
    ) -> tuple[int, ...]:
        """Reserve for the ticket; returns the indexes of blocks that need not be sent.

        Raises StaleEpoch, LayoutMismatch (naming both sides), TicketExpired (aborted or over), or what the
        port refuses with.
        """
        try:
            return await self._offer(ticket, time_left_s, receiver_epoch)
        except ServingError as error:
            self.metrics.count_failure("receiver", error)
            raise

    async def push(self, frames: AsyncIterator[bytes], send_ack: SendAck, transport: str) -> None:
        """Check and write frames, acknowledging them in order, until they end or one is refused.

        A refusal is the last acknowledgement. `transport` is the label under which their bytes count.
        """
        await Intake(partial(self._write, transport), self._refuse_unreadable).run(frames, send_ack)

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        """All frames were acknowledged. Raises TransferCorrupt, and aborts, when the claim is wrong."""
        try:
            entry = self._find(fence)
            if entry.committing is None:
                self._check_open(entry)
                try:
                    receipt = entry.check_commit(claim)
                except TransferCorrupt as error:
                    await self._abort(entry, error)
                    raise
                entry.committing = _start(self._commit(entry, claim, receipt))
            # shielded: if this call's connection breaks, the commit still happens and a repeated call hears
            # of it
            return await asyncio.shield(entry.committing)
        except ServingError as error:
            self.metrics.count_failure("receiver", error)
            raise

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        """End the ticket in whatever state; an unknown one is remembered: its late offer is refused."""
        self._check_own_epoch(fence.receiver_epoch)
        entry = self._tickets.get(fence.ticket_id)
        if entry is not None:
            entry.check_sender(fence)
            entry.end(TicketExpired(f"the ticket was aborted: {reason}", ticket_id=fence.ticket_id))
        await self._port.abort(fence.ticket_id, reason, time_left_s)

    async def keepalive(self, fence: Fence) -> None:
        entry = self._find(fence)
        if entry.committing is not None:
            return  # it crossed the commit; the ticket needs no sign of life from prefill any more
        self._check_open(entry)
        await self._until_expired(entry, self._port.keepalive(fence.ticket_id))

    async def close(self) -> None:
        """Cancel the offers and commits that still wait for the port; give the staging memory back."""
        tasks: list[asyncio.Task[tuple[int, ...]] | asyncio.Task[CommitReceipt]] = []
        for entry in self._tickets.values():
            tasks += [task for task in (entry.offering, entry.committing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tickets.clear()
        for area in self._staging:
            await area.close()
        self._staging.clear()

    # ------------------------------------------------------------ offer

    async def _offer(
        self, ticket: HandoffTicket, time_left_s: float, receiver_epoch: Epoch
    ) -> tuple[int, ...]:
        self._check_own_epoch(receiver_epoch)
        if ticket.decode.worker_id != self._ref.worker_id:
            raise StaleEpoch(
                "the ticket is for another worker", wanted=ticket.decode.worker_id, found=self._ref.worker_id
            )
        self._check_own_epoch(ticket.decode.epoch)
        self._check_layout(ticket.prefill, ticket.layout)
        entry = self._tickets.get(ticket.ticket_id)
        if entry is None:
            entry = IncomingTicket(ticket, time_left_s)
            self._tickets[ticket.ticket_id] = entry
            self._forget_oldest()
            entry.offering = _start(self._reserve(entry, ticket, time_left_s))
        elif not entry.is_open:
            raise entry.refusal()
        elif not entry.is_same_offer(ticket):
            raise TransferCorrupt("two different offers bear the same ticket", ticket_id=ticket.ticket_id)
        assert entry.offering is not None
        # shielded: if this call's connection breaks, a repeated offer finds the reservation
        return await asyncio.shield(entry.offering)

    async def _reserve(
        self, entry: IncomingTicket, ticket: HandoffTicket, time_left_s: float
    ) -> tuple[int, ...]:
        try:
            held = await self._port.offer(ticket, time_left_s)
        except BaseException:
            # a refusal leaves nothing behind: the same ticket may be offered again
            if self._tickets.get(ticket.ticket_id) is entry:
                del self._tickets[ticket.ticket_id]
            raise
        if not entry.is_open:  # aborted meanwhile; the port has heard of it
            raise entry.refusal()
        entry.hold(held)
        return held

    def _check_layout(self, prefill: WorkerRef, layout: KVLayout) -> None:
        differences = layout.differences(self._layout)
        if differences:
            raise self._mismatch(prefill.worker_id, differences)

    def _mismatch(self, prefill: str, differences: list[str]) -> LayoutMismatch:
        found = "; ".join(differences)
        return LayoutMismatch(
            f"prefill worker {prefill} and decode worker {self._ref.worker_id} "
            f"cannot exchange blocks (prefill vs decode): {found}",
            prefill=prefill,
            decode=self._ref.worker_id,
            differences=found,
            block_size=self._layout.block_size,
        )

    def _forget_oldest(self) -> None:
        while len(self._tickets) > _MAX_TICKETS:
            self._tickets.popitem(last=False)

    # ------------------------------------------------------------ push

    async def _write(self, transport: str, frame: Frame) -> Ack:
        """Check the frame and have it written; the answer says either that it was or why not."""
        entry: IncomingTicket | None = None
        try:
            entry = self._find(frame.fence)
            self._check_open(entry)
            if not entry.is_reserved:
                raise TransferCorrupt("a frame came before the offer was answered", ticket_id=entry.ticket_id)
            payload: Payload | DeviceSpan = frame.payload
            check: WriteCheck | None = None
            if frame.place is not None:
                transport, payload = await self._find_staged(frame, frame.place)
                self._check_open(entry)
                check = None if frame.is_on_device else frame.check()
            entry.transport = transport
            if entry.first_frame_at is None:
                entry.first_frame_at = self._clock.now()
            if entry.accept(frame):
                if isinstance(payload, DeviceSpan):
                    payload = await self._take(entry, frame, payload)
                call = self._port.write(entry.ticket_id, frame.first_index, frame.num_blocks, payload, check)
                await self._until_expired(entry, call)
                self.metrics.count_bytes(transport, entry.note_written(frame.first_index))
        except ServingError as error:
            await self._refuse(entry, error)
            return Ack(frame.first_index, frame.num_blocks, error)
        return Ack(frame.first_index, frame.num_blocks)

    async def _take(self, entry: IncomingTicket, frame: Frame, span: DeviceSpan) -> DeviceCopy:
        """A verified copy that its writer cannot reach."""
        found = await span.take(payload_seed(entry.ticket_id))
        self._check_open(entry)
        if found.digest != frame.checksum:
            raise TransferCorrupt(
                "a payload on the device does not match its digest",
                ticket_id=entry.ticket_id,
                first_index=frame.first_index,
                num_blocks=frame.num_blocks,
            )
        return found

    async def _find_staged(self, frame: Frame, place: Place) -> tuple[str, memoryview | DeviceSpan]:
        """The payload's way and place, in memory of the pair that the frame's fence names and of no other."""
        for area in self._staging:
            if area.is_on_device == frame.is_on_device:
                found = await area.find(place, frame.num_bytes, frame.fence.sender_epoch)
                if found is not None:
                    return area.label, found
        raise StagingLost("a frame names staging memory that is not here", ticket_id=frame.fence.ticket_id)

    async def _refuse_unreadable(self, fence: Fence | None, error: TransferCorrupt) -> Ack:
        """Whose frame it was cannot be read, but a stream carries one ticket's frames."""
        await self._refuse(self._tickets.get(fence.ticket_id) if fence is not None else None, error)
        return Ack(0, 0, error)

    async def _refuse(self, entry: IncomingTicket | None, error: ServingError) -> None:
        """Count a refused frame; a damaged one ends its ticket."""
        self.metrics.count_failure("receiver", error)
        if isinstance(error, TransferCorrupt) and entry is not None and entry.is_open:
            await self._abort(entry, error)

    # ------------------------------------------------------------ commit, ends

    async def _commit(
        self, entry: IncomingTicket, claim: CommitClaim, receipt: CommitReceipt
    ) -> CommitReceipt:
        await self._until_expired(
            entry, self._port.commit(entry.ticket_id, claim.num_tokens, claim.num_pushed_blocks)
        )
        if entry.first_frame_at is not None:
            self.metrics.observe_seconds(entry.transport, self._clock.now() - entry.first_frame_at)
        entry.end(None)
        return receipt

    async def _until_expired(self, entry: IncomingTicket, call: Awaitable[None]) -> None:
        """Await the port; when it says that the ticket is over, it is over here too."""
        try:
            await call
        except TicketExpired as error:
            entry.end(error)
            raise

    async def _abort(self, entry: IncomingTicket, error: ServingError) -> None:
        entry.end(TicketExpired(f"the ticket was aborted: {error.message}", ticket_id=entry.ticket_id))
        await self._port.abort(entry.ticket_id, error.code, entry.time_left_s)

    # ------------------------------------------------------------ checks

    def _check_own_epoch(self, named: Epoch) -> None:
        if named != self._ref.epoch:
            raise StaleEpoch(
                f"the message was meant for another incarnation of {self._ref.worker_id}",
                worker_id=self._ref.worker_id,
                epoch=self._ref.epoch,
                named=named,
            )

    def _find(self, fence: Fence) -> IncomingTicket:
        self._check_own_epoch(fence.receiver_epoch)
        entry = self._tickets.get(fence.ticket_id)
        if entry is None:
            raise TicketExpired(
                "no such ticket here: never offered, expired or over", ticket_id=fence.ticket_id
            )
        entry.check_sender(fence)
        self._tickets.move_to_end(fence.ticket_id)
        return entry

    def _check_open(self, entry: IncomingTicket) -> None:
        if not entry.is_open:
            raise entry.refusal()
