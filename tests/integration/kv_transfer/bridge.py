"""Both ends of one bridge, and frames that are pushed past its sender."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from core.errors import ServingError
from core.handoff import HandoffTicket
from core.ids import WorkerRef
from core.kv_layout import KVLayout
from kv_transfer.codec import (
    decode_ack,
    encode_device_frame,
    encode_frame,
    encode_staged_frame,
    payload_checksum,
    payload_seed,
)
from kv_transfer.config import BridgeConfig
from kv_transfer.device_thread import DeviceSpan
from kv_transfer.transport import Fence, Transport
from tests.integration.kv_transfer.ends import (
    LAYOUT,
    WAYS,
    DecodeEnd,
    PrefillEnd,
    decode_end,
    no_task_is_left,
)
from tests.unit.kv_transfer.doubles import ByteStore, StorePort


@dataclass
class Bridge:
    """Both ends."""

    way: str
    prefill_end: PrefillEnd
    decode_end: DecodeEnd

    def __post_init__(self) -> None:
        self.prefill, self.decode = self.prefill_end.ref, self.decode_end.ref
        self.store, self.port = self.prefill_end.store, self.decode_end.port
        self.server, self.counted = self.decode_end.server, self.decode_end.counted
        self.ticket, self.open = self.prefill_end.ticket, self.prefill_end.open

    def connect(self, ref: WorkerRef | None = None) -> Transport:
        """A connection of its own, beside the sender's."""
        return self.prefill_end.connect(ref or self.decode)

    def received_bytes(self) -> float:
        return self.decode_end.received_bytes(self.way)


@asynccontextmanager
async def bridge(
    way: str,
    num_blocks: int = 256,
    layout: KVLayout = LAYOUT,
    held: tuple[int, ...] = (),
    config: BridgeConfig | None = None,
) -> AsyncIterator[Bridge]:
    config = replace(config or BridgeConfig(), **WAYS[way])
    async with decode_end(StorePort(ByteStore(num_blocks, layout), num_blocks, held)) as decode:
        prefill = PrefillEnd(decode.ref, config, ByteStore(num_blocks, layout, seed=1))
        try:
            yield Bridge(way, prefill, decode)
        finally:
            await prefill.sender.close()
    await no_task_is_left()


def blocks_of(ends: Bridge, ticket: HandoffTicket, indexes: range) -> bool:
    """Whether the blocks at decode equal those at prefill, whose block ids are the indexes here."""
    return all(ends.port.block(ticket.ticket_id, i) == ends.store.block(i) for i in indexes)


@dataclass(frozen=True)
class Run:
    """Blocks to push; block ids at prefill are the indexes in the ticket here."""

    fence: Fence
    first_index: int
    num_blocks: int


async def push_runs(ends: Bridge, transport: Transport, runs: list[Run]) -> list[ServingError | None]:
    """Errors of the acknowledgements, None for written, until the stream ends or all are acknowledged."""
    push = await transport.open_push()
    for run in runs:
        ids = range(run.first_index, run.first_index + run.num_blocks)
        room = await push.room(run.fence.ticket_id, run.num_blocks * LAYOUT.block_bytes)
        assert (room is not None) == (ends.way != "grpc")
        if room is None:
            frame, _ = encode_frame(*place_of(run), ends.store.read_blocks(ids))
        elif isinstance(room.memory, DeviceSpan):
            digest = await room.memory.put(ids, payload_seed(run.fence.ticket_id))
            frame = encode_device_frame(*place_of(run), len(room.memory), digest, room.place)
        else:
            ends.store.read_blocks_into(ids, room.memory)
            frame, _ = encode_staged_frame(*place_of(run), room.memory, room.place)
        await push.send(frame)
    found: list[ServingError | None] = []
    async for data in push.acks():
        found.append(decode_ack(data).error)
        if len(found) == len(runs):
            break
    await push.close()
    return found


def place_of(run: Run) -> tuple[Fence, int, int]:
    return run.fence, run.first_index, run.num_blocks


def checksum_of(ends: Bridge, run: Run) -> int:
    ids = range(run.first_index, run.first_index + run.num_blocks)
    return payload_checksum(run.fence.ticket_id, ends.store.read_blocks(ids))
