"""A prefill process that is killed or stopped while it copies to decode's device: its late copies reach
nobody else's block, its memory is not freed under it. The device is memory of the host, the processes are
real.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from core.errors import TicketExpired
from kv_transfer.transport import CUDA_IPC
from tests.faults.kv_transfer.writers import (
    BLOCK,
    NUM_BLOCKS,
    arrived,
    blocks_of,
    next_offer,
    write_late,
    writer,
)
from tests.integration.kv_transfer.ends import LAYOUT, decode_end
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, until


def port() -> StorePort:
    return StorePort(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)


def own_regions() -> int:
    gc.collect()  # of earlier tests
    return Path("/proc/self/maps").read_text().count("memfd:baton-device")


async def test_a_device_writer_that_goes_on_after_its_blocks_were_given_away_does_not_touch_them() -> None:
    async with decode_end(port()) as decode:
        found = await write_late(decode, CUDA_IPC)
        assert found.before == blocks_of(2)
        assert found.after == blocks_of(2)
        assert found.first_code == TicketExpired.code
        assert len(decode.port.committed) == 1
        assert decode.received_bytes(CUDA_IPC) == NUM_BLOCKS * BLOCK
        await until(lambda: decode.device_staging_bytes() == 0)
        assert own_regions() == 0


async def test_the_device_memory_of_a_stopped_writer_is_kept_for_it_until_it_is_gone() -> None:
    async with decode_end(port()) as decode:
        acceptor, size = decode.device_acceptor, NUM_BLOCKS * BLOCK
        async with writer(decode, seed=1, halts_at=1, way=CUDA_IPC) as first:
            assert (await first.event())["event"] == "halted"
            first_id = await next_offer(decode, 1)
            os.kill(first.pid, signal.SIGSTOP)
            decode.port.expire(first_id)
            async with writer(decode, seed=2, halts_at=1, way=CUDA_IPC) as second:
                assert (await second.event())["event"] == "halted"
                assert acceptor.num_bytes == 2 * size, "each has its own"
                second.go_on()
                assert await second.end() == "committed"
            await until(lambda: acceptor.num_bytes == size)
            await asyncio.sleep(0.2)
            assert acceptor.num_bytes == size
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: acceptor.num_bytes == 0)
        assert own_regions() == 0


@pytest.mark.parametrize("halts_at", [1, 3])
async def test_a_device_writer_killed_in_mid_copy_leaves_nothing_behind_and_the_next_one_is_served(
    halts_at: int,
) -> None:
    """In its first frame, and in its third, when two have arrived."""
    async with decode_end(port()) as decode:
        acceptor = decode.device_acceptor
        async with writer(decode, seed=1, halts_at=halts_at, num_frames=4, way=CUDA_IPC) as first:
            assert (await first.event())["event"] == "halted"
            await until(lambda: len(decode.port.writes) == halts_at - 1, 30)
            assert own_regions() == 1
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: acceptor.num_bytes == 0)
        first_id = decode.port.offers[0]
        decode.port.expire(first_id)
        assert (own_regions(), decode.device_staging_bytes()) == (0, 0)
        async with writer(decode, seed=2, way=CUDA_IPC) as second:
            assert await second.end() == "committed"
        assert arrived(decode, decode.port.offers[1]) == blocks_of(2)
        assert first_id not in decode.port.committed
