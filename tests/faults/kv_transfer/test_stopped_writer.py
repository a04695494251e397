"""A prefill process that is killed or stopped while it writes: its late writes reach nobody else's block, and
it leaves nothing behind; the same for each way on which payloads lie in memory of the pair. The processes are
real; the device is memory of the host.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.errors import TicketExpired
from kv_transfer.config import ReceiverConfig
from kv_transfer.transport import CUDA_IPC, DISTRIBUTED, SHM
from tests.faults.kv_transfer.writers import (
    BLOCK,
    NUM_BLOCKS,
    arrived,
    blocks_of,
    halted,
    next_offer,
    quick_way,
    write_late,
    writer,
)
from tests.integration.kv_transfer.ends import LAYOUT, DecodeEnd, decode_end
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, until

SIZE = NUM_BLOCKS * BLOCK
"""Of a pair's memory."""
# in its first frame, and in its third, when two have arrived; of a group when decode waits for it
MOMENTS = [(way, at, "filling") for way in (SHM, CUDA_IPC) for at in (1, 3)] + [(DISTRIBUTED, 3, "sending")]
PATIENT = ReceiverConfig(group_s=60.0)


def port() -> StorePort:
    return StorePort(ByteStore(NUM_BLOCKS, LAYOUT), NUM_BLOCKS)


def staged_bytes(decode: DecodeEnd, way: str) -> float:
    """What decode has set aside for writers, by its gauge, which must be what the area itself says."""
    assert decode.acceptor is not None
    assert decode.groups is not None
    counted: dict[str, tuple[Callable[[], float], int]] = {
        SHM: (decode.staging_bytes, decode.acceptor.num_bytes),
        CUDA_IPC: (decode.device_staging_bytes, decode.device_acceptor.num_bytes),
        DISTRIBUTED: (decode.group_staging_bytes, decode.groups.num_bytes),
    }
    gauge, own = counted[way]
    assert gauge() == own
    return own


def own_mappings() -> int:
    gc.collect()  # of earlier tests
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:baton-staging") + maps.count("memfd:baton-device")


def own_descriptors() -> int:
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("memfd:baton" in name for name in names)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Neither a mapping nor a descriptor nor a name."""

    def shared_files() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "baton" in name or "memfd" in name}

    files = shared_files()
    yield
    assert (own_mappings(), own_descriptors()) == (0, 0)
    assert shared_files() == files


# ---------------------------------------------------------------- a stopped writer that goes on later


@pytest.mark.parametrize(
    ("way", "halts_in"), [(SHM, "filling"), (CUDA_IPC, "filling"), (DISTRIBUTED, "sending")]
)
@pytest.mark.usefixtures("nothing_is_left")
async def test_a_writer_that_goes_on_after_its_blocks_were_given_to_another_does_not_touch_them(
    way: str, halts_in: str
) -> None:
    async with decode_end(port(), PATIENT) as decode:
        found = await write_late(decode, way, halts_in)
        assert found.before == blocks_of(2)
        assert found.after == blocks_of(2)
        assert found.first_code == TicketExpired.code
        assert len(decode.port.committed) == 1
        assert decode.received_bytes(quick_way(way)) == SIZE
        await until(lambda: staged_bytes(decode, way) == 0)
        assert own_mappings() == 0, "the refused ticket still refers to the memory"


@pytest.mark.parametrize("way", [SHM, CUDA_IPC])
@pytest.mark.usefixtures("nothing_is_left")
async def test_the_memory_of_a_stopped_writer_is_kept_for_it_until_it_is_gone(way: str) -> None:
    async with decode_end(port(), PATIENT) as decode:
        async with writer(decode, seed=1, halts_at=1, way=way) as first:
            assert (await first.event())["event"] == "halted"
            first_id = await next_offer(decode, 1)
            os.kill(first.pid, signal.SIGSTOP)
            decode.port.expire(first_id)
            async with writer(decode, seed=2, halts_at=1, way=way) as second:
                assert (await second.event())["event"] == "halted"
                assert staged_bytes(decode, way) == 2 * SIZE, "each has its own"
                second.go_on()
                assert await second.end() == "committed"
            await until(lambda: staged_bytes(decode, way) == SIZE)
            await asyncio.sleep(0.2)
            assert staged_bytes(decode, way) == SIZE
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: staged_bytes(decode, way) == 0)
        assert own_mappings() == 0


async def test_a_group_whose_writer_stops_while_decode_waits_for_it_is_given_up_in_bounded_time() -> None:
    """Nothing else waits for it, and its memory is kept until the group is destroyed."""
    async with decode_end(port(), ReceiverConfig(group_s=5.0)) as decode:
        async with writer(decode, seed=1, halts_at=1, way=DISTRIBUTED, halts_in="sending") as first:
            await halted(decode, first, DISTRIBUTED)
            first_id = await next_offer(decode, 1)
            os.kill(first.pid, signal.SIGSTOP)
            decode.port.expire(first_id)
            assert staged_bytes(decode, DISTRIBUTED) == SIZE
            await until(lambda: staged_bytes(decode, DISTRIBUTED) == 0, 20)
        assert first_id not in decode.port.committed


# ---------------------------------------------------------------- a killed writer


@pytest.mark.parametrize(("way", "halts_at", "halts_in"), MOMENTS)
@pytest.mark.usefixtures("nothing_is_left")
async def test_a_writer_killed_in_mid_push_leaves_nothing_behind_and_the_next_one_is_served(
    way: str, halts_at: int, halts_in: str
) -> None:
    async with decode_end(port(), PATIENT) as decode:
        async with writer(
            decode, seed=1, halts_at=halts_at, num_frames=4, way=way, halts_in=halts_in
        ) as first:
            await halted(decode, first, way)
            await until(lambda: len(decode.port.writes) == halts_at - 1, 30)
            assert first.traces() == set()
            assert own_mappings() == (way != DISTRIBUTED)
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: staged_bytes(decode, way) == 0)
        first_id = decode.port.offers[0]
        decode.port.expire(first_id)
        assert own_mappings() == 0
        async with writer(decode, seed=2, way=quick_way(way)) as second:
            assert await second.end() == "committed"
        assert arrived(decode, decode.port.offers[1]) == blocks_of(2)
        assert first_id not in decode.port.committed
