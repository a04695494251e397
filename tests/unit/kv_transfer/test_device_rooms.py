"""Blocks of another size never go through memory of a device, which copies those of the pool as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from core.block_hash import BlockHash
from core.clock import Deadline
from core.handoff import HandoffTicket
from core.ids import TicketId
from core.kv_layout import KVLayout
from kv_transfer.config import BridgeConfig
from kv_transfer.device_memory import DeviceCopy
from kv_transfer.device_thread import CallThread, DeviceSpan
from kv_transfer.metrics import TransferMetrics
from kv_transfer.reblocking import Reblocking
from kv_transfer.sender import Sender
from kv_transfer.shm_transport import ShmTransport
from kv_transfer.staged_transport import Underlying
from kv_transfer.transport import Carriage, OfferedStaging, Pair, Place, PushStream, Room
from tests.unit.kv_transfer.doubles import (
    LAYOUT,
    PREFILL,
    ByteStore,
    DecodeEnd,
    LoopClock,
    TroubledTransport,
    in_virtual_time,
    make_ticket,
)

OTHER = replace(LAYOUT, block_size=2 * LAYOUT.block_size)


class Device:
    """A DeviceRegion that nothing may be put into."""

    num_bytes = 1 << 20
    handle = b""

    def put(self, offset: int, block_ids: Sequence[int], seed: int) -> int:
        raise AssertionError(f"blocks {block_ids} of the pool were copied, which are not the ticket's")

    def take(self, offset: int, num_bytes: int, seed: int) -> DeviceCopy:
        raise AssertionError("nothing was put")

    def read(self, offset: int, num_bytes: int) -> bytes:
        raise AssertionError("nothing was put")

    def write(self, offset: int, data: bytes) -> None:
        raise AssertionError("nothing is written")

    def close(self) -> None:
        """Nothing to free."""


class LateDevice(TroubledTransport):
    """Has memory of a device from the second room of a stream on, unlike when the offer was answered."""

    num_rooms = 0

    async def open_push(self) -> PushStream:
        return _DevicePush(self, await super().open_push())


class _DevicePush:
    def __init__(self, transport: LateDevice, inner: PushStream) -> None:
        self._transport = transport
        self._inner = inner

    async def room(self, ticket_id: TicketId, num_bytes: int) -> Room | None:
        self._transport.num_rooms += 1
        if self._transport.num_rooms == 1:
            return await self._inner.room(ticket_id, num_bytes)
        span = DeviceSpan(CallThread("device"), Device(), 0, num_bytes, lambda: None)
        return Room(span, Place(1, 0))

    async def send(self, frame: bytes) -> None:
        await self._inner.send(frame)

    def acks(self) -> AsyncIterator[bytes]:
        return self._inner.acks()

    async def close(self) -> None:
        await self._inner.close()


def names(layout: KVLayout) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([layout.block_size, index]) + bytes(14)) for index in range(20))


@in_virtual_time
async def test_a_ticket_of_another_block_size_travels_in_frames_when_a_device_turns_up_later() -> None:
    decode, store = DecodeEnd(), ByteStore(16, OTHER, seed=3)
    transport = LateDevice(decode.directory.connect(decode.ref))
    config = BridgeConfig(frame_bytes=2 * LAYOUT.block_bytes)
    metrics = TransferMetrics(CollectorRegistry())
    sender = Sender(store, PREFILL, lambda ref: transport, LoopClock(), metrics, config)
    ticket = make_ticket(80, layout=OTHER)
    session = sender.open(ticket, Deadline.after(20.0, LoopClock()), names)
    session.add_blocks(0, range(10))
    await session.finish(80)
    expected = Reblocking(store, LAYOUT, 80)
    expected.add(0, range(10))
    arrived = b"".join(decode.port.block(ticket.ticket_id, index) for index in range(20))
    assert arrived == expected.read_blocks(range(20))
    assert transport.num_rooms == 2, "it is not asked again"
    await sender.close()
    await decode.receiver.close()


class _OnDevice(TroubledTransport):
    """Stands for a group between devices."""

    carriage = Carriage("distributed", 1 << 20, is_on_device=True)

    async def offer_and_ask(
        self, ticket: HandoffTicket, time_left_s: float
    ) -> tuple[tuple[int, ...], OfferedStaging]:
        return await self.offer(ticket, time_left_s), OfferedStaging()

    async def ask(self, pair: Pair) -> OfferedStaging:
        return OfferedStaging()

    async def prepare(self, pair: Pair, offered: OfferedStaging) -> None:
        """Nothing to attach."""


@in_virtual_time
async def test_a_way_that_stands_on_one_between_devices_says_that_payloads_stay_there() -> None:
    inner: Underlying = _OnDevice(DecodeEnd().directory.connect(PREFILL))
    carriage = ShmTransport(inner, BridgeConfig()).carriage
    assert (carriage.way, carriage.is_on_device) == ("distributed", True)
