"""Push: sends a ticket's blocks, over a new stream when one breaks, until all are acknowledged.

Owns streams, keepalives and the moment when decode was last heard; the session owns what comes before and
after. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from core.clock import Clock
from core.errors import ServingError, TransferTimeout, WorkerLost
from kv_transfer.codec import (
    decode_ack,
    encode_device_frame,
    encode_frame,
    encode_staged_frame,
    payload_seed,
)
from kv_transfer.config import BridgeConfig
from kv_transfer.device_thread import DeviceSpan
from kv_transfer.push_queue import BlockRun, PushQueue
from kv_transfer.transport import BlockStore, Fence, PushStream, Room, Transport

T = TypeVar("T")

_LAST_WORDS_S = 1.0  # how long a broken stream may still deliver the acknowledgement that says why it broke


class _Refused(Exception):
    """Decode's last word on a push; never taken for a broken stream, whatever the error is."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error.message)
        self.error = error


class _WrongRoom(Exception):
    """The stream's rooms are not for this ticket's payloads: another stream is asked for none."""


class Push:
    """`run` sends, `watch` guards beside it. What a broken stream left unacknowledged is sent again."""

    def __init__(
        self, queue: PushQueue, store: BlockStore, fence: Fence, config: BridgeConfig, clock: Clock
    ) -> None:
        self._queue = queue
        self._store = store
        self._fence = fence
        self._config = config
        self._clock = clock
        self._wake = asyncio.Event()
        self._is_running = False
        self._is_finishing = False
        self._is_room_used = self._is_device_used = True
        self._heard_at = 0.0
        self._pushed_at = 0.0
        self._backoff_s = config.reconnect_min_s
        self._num_in_flight = 0  # frames of the present stream
        self._is_waiting_for_room = False
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._scratch = bytearray()  # where a payload lies before it is joined to its header; memory in use

    @property
    def busy_s(self) -> float:
        """How long blocks have waited for their acknowledgement, since `run` began."""
        return self._busy_s

    def add(self, first_index: int, block_ids: Sequence[int]) -> None:
        self._queue.add(first_index, block_ids)
        self._count_time()
        self._wake.set()

    def use_no_room(self) -> None:
        """Payloads travel in their frames, whatever else there is."""
        self._is_room_used = False

    def use_no_device(self) -> None:
        """The same where the room is on a device, also if there is one only later: a device copies blocks of
        the pool as they are, whatever the store makes of them.
        """
        self._is_device_used = False

    def finish(self) -> None:
        """Nothing more will be added: `run` may return when all has arrived."""
        self._is_finishing = True
        self._wake.set()

    async def run(self, transport: Transport) -> None:
        """Until `finish` was called and every block is acknowledged. Raises what decode refused with.

        A lost connection is not an error here: `watch` says when there was too much of it.
        """
        self._is_running = True
        self._count_time()
        while True:
            self._wake.clear()
            if self._queue.is_empty:
                if self._is_finishing:
                    assert self._queue.is_complete, "finished, but some blocks of the ticket were never added"
                    return
                await self._wake.wait()
                continue
            try:
                stream = await transport.open_push()
                try:
                    self._queue.rewind()
                    await self._drive(stream)
                finally:
                    await stream.close()
            except _Refused as refused:
                raise refused.error from None
            except _WrongRoom:
                self.use_no_room()
            except WorkerLost:
                await self._back_off()

    async def watch(self, transport: Transport) -> None:
        """Keepalives while nothing is pushed; never returns, raises TransferTimeout when decode is silent.

        An answered keepalive is no sign of life while frames wait for their acknowledgement: those must make
        progress. A frame that waits for room, which other tickets have, is not on its way yet.
        """
        self._heard_at = self._pushed_at = self._clock.now()
        while True:
            now = self._clock.now()
            left_s = self._heard_at + self._config.silence_s - now
            if left_s <= 0:
                raise TransferTimeout(
                    f"decode was silent for {self._config.silence_s:g} s", ticket_id=self._fence.ticket_id
                )
            due_s = self._pushed_at + self._config.keepalive_s - now
            if due_s > 0:
                await asyncio.sleep(min(due_s, left_s))
                continue
            self._pushed_at = now
            try:
                async with asyncio.timeout(min(self._config.keepalive_s, left_s)):
                    await transport.keepalive(self._fence)
            except (WorkerLost, TimeoutError):
                continue
            if not self._queue.has_unacked or (self._is_waiting_for_room and self._num_in_flight == 0):
                self._heard_at = self._clock.now()

    async def until_heard(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent call as long as the connection breaks; `watch` or a timeout bounds it."""
        while True:
            try:
                return await call()
            except WorkerLost:
                await self._back_off()

    # ------------------------------------------------------------ one stream

    async def _drive(self, stream: PushStream) -> None:
        """Send and read acknowledgements until all that was added has arrived and no more is to come."""
        self._num_in_flight = 0
        writing = asyncio.create_task(self._write_frames(stream))
        reading = asyncio.create_task(self._read_acks(stream))
        try:
            await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not reading.done() and isinstance(writing.exception(), WorkerLost):
                await asyncio.wait((reading,), timeout=_LAST_WORDS_S)
            if reading.done():
                reading.result()  # raises: why decode refused, or that the connection broke
            writing.result()
        finally:
            for task in (writing, reading):
                task.cancel()
            await asyncio.gather(writing, reading, return_exceptions=True)

    async def _write_frames(self, stream: PushStream) -> None:
        while not (self._is_finishing and self._queue.is_empty):
            self._wake.clear()
            run = self._queue.next_run()
            if run is None:
                await self._wake.wait()
                continue
            num_bytes = run.num_blocks * self._store.layout.block_bytes
            # the room is in no variable: an error's traceback would keep the memory
            frame, checksum, is_on_device = await self._frame(run, await self._room(stream, num_bytes))
            self._queue.sent(run, checksum, is_on_device)
            self._num_in_flight += 1
            await stream.send(frame)
            self._pushed_at = self._clock.now()

    async def _room(self, stream: PushStream, num_bytes: int) -> Room | None:
        if not self._is_room_used:
            return None
        self._is_waiting_for_room = True
        try:
            room = await stream.room(self._fence.ticket_id, num_bytes)
        finally:
            self._is_waiting_for_room = False
        if room is not None and isinstance(room.memory, DeviceSpan) and not self._is_device_used:
            raise _WrongRoom  # the stream is closed, which gives the room back
        return room

    async def _frame(self, run: BlockRun, room: Room | None) -> tuple[bytes, int, bool]:
        """The frame of a run, whose payload goes into `room` if there is one, its checksum, and whether that
        is a device's.
        """
        fence, first_index, num_blocks = self._fence, run.first_index, run.num_blocks
        if room is None:
            num_bytes = num_blocks * self._store.layout.block_bytes
            if len(self._scratch) < num_bytes:
                self._scratch = bytearray(num_bytes)
            payload = memoryview(self._scratch)[:num_bytes]
            self._store.read_blocks_into(run.block_ids, payload)
            return (*encode_frame(fence, first_index, num_blocks, payload), False)
        if isinstance(room.memory, DeviceSpan):
            digest = await room.memory.put(run.block_ids, payload_seed(fence.ticket_id))
            num_bytes = len(room.memory)
            frame = encode_device_frame(fence, first_index, num_blocks, num_bytes, digest, room.place)
            return frame, digest, True
        self._store.read_blocks_into(run.block_ids, room.memory)
        frame, checksum = encode_staged_frame(fence, first_index, num_blocks, room.memory, room.place)
        return frame, checksum, False

    async def _read_acks(self, stream: PushStream) -> None:
        async for data in stream.acks():
            ack = decode_ack(data)
            if ack.error is not None:
                raise _Refused(ack.error)
            self._num_in_flight -= 1
            if self._queue.acknowledge(ack.first_index, ack.num_blocks):
                self._heard_at = self._clock.now()
                self._count_time()
                self._backoff_s = self._config.reconnect_min_s
                self._wake.set()
        raise WorkerLost("decode ended the push")

    def _count_time(self) -> None:
        """Something was added or acknowledged."""
        now = self._clock.now()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if self._is_running and not self._queue.is_empty else None

    async def _back_off(self) -> None:
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, self._config.reconnect_max_s)
