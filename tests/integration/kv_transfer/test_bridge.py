"""Two asyncio ends over real gRPC on 127.0.0.1, payloads in the frames or in shared memory: what arrives is
what was sent, or it is a typed error.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.errors import HandoffError, LayoutMismatch, ReservationRefused, TransferTimeout, WorkerLost
from core.handoff import HandoffTicket
from core.kv_layout import KVLayout
from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from tests.integration.kv_transfer.bridge import blocks_of, bridge
from tests.integration.kv_transfer.ends import CLOCK, LAYOUT
from tests.unit.kv_transfer.doubles import ByteStore, failure_of, make_ticket


async def test_random_bytes_pushed_in_chunks_arrive_unchanged_and_are_counted_once(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(199 * 16 + 5)
        session = ends.open(ticket)
        assert await session.offered() == ()
        for first in range(0, 200, 40):
            session.add_blocks(first, range(first, first + 40))
            await asyncio.sleep(0.01)
        receipt = await session.finish(ticket.num_tokens)
        assert blocks_of(ends, ticket, range(200))
        assert ends.port.committed == {ticket.ticket_id: (ticket.num_tokens, 200)}
        assert receipt.num_pushed_bytes == 200 * LAYOUT.block_bytes
        assert ends.received_bytes() == 200 * LAYOUT.block_bytes
        assert ends.counted("baton_kv_transfer_seconds_count", transport=way) == 1


async def test_only_blocks_that_decode_lacks_are_read_and_sent(way: str) -> None:
    held = tuple(range(60))
    async with bridge(way, held=held) as ends:
        ticket = ends.ticket(100 * 16)
        session = ends.open(ticket)
        session.add_blocks(0, range(100))  # before the offer is answered
        assert await session.offered() == held
        receipt = await session.finish(ticket.num_tokens)
        assert sorted(ends.store.blocks_read) == list(range(60, 100))
        assert (receipt.num_held_blocks, receipt.num_pushed_blocks) == (60, 40)
        assert ends.received_bytes() == 40 * LAYOUT.block_bytes
        assert blocks_of(ends, ticket, range(60, 100))


async def test_a_ticket_of_which_decode_holds_all_blocks_is_committed_without_a_byte(way: str) -> None:
    async with bridge(way, held=tuple(range(10))) as ends:
        ticket = ends.ticket(160)
        session = ends.open(ticket)
        session.add_blocks(0, range(10))
        receipt = await session.finish(ticket.num_tokens)
        assert receipt.num_pushed_blocks == 0
        assert ends.received_bytes() == 0
        assert ends.port.committed == {ticket.ticket_id: (160, 0)}


async def test_many_tickets_at_once_share_a_connection_and_stay_apart(way: str) -> None:
    async with bridge(way, num_blocks=16 * 20) as ends:

        async def hand_over(number: int) -> HandoffTicket:
            ticket = ends.ticket(20 * 16)
            session = ends.open(ticket)
            session.add_blocks(0, range(number * 20, number * 20 + 20))
            await session.finish(ticket.num_tokens)
            return ticket

        tickets = await asyncio.gather(*(hand_over(number) for number in range(16)))
        for number, ticket in enumerate(tickets):
            for index in range(20):
                assert ends.port.block(ticket.ticket_id, index) == ends.store.block(number * 20 + index)
        assert ends.received_bytes() == 16 * 20 * LAYOUT.block_bytes


async def test_a_refused_offer_is_heard_at_once_and_with_its_reason(way: str) -> None:
    async with bridge(way, num_blocks=8) as ends:
        ticket = ends.ticket(9 * 16)
        session = ends.open(ticket)
        started = time.monotonic()
        error = await failure_of(session.offered())
        assert time.monotonic() - started < 1
        assert isinstance(error, ReservationRefused)
        assert error.details["num_free"] == 8
        assert isinstance(await failure_of(session.finish(ticket.num_tokens)), ReservationRefused)


async def test_a_layout_mismatch_names_both_workers_and_each_differing_field(way: str) -> None:
    async with bridge(way) as ends:
        other = replace(LAYOUT, block_size=32, dtype="float16")
        store = ByteStore(4, other)
        sender = Sender(store, ends.prefill, ends.connect, CLOCK, TransferMetrics(CollectorRegistry()))
        session = sender.open(make_ticket(64, ends.prefill, ends.decode, other), Deadline.after(5, CLOCK))
        error = await failure_of(session.offered())
        await sender.close()
        assert isinstance(error, LayoutMismatch)
        for part in ("prefill-0", "decode-0", "block_size: 32 vs 16", "dtype: float16 vs float32"):
            assert part in error.message
        assert ends.port.offers == []


async def test_an_abort_in_mid_push_frees_decode_and_reads_no_block_any_more(way: str) -> None:
    async with bridge(way) as ends:
        ticket = ends.ticket(200 * 16)
        session = ends.open(ticket)
        await session.offered()
        session.add_blocks(0, range(100))
        await asyncio.sleep(0.02)
        finishing = asyncio.create_task(session.finish(ticket.num_tokens))
        await session.abort("the client left")
        assert ticket.ticket_id not in ends.port.tables
        read = len(ends.store.blocks_read)
        session.add_blocks(100, range(100, 200))
        await asyncio.sleep(0.05)
        assert len(ends.store.blocks_read) == read
        assert (await failure_of(finishing)).code == "cancelled"
        await session.abort("again")


async def test_decode_gone_in_mid_push_ends_the_session_within_the_bounded_silence(way: str) -> None:
    config = BridgeConfig(silence_s=1.5, keepalive_s=0.3, abort_s=0.5)
    async with bridge(way, config=config) as ends:
        ticket = ends.ticket(100 * 16)
        session = ends.open(ticket)
        session.add_blocks(0, range(50))
        await session.offered()
        await asyncio.sleep(0.1)
        await ends.server.stop(0)
        session.add_blocks(50, range(50, 100))
        started = time.monotonic()
        error = await failure_of(session.finish(ticket.num_tokens))
        # of a group both ends see that it has ended, and there is no other way here
        assert isinstance(error, HandoffError if way == "distributed" else TransferTimeout)
        assert time.monotonic() - started < 4.0


async def test_a_worker_that_is_not_there_is_heard_of_at_once(way: str) -> None:
    async with bridge(way) as ends:
        nobody = replace(ends.decode, address="127.0.0.1:1")
        session = ends.open(make_ticket(64, ends.prefill, nobody, LAYOUT))
        started = time.monotonic()
        assert isinstance(await failure_of(session.offered()), WorkerLost)
        assert time.monotonic() - started < 2


async def test_sixty_megabytes_cross_quickly_and_unchanged(way: str) -> None:
    # 30 layers × K, V × 3 heads × 16 slots × 64 × 4 bytes = 720 KiB a block: a small real model
    layout = KVLayout(model="real", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
    async with bridge(way, num_blocks=82, layout=layout) as ends:
        ticket = ends.ticket(82 * 16)
        session = ends.open(ticket)
        await session.offered()
        started = time.perf_counter()
        session.add_blocks(0, range(82))
        receipt = await session.finish(ticket.num_tokens)
        elapsed = time.perf_counter() - started
        megabytes = receipt.num_pushed_bytes / 1e6
        print(f"\n{megabytes:.1f} MB over {way} in {elapsed:.3f} s: {megabytes / elapsed:.0f} MB/s")
        assert blocks_of(ends, ticket, range(82))
        assert megabytes / elapsed > 20
