"""Loopback: the bridge inside one process: same frames, checks and acknowledgements as over gRPC.

Lives on one asyncio loop, on which both workers' ends live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from core.errors import WorkerLost
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerId, WorkerRef
from kv_transfer.receiver import Receiver
from kv_transfer.transport import Carriage, CommitClaim, CommitReceipt, Fence, Pair

_MAX_FRAMES_WAITING = 4

SCHEME = "loopback:"


class LoopbackDirectory:
    """Which receivers live in this process; `connect` is what a Sender is given."""

    def __init__(self) -> None:
        self._receivers: dict[WorkerId, Receiver] = {}

    def register(self, worker_id: WorkerId, receiver: Receiver) -> str:
        """Returns the address to put into the worker's ref."""
        self._receivers[worker_id] = receiver
        return f"{SCHEME}{worker_id}"

    def unregister(self, worker_id: WorkerId) -> None:
        """From now on the worker cannot be reached, also not by transports that are open."""
        self._receivers.pop(worker_id, None)

    def find(self, worker_id: WorkerId) -> Receiver:
        """Raises WorkerLost."""
        receiver = self._receivers.get(worker_id)
        if receiver is None:
            raise WorkerLost("no such worker in this process", worker_id=worker_id)
        return receiver

    def connect(self, ref: WorkerRef) -> LoopbackTransport:
        return LoopbackTransport(self, WorkerId(ref.address.removeprefix(SCHEME)))


class LoopbackTransport:
    """Calls the receiver that bears the name at the time of each call."""

    name = "loopback"
    carriage = Carriage(name)

    def __init__(self, directory: LoopbackDirectory, worker_id: WorkerId) -> None:
        self._directory = directory
        self._worker_id = worker_id

    async def meet(self, pair: Pair) -> None:
        self._receiver.meet(pair.prefill, pair.layout, pair.decode.epoch)

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        return await self._receiver.offer(ticket, time_left_s, ticket.decode.epoch)

    async def open_push(self) -> LoopbackPush:
        return LoopbackPush(self._directory, self._worker_id)

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        return await self._receiver.commit(fence, claim)

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        await self._receiver.abort(fence, reason, time_left_s)

    async def keepalive(self, fence: Fence) -> None:
        await self._receiver.keepalive(fence)

    async def close(self) -> None:
        """Nothing is held open between calls."""

    @property
    def _receiver(self) -> Receiver:
        return self._directory.find(self._worker_id)


class LoopbackPush:
    """One push: a short queue of frames into the receiver, its acknowledgements out."""

    def __init__(self, directory: LoopbackDirectory, worker_id: WorkerId) -> None:
        self._directory = directory
        self._worker_id = worker_id
        self._receiver = directory.find(worker_id)
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(_MAX_FRAMES_WAITING)
        self._acks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._serving = asyncio.create_task(self._serve())

    async def room(self, ticket_id: TicketId, num_bytes: int) -> None:
        """Payloads travel in their frames."""

    async def send(self, frame: bytes) -> None:
        if self._serving.done() or self._directory.find(self._worker_id) is not self._receiver:
            raise WorkerLost("the push is over", worker_id=self._worker_id)
        await self._frames.put(frame)

    async def acks(self) -> AsyncIterator[bytes]:
        while (ack := await self._acks.get()) is not None:
            yield ack
        await self._serving  # raises what ended it

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.wait((self._serving,))
        if not self._serving.cancelled():
            self._serving.result()  # a receiver that raises has a bug: it may not go unseen

    async def _serve(self) -> None:
        try:
            async with aclosing(self._incoming()) as frames:
                await self._receiver.push(frames, self._acks.put, LoopbackTransport.name)
        finally:
            self._acks.put_nowait(None)

    async def _incoming(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield await self._frames.get()
