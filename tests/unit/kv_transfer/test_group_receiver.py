"""A group that breaks gives its memory back at once, however much was still announced."""

from __future__ import annotations

import asyncio
import threading

from kv_transfer.group_attachment import GroupLimits
from kv_transfer.group_messages import GroupLine
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.key_exchange import KeyExchange
from protos import kv_transfer_pb2 as pb
from tests.unit.kv_transfer.doubles import in_virtual_time

NONCES = (b"d" * 16, b"p" * 16)
NUM_BYTES = 64


class StoppedPeer:
    """Groups and group in one: its other end takes part, and then gives nothing until it is given up."""

    backend = "gloo"

    def __init__(self) -> None:
        self.slots = memoryview(bytearray(NUM_BYTES))
        self.is_over = threading.Event()
        self.received: list[int] = []
        self.num_closed = 0

    def form(self, rank: int, keys: KeyExchange, num_bytes: int, attach_s: float, op_s: float) -> StoppedPeer:
        return self

    def swap(self, mine: bytes) -> bytes:
        return NONCES[1]

    def send(self, offset: int, num_bytes: int) -> None:
        raise AssertionError("decode sends nothing")

    def receive(self, offset: int, num_bytes: int) -> None:
        self.received.append(offset)
        self.is_over.wait(30)
        raise RuntimeError("the other end gave nothing")

    def close(self) -> None:
        self.num_closed += 1


async def nowhere(message: bytes) -> None:
    """Nobody listens."""


@in_virtual_time
async def test_payloads_behind_one_that_does_not_come_are_not_waited_for_one_by_one() -> None:
    peer, freed = StoppedPeer(), asyncio.Event()
    line = GroupLine(nowhere)
    receiver = GroupReceiver(NUM_BYTES, line, freed.set)
    receiver.form(peer, GroupLimits(1.0, 5.0), NONCES)
    for number in (1, 2, 3):
        payload = pb.GroupPayload(number=number, offset=16 * number, num_bytes=16)
        receiver.hear(pb.GroupMessage(payload=payload))
    arriving = asyncio.create_task(receiver.arrival(3, 16))
    await asyncio.sleep(0)
    receiver.close()
    assert await arriving is None
    peer.is_over.set()
    await freed.wait()
    assert len(peer.received) <= 1, "the one under way"
    assert peer.num_closed == 1
    line.close()
