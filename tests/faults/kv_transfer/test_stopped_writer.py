"""A prefill process that is killed or stopped while it writes: its late writes reach nobody else's block, and
it leaves nothing behind. The same faults are shown to do damage where a writer's memory is not its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from core.errors import TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import TicketId
from kv_transfer.shm_memory import StagingMemory, create_memory
from kv_transfer.transport import SHM, Payload, WriteCheck
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
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, until


def own_mappings() -> int:
    gc.collect()  # of earlier tests
    return Path("/proc/self/maps").read_text().count("memfd:baton-staging")


def own_descriptors() -> int:
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("memfd:baton" in name for name in names)


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "baton" in name or "memfd" in name}


# ---------------------------------------------------------------- a stopped writer that goes on later


async def test_a_writer_that_goes_on_after_its_blocks_were_given_to_another_does_not_touch_them() -> None:
    async with decode_end(StorePort(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)) as decode:
        found = await write_late(decode)
        assert found.before == blocks_of(2)
        assert found.after == blocks_of(2)
        assert found.first_code == TicketExpired.code
        assert len(decode.port.committed) == 1
        assert decode.received_bytes(SHM) == NUM_BLOCKS * BLOCK
        await until(lambda: decode.staging_bytes() == 0)
        assert own_mappings() == 0, "the refused ticket still refers to the memory"


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


async def test_the_memory_of_a_stopped_writer_is_kept_for_it_until_it_is_gone() -> None:
    async with decode_end(StorePort(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)) as decode:
        assert decode.acceptor is not None
        acceptor, size = decode.acceptor, NUM_BLOCKS * BLOCK
        async with writer(decode, seed=1, halts_at=1) as first:
            assert (await first.event())["event"] == "halted"
            first_id = await next_offer(decode, 1)
            os.kill(first.pid, signal.SIGSTOP)
            decode.port.expire(first_id)
            async with writer(decode, seed=2, halts_at=1) as second:
                assert (await second.event())["event"] == "halted"
                assert acceptor.num_bytes == 2 * size, "each has its own"
                assert decode.staging_bytes() == 2 * size
                second.go_on()
                assert await second.end() == "committed"
            await until(lambda: acceptor.num_bytes == size)
            await asyncio.sleep(0.2)
            assert acceptor.num_bytes == size
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: acceptor.num_bytes == 0)
        assert own_mappings() == 0


# ---------------------------------------------------------------- a killed writer


@pytest.mark.parametrize("halts_at", [1, 3])
async def test_a_writer_killed_in_mid_push_leaves_nothing_behind_and_the_next_one_is_served(
    halts_at: int,
) -> None:
    """In its first frame, and in its third, when two have arrived."""
    files = shared_files()
    async with decode_end(StorePort(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)) as decode:
        assert decode.acceptor is not None
        acceptor = decode.acceptor
        async with writer(decode, seed=1, halts_at=halts_at, num_frames=4) as first:
            assert (await first.event())["event"] == "halted"
            await until(lambda: len(decode.port.writes) == halts_at - 1, 30)
            assert first.traces() == set()
            assert own_mappings() == 1
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: acceptor.num_bytes == 0)
        first_id = decode.port.offers[0]
        decode.port.expire(first_id)
        assert (own_mappings(), own_descriptors(), decode.staging_bytes()) == (0, 0, 0)
        assert shared_files() == files
        async with writer(decode, seed=2) as second:
            assert await second.end() == "committed"
        second_id = decode.port.offers[1]
        assert arrived(decode, second_id) == blocks_of(2)
        assert first_id not in decode.port.committed
    assert (own_mappings(), own_descriptors()) == (0, 0)
    assert shared_files() == files
