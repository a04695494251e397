"""What late writes would do where a writer's memory is not its own: the faults of `test_stopped_writer` are
shown to do damage.
"""

from __future__ import annotations

import asyncio
import os
import signal

from core.errors import TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import TicketId
from kv_transfer.shm_memory import StagingMemory, create_memory
from kv_transfer.transport import Payload, WriteCheck
from tests.faults.kv_transfer.writers import (
    BLOCK,
    NUM_BLOCKS,
    arrived,
    blocks_of,
    next_offer,
    write_late,
    writer,
)
from tests.integration.kv_transfer.ends import LAYOUT, DecodeEnd, decode_end
from tests.unit.kv_transfer.doubles import ByteStore, StorePort


class OneSidedPort(StorePort):
    """What must not be: writers reach the pool itself, in the order of the blocks, and nothing is copied."""

    def __init__(self, memory: StagingMemory) -> None:
        super().__init__(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)
        self.store.data = memory.slots  # type: ignore[assignment]

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        held = await super().offer(ticket, time_left_s)
        self.tables[ticket.ticket_id].sort()
        return held

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        assert check is not None
        for block_id in self._table(ticket_id)[first_index : first_index + num_blocks]:
            check.observe(memoryview(self.store.block(block_id)))
        if not check.is_right:
            raise TransferCorrupt("the blocks are not what was sent")


async def test_the_same_writer_without_staging_would_overwrite_them() -> None:
    descriptor = create_memory(NUM_BLOCKS * BLOCK)
    port = OneSidedPort(StagingMemory(descriptor, NUM_BLOCKS * BLOCK, is_writable=False))
    try:
        async with decode_end(port, create=lambda _: os.dup(descriptor)) as decode:
            found = await write_late(decode)
            assert found.before == blocks_of(2), "the second ticket was right when it was committed"
            assert found.after != blocks_of(2), "this test would not notice a late write"
    finally:
        os.close(descriptor)


class GatedPort(StorePort):
    """Its copies wait for `is_open`; `has_waiter` says that one does."""

    def __init__(self) -> None:
        super().__init__(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)
        self.is_open, self.has_waiter = asyncio.Event(), asyncio.Event()

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        self.has_waiter.set()
        await self.is_open.wait()
        await super().write(ticket_id, first_index, num_blocks, payload, check)


async def write_between(decode: DecodeEnd, port: GatedPort) -> str:
    """As `write_late`, but the first writer goes on between the second's frame and its copy; how the second
    ends.
    """
    async with writer(decode, seed=1, halts_at=1) as first:
        assert (await first.event())["event"] == "halted"
        first_id = await next_offer(decode, 1)
        os.kill(first.pid, signal.SIGSTOP)
        port.expire(first_id)
        async with writer(decode, seed=2) as second:
            await asyncio.wait_for(port.has_waiter.wait(), 30)
            first.go_on()
            os.kill(first.pid, signal.SIGCONT)
            assert (await first.event())["event"] == "went on"
            port.is_open.set()
            return await second.end()


async def test_a_late_write_does_not_disturb_a_frame_of_another_writer_that_waits_for_its_copy() -> None:
    port = GatedPort()
    async with decode_end(port) as decode:
        assert await write_between(decode, port) == "committed"
        assert arrived(decode, port.offers[1]) == blocks_of(2)


async def test_the_same_writer_in_memory_that_is_given_to_another_meanwhile_would_disturb_it() -> None:
    descriptor = create_memory(NUM_BLOCKS * BLOCK)
    port = GatedPort()
    try:
        async with decode_end(port, create=lambda _: os.dup(descriptor)) as decode:
            assert await write_between(decode, port) == TransferCorrupt.code
            assert port.committed == {}, "what was disturbed is never served"
    finally:
        os.close(descriptor)
