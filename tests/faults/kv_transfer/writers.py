"""Prefill processes that write on command, and what they write: for tests that stop and kill them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.ids import TicketId
from kv_transfer.transport import DISTRIBUTED, SHM
from tests.integration.kv_transfer.ends import LAYOUT, DecodeEnd
from tests.unit.kv_transfer.doubles import ByteStore, until

ROOT = Path(__file__).parents[3]
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 8
"""Of the pool, and of each ticket: the second one reuses the blocks of the first, all of them."""


class Writer:
    """A writer's child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    async def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 120)
        assert line, "the writer has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def end(self) -> str:
        """How its session ended."""
        while (event := await self.event())["event"] != "ended":
            pass
        await asyncio.wait_for(self.process.wait(), 10)
        return str(event["code"])

    def traces(self) -> set[str]:
        """What it has open or mapped that has a name in a file system for temporary things."""
        names = {
            line.split(maxsplit=5)[-1] for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        }
        names |= {os.readlink(entry) for entry in Path(f"/proc/{self.pid}/fd").iterdir()}
        places = ("/dev/shm", "/tmp", "/var/tmp", "/run")
        return {name for name in names if name.startswith(places) and not name.endswith(" (deleted)")}


@asynccontextmanager
async def writer(
    decode: DecodeEnd,
    seed: int,
    halts_at: int = 0,
    num_frames: int = 1,
    way: str = SHM,
    halts_in: str = "filling",
) -> AsyncIterator[Writer]:
    """Frames of a memory with `num_frames` slots, which together are one ticket. `halts_in`: `filling` a
    slot, or `sending` it through the group.
    """
    spec = {
        "epoch": decode.ref.epoch,
        "address": decode.ref.address,
        "seed": seed,
        "way": way,
        "num_blocks": NUM_BLOCKS,
        "halts_at": halts_at,
        "halts_in": halts_in,
        "frame_bytes": NUM_BLOCKS * BLOCK // num_frames,
        "staging_bytes": NUM_BLOCKS * BLOCK,
    }
    command = [sys.executable, "-m", "tests.faults.kv_transfer.writer_process", json.dumps(spec)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        yield Writer(process)
    finally:
        if process.returncode is None:
            process.kill()  # a stopped process, too
        await process.wait()


def blocks_of(seed: int) -> list[bytes]:
    store = ByteStore(NUM_BLOCKS, LAYOUT, seed=seed)
    return [store.block(index) for index in range(NUM_BLOCKS)]


def arrived(decode: DecodeEnd, ticket_id: TicketId) -> list[bytes]:
    return [decode.port.block(ticket_id, index) for index in range(NUM_BLOCKS)]


async def next_offer(decode: DecodeEnd, number: int) -> TicketId:
    await until(lambda: len(decode.port.tables) > 0 and len(decode.port.offers) >= number, 30)
    return decode.port.offers[number - 1]


@dataclass
class LateWrite:
    """What the second ticket's blocks were before and after the first writer went on."""

    before: list[bytes]
    after: list[bytes]
    first_code: str


def quick_way(way: str) -> str:
    """How another writer may send beside it: one that forms groups imports torch, which takes seconds."""
    return SHM if way == DISTRIBUTED else way


async def halted(decode: DecodeEnd, first: Writer, way: str) -> None:
    """The writer has halted; of a group, decode waits for what it has announced."""
    assert (await first.event())["event"] == "halted"
    if way == DISTRIBUTED:
        groups = decode.groups
        assert groups is not None
        await until(lambda: groups.num_awaited > 0, 30)


async def write_late(decode: DecodeEnd, way: str = SHM, halts_in: str = "filling") -> LateWrite:
    """A writer is stopped in the middle of a slot; its ticket expires; another's blocks are the same ones; it
    goes on.
    """
    async with writer(decode, seed=1, halts_at=1, way=way, halts_in=halts_in) as first:
        await halted(decode, first, way)
        first_id = await next_offer(decode, 1)
        os.kill(first.pid, signal.SIGSTOP)
        reused = set(decode.port.tables[first_id])
        decode.port.expire(first_id)  # its silence has lasted too long
        async with writer(decode, seed=2, way=quick_way(way)) as second:
            assert await second.end() == "committed"
        second_id = decode.port.offers[1]
        assert set(decode.port.tables[second_id]) == reused
        before = arrived(decode, second_id)
        first.go_on()
        os.kill(first.pid, signal.SIGCONT)
        assert (await first.event())["event"] == "went on"
        code = await first.end()
        return LateWrite(before, arrived(decode, second_id), code)
