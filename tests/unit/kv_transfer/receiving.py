"""Frames, offers and pushes to a receiver."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from core.handoff import HandoffTicket
from kv_transfer.codec import Ack, decode_ack, encode_frame
from kv_transfer.transport import Fence
from tests.unit.kv_transfer.doubles import (
    ByteStore,
    DecodeEnd,
)

SOURCE = ByteStore(64, seed=3)


def frame_of(
    ticket: HandoffTicket, first_index: int, num_blocks: int, fence: Fence | None = None
) -> tuple[bytes, int]:
    payload = SOURCE.read_blocks(range(first_index, first_index + num_blocks))
    return encode_frame(fence or Fence.of(ticket), first_index, num_blocks, payload)


async def iterate(frames: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for frame in frames:
        yield frame


async def push(end: DecodeEnd, *frames: bytes) -> list[Ack]:
    acks: list[Ack] = []

    async def send_ack(data: bytes) -> None:
        acks.append(decode_ack(data))

    async with aclosing(iterate(frames)) as incoming:
        await end.receiver.push(incoming, send_ack, "loopback")
    return acks


async def offer(end: DecodeEnd, ticket: HandoffTicket) -> tuple[int, ...]:
    return await end.receiver.offer(ticket, 10.0, ticket.decode.epoch)
