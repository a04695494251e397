"""One bit that flips on the way, in a frame or in staged memory, ends the ticket."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.errors import TransferCorrupt
from core.ids import TicketId
from kv_transfer.codec import HEADER_BYTES
from kv_transfer.config import BridgeConfig
from kv_transfer.device_thread import DeviceSpan
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.transport import Room, Transport
from tests.integration.kv_transfer.bridge import bridge
from tests.integration.kv_transfer.ends import CLOCK, LAYOUT, WAYS, connect_any_way
from tests.integration.kv_transfer.host_device import HostRegion
from tests.unit.kv_transfer.doubles import failure_of


class Corrupting:
    """A connection that flips one bit of the frame that the test chooses; of its payload where the position
    lies behind the header, wherever the payload is.
    """

    def __init__(self, inner: Transport, frame_number: int, position: int) -> None:
        self.frame_number, self.position = frame_number, position
        self.num_sent = 0
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_push(self) -> Any:
        push = await self._inner.open_push()
        send, find_room = push.send, push.room
        room: Room | None = None

        async def remember_room(ticket_id: TicketId, num_bytes: int) -> Room | None:
            nonlocal room
            room = await find_room(ticket_id, num_bytes)
            return room

        async def send_corrupted(frame: bytes) -> None:
            if self.num_sent == self.frame_number:
                if room is None or 0 <= self.position < HEADER_BYTES:
                    damaged = bytearray(frame)
                    damaged[self.position] ^= 1
                    frame = bytes(damaged)
                else:
                    position = self.position - HEADER_BYTES if self.position > 0 else self.position
                    flip(room, position)
            self.num_sent += 1
            await send(frame)

        push.send, push.room = send_corrupted, remember_room  # type: ignore[method-assign]
        return push


def flip(room: Room, position: int) -> None:
    """One bit of what lies in staging memory."""
    memory = room.memory
    if isinstance(memory, DeviceSpan):
        assert isinstance(memory.region, HostRegion)
        memory.region.view[memory.offset + position % len(memory)] ^= 1
    else:
        memory[position] ^= 1


@pytest.mark.parametrize("position", [0, 20, 40, 60, 71, 72, 72 + 16384 - 1, -1])
@pytest.mark.parametrize("frame_number", [0, 2])
async def test_one_flipped_bit_anywhere_in_a_frame_ends_the_ticket_and_is_never_committed(
    way: str, position: int, frame_number: int
) -> None:
    config = BridgeConfig(
        frame_bytes=2 * LAYOUT.block_bytes,
        staged_frame_bytes=2 * LAYOUT.block_bytes,
        device_frame_bytes=2 * LAYOUT.block_bytes,
        group_frame_bytes=2 * LAYOUT.block_bytes,
        **WAYS[way],
    )
    async with bridge(way) as ends:
        connect = connect_any_way(config, ends.prefill_end.device)
        sender = Sender(
            ends.store,
            ends.prefill,
            lambda ref: Corrupting(connect(ref), frame_number, position),
            CLOCK,
            TransferMetrics(CollectorRegistry()),
            config,
        )
        ticket = ends.ticket(160)
        session = sender.open(ticket, Deadline.after(10, CLOCK))
        session.add_blocks(0, range(10))
        error = await failure_of(session.finish(ticket.num_tokens))
        assert isinstance(error, TransferCorrupt)
        await sender.close()
        assert ticket.ticket_id in ends.port.aborted
        assert ticket.ticket_id not in ends.port.tables
        assert ends.port.committed == {}
        assert ends.counted("baton_kv_transfer_failures_total", side="receiver", code="transfer_corrupt") == 1
