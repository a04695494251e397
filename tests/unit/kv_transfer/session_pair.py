"""A sender and decode's end with a transport between them that a test can trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.handoff import HandoffTicket
from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.session import SendSession
from tests.unit.kv_transfer.doubles import (
    LAYOUT,
    PREFILL,
    ByteStore,
    DecodeEnd,
    LoopClock,
    TroubledTransport,
)

CONFIG = BridgeConfig(frame_bytes=2 * LAYOUT.block_bytes, max_bytes_in_flight=6 * LAYOUT.block_bytes)


@dataclass
class Pair:
    decode: DecodeEnd
    sender: Sender
    store: ByteStore
    transport: TroubledTransport
    registry: CollectorRegistry

    def open(self, ticket: HandoffTicket, left_s: float = 60.0) -> SendSession:
        return self.sender.open(ticket, Deadline.after(left_s, LoopClock()))

    def arrived(self, ticket: HandoffTicket, indexes: Sequence[int]) -> bool:
        port = self.decode.port
        return all(port.block(ticket.ticket_id, index) == self.store.block(index) for index in indexes)

    def failures(self, code: str) -> float:
        labels = {"side": "sender", "code": code}
        return self.registry.get_sample_value("baton_kv_transfer_failures_total", labels) or 0.0


@asynccontextmanager
async def pair(held: Sequence[int] = (), config: BridgeConfig = CONFIG) -> AsyncIterator[Pair]:
    decode, registry, store = DecodeEnd(held=held), CollectorRegistry(), ByteStore(64, seed=9)
    transport = TroubledTransport(decode.directory.connect(decode.ref))
    sender = Sender(store, PREFILL, lambda ref: transport, LoopClock(), TransferMetrics(registry), config)
    try:
        yield Pair(decode, sender, store, transport, registry)
    finally:
        await sender.close()
        await decode.receiver.close()
    assert transport.is_closed or transport.num_offers == 0
    assert sender.num_sessions == 0


def now() -> float:
    return asyncio.get_running_loop().time()
