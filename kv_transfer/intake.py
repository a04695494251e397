"""Intake: one push at decode: takes frames, has them written, acknowledges them in their order.

Frames are taken while earlier ones still wait for decode's step, so that a slow step does not stop the
stream; how many may wait is bounded, beyond it the stream's flow control holds the sender. Knows no ticket;
lives on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from core.errors import TransferCorrupt
from kv_transfer.codec import Ack, Frame, decode_frame, encode_ack
from kv_transfer.transport import Fence

SendAck = Callable[[bytes], Awaitable[None]]
Write = Callable[[Frame], Coroutine[Any, Any, Ack]]
RefuseUnreadable = Callable[[Fence | None, TransferCorrupt], Coroutine[Any, Any, Ack]]

_MAX_WRITES_PENDING = 16


class Intake:
    """`write` answers a frame whose header is intact; `refuse` one that is not, given the last intact one's
    fence.
    """

    def __init__(self, write: Write, refuse: RefuseUnreadable) -> None:
        self._write = write
        self._refuse = refuse
        self._slots = asyncio.Semaphore(_MAX_WRITES_PENDING)
        self._writes: asyncio.Queue[asyncio.Task[Ack] | None] = asyncio.Queue()
        self._started: set[asyncio.Task[Ack]] = set()

    async def run(self, frames: AsyncIterator[bytes], send_ack: SendAck) -> None:
        """Until the frames end or one is refused; the refusal is the last acknowledgement."""
        taking = asyncio.create_task(self._take(frames))
        try:
            while (write := await self._writes.get()) is not None:
                ack = await write
                await send_ack(encode_ack(ack))
                if ack.error is not None:
                    return
                self._slots.release()
            await taking  # the frames ended: raise what ended them, if anything
        finally:
            left: list[asyncio.Task[None] | asyncio.Task[Ack]] = [taking, *self._started]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _take(self, frames: AsyncIterator[bytes]) -> None:
        """Turn frames into writes, in order, until the frames end or one cannot be read."""
        current: Fence | None = None
        try:
            await self._slots.acquire()
            async for data in frames:
                try:
                    frame = decode_frame(data)
                except TransferCorrupt as error:
                    if self._started:
                        # the refusal ends the ticket: what came before it is answered for itself
                        await asyncio.wait(self._started)
                    self._start(self._refuse(current, error))
                    break
                current = frame.fence
                self._start(self._write(frame))
                await self._slots.acquire()
        finally:
            self._writes.put_nowait(None)

    def _start(self, write: Coroutine[Any, Any, Ack]) -> None:
        task = asyncio.create_task(write)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        self._writes.put_nowait(task)
