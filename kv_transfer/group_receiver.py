"""GroupReceiver: decode's end of one process group: receives what prefill announces, in its order.

Owns the thread on which that blocks, and which payload lies in which part of the memory. A payload is found
by its number, until prefill announces another one for the same part. Lives on the IO loop, receives on its
thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from core.errors import TransferCorrupt
from kv_transfer.device_thread import CallThread, DeviceSpan
from kv_transfer.group_attachment import GroupLimits, form_proven
from kv_transfer.group_messages import GroupLine
from kv_transfer.key_exchange import KeyExchange
from kv_transfer.pair_group import DECODE_RANK, Groups, PairGroup
from kv_transfer.shm_handshake import Fallback, NotAttached
from protos import kv_transfer_pb2 as pb

_log = logging.getLogger(__name__)


class _Payload:
    """A part of the memory, and whether what was announced for it has come."""

    def __init__(self, offset: int, num_bytes: int, arriving: asyncio.Future[None]) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.arriving = arriving


class GroupReceiver:
    """`broken` is set when the group cannot be formed, or breaks; `on_freed` is called when its memory is."""

    def __init__(self, num_bytes: int, line: GroupLine, on_freed: Callable[[], None]) -> None:
        self._num_bytes = num_bytes
        self._loop = asyncio.get_running_loop()
        self._thread, self._copies = CallThread("group receives"), CallThread("group copies")
        self._keys = KeyExchange(line.tell_key)
        self._on_freed = on_freed
        self._group: PairGroup | None = None
        self._payloads: dict[int, _Payload] = {}  # by number
        self._numbers: dict[int, int] = {}  # of the last payload at an offset
        self._last = 0  # the highest number that was announced
        self._announced = asyncio.Event()
        self._has_ended = False  # read on the thread
        self.broken: asyncio.Future[None] = self._loop.create_future()

    @property
    def num_awaited(self) -> int:
        """Payloads that were announced and have not come."""
        return sum(not payload.arriving.done() for payload in self._payloads.values())

    def form(self, groups: Groups, limits: GroupLimits, nonces: tuple[bytes, bytes]) -> None:
        """In the background; what is announced meanwhile waits for it."""
        forming = self._thread.post(
            form_proven, groups, DECODE_RANK, self._keys, self._num_bytes, limits, nonces
        )
        forming.add_done_callback(self._keep)

    def hear(self, message: pb.GroupMessage) -> None:
        """A key or a payload. Raises NotAttached for what cannot be."""
        kind = message.WhichOneof("kind")
        if kind == "key":
            self._keys.hear(message.key.key, message.key.value)
        elif kind == "payload":
            self._expect(message.payload)
        else:
            raise NotAttached(Fallback.BROKEN, f"a message of another protocol: {kind}")

    async def arrival(self, number: int, num_bytes: int) -> memoryview | DeviceSpan | None:
        """The payload of that number, when it has come; None when it never will, or lies here no more."""
        while number > self._last and not self.broken.done():
            self._announced.clear()
            await self._announced.wait()
        payload = self._payloads.get(number)
        if payload is None:
            return None
        await asyncio.wait((payload.arriving,))
        group = self._group
        if payload.arriving.cancelled() or group is None or self._payloads.get(number) is not payload:
            return None
        if num_bytes != payload.num_bytes:
            raise TransferCorrupt(f"a frame of {num_bytes} bytes names a payload of {payload.num_bytes}")
        slots, end = group.slots, payload.offset + num_bytes
        if isinstance(slots, memoryview):
            return slots[payload.offset : end]
        return DeviceSpan(self._copies, slots, payload.offset, num_bytes, self._break)

    def close(self) -> None:
        """Nothing is found any more; the group is destroyed after the call under way."""
        self._break()
        self._keys.end()
        self._thread.post(self._destroy)
        self._thread.close()
        self._copies.close()

    # ------------------------------------------------------------ inside

    def _expect(self, payload: pb.GroupPayload) -> None:
        number, offset, num_bytes = payload.number, payload.offset, payload.num_bytes
        if num_bytes < 1 or offset + num_bytes > self._num_bytes or number in self._payloads:
            raise NotAttached(Fallback.BROKEN, f"payload {number} lies outside the memory, or is known")
        if (old := self._numbers.pop(offset, None)) is not None:
            del self._payloads[old]
        self._numbers[offset] = number
        entry = self._payloads[number] = _Payload(offset, num_bytes, self._loop.create_future())
        self._last = max(self._last, number)
        self._announced.set()
        receiving = self._thread.post(self._receive, offset, num_bytes)
        receiving.add_done_callback(lambda done: self._call(lambda: self._arrived(entry, done)))

    def _receive(self, offset: int, num_bytes: int) -> None:
        if self._group is None or self._has_ended:
            raise OSError("there is no group")  # each call that waits for nothing would take its full time
        self._group.receive(offset, num_bytes)

    def _arrived(self, payload: _Payload, receiving: Future[None]) -> None:
        if receiving.cancelled() or (error := receiving.exception()) is not None:
            if not (receiving.cancelled() or self._has_ended):
                _log.warning("a payload did not come through its group: %r", error)
            self._break()
        elif not payload.arriving.done():
            payload.arriving.set_result(None)

    def _keep(self, forming: Future[PairGroup]) -> None:
        """On the thread, before anything else happens there."""
        if (error := forming.exception()) is not None:
            _log.warning("a group could not be formed: %r", error)
            self._call(self._break)
        else:
            self._group = forming.result()

    def _break(self) -> None:
        self._has_ended = True
        if not self.broken.done():
            self.broken.set_result(None)
        for payload in self._payloads.values():
            payload.arriving.cancel()
        self._announced.set()

    def _destroy(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._call(self._on_freed)

    def _call(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever would hear of it
            self._loop.call_soon_threadsafe(call)
