"""Shared memory in use: pairs stay apart, slots are used again only when decode has let go of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from core.errors import TransferCorrupt, WorkerLost
from kv_transfer.codec import decode_ack, encode_staged_frame, payload_checksum
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.shm_handshake import Fallback
from kv_transfer.shm_transport import ShmTransport
from kv_transfer.transport import SHM, CommitClaim, Fence, PushStream, Room
from tests.integration.kv_transfer.ends import PrefillEnd, decode_end, no_task_is_left
from tests.integration.kv_transfer.shared_ends import BLOCK, CONFIG, both, port, prefill
from tests.unit.kv_transfer.doubles import until

# ---------------------------------------------------------------- pairs and incarnations


async def test_two_prefill_workers_have_memories_of_their_own_and_their_blocks_stay_apart() -> None:
    async with decode_end(port()) as decode, AsyncExitStack() as stack:
        ends = [prefill(decode, seed=seed) for seed in (1, 2)]
        for end in ends:
            stack.push_async_callback(end.sender.close)
        for _ in range(5):
            tickets = await asyncio.gather(*(end.hand_over(20) for end in ends for _ in range(2)))
            for ticket, end in zip(tickets, [end for end in ends for _ in range(2)], strict=True):
                assert decode.holds(ticket, end.store)
                decode.port.expire(ticket.ticket_id)
        assert decode.staging_bytes() == 2 * 16 * BLOCK
        assert decode.received_bytes(SHM) == 5 * 4 * 20 * BLOCK


async def test_a_frame_that_names_the_memory_of_another_pair_is_not_served_from_it() -> None:
    async with decode_end(port()) as decode:
        ends = [prefill(decode, seed=seed) for seed in (1, 2)]
        transports = [ShmTransport(GrpcTransport(decode.ref), CONFIG) for _ in ends]
        tickets = [end.ticket(64) for end in ends]
        rooms = []
        for ticket, transport in zip(tickets, transports, strict=True):
            await transport.offer(ticket, 5.0)
            push = await transport.open_push()
            room = await push.room(ticket.ticket_id, BLOCK)
            assert room is not None
            room.memory[:] = ends[0].store.block(0)
            rooms.append((push, room))
        assert rooms[0][1].place.staging_id != rooms[1][1].place.staging_id
        push, room = rooms[1]
        frame, _ = encode_staged_frame(Fence.of(tickets[1]), 0, 1, room.memory, rooms[0][1].place)
        await push.send(frame)
        assert isinstance(await lost(push), WorkerLost)
        assert decode.port.writes == []
        for push, _ in rooms:
            await push.close()
        for transport in transports:
            await transport.close()


async def test_a_frame_that_points_outside_its_memory_ends_its_ticket() -> None:
    async with decode_end(port()) as decode:
        end, transport = prefill(decode), ShmTransport(GrpcTransport(decode.ref), CONFIG)
        ticket = end.ticket(64)
        await transport.offer(ticket, 5.0)
        push = await transport.open_push()
        room = await push.room(ticket.ticket_id, BLOCK)
        assert room is not None
        place = replace(room.place, offset=16 * BLOCK - 1)
        frame, _ = encode_staged_frame(Fence.of(ticket), 0, 1, room.memory, place)
        await push.send(frame)
        error = decode_ack(await anext(push.acks())).error
        assert isinstance(error, TransferCorrupt)
        assert ticket.ticket_id in decode.port.aborted
        await push.close()
        await transport.close()


async def lost(push: PushStream) -> Exception | None:
    try:
        async for _ in push.acks():
            pass
    except WorkerLost as error:
        return error
    return None


async def test_a_new_incarnation_of_either_side_gets_new_memory_and_the_old_one_is_given_back() -> None:
    async with decode_end(port()) as decode:
        assert decode.acceptor is not None
        acceptor = decode.acceptor
        for _ in range(3):  # prefill restarts
            end = prefill(decode)
            await end.hand_over(10)
            assert acceptor.num_bytes == 16 * BLOCK
            await end.sender.close()
            await until(lambda: acceptor.num_bytes == 0)
    end = None
    transports = []
    for _ in range(2):  # decode restarts
        async with decode_end(port()) as decode:
            end = end or prefill(decode)
            end.decode = decode.ref
            transport = ShmTransport(GrpcTransport(decode.ref), CONFIG)
            transports.append(transport)
            await end.hand_over(10)
            assert decode.received_bytes(SHM) == 10 * BLOCK
            await transport.offer(end.ticket(16), 5.0)
            assert transport.staging is not None
        await until(lambda transport=transport: transport.staging is None)
    assert end is not None
    await end.sender.close()
    for transport in transports:
        await transport.close()
    await no_task_is_left()


# ---------------------------------------------------------------- slots


async def fill(end: PrefillEnd, push: PushStream, fence: Fence, first_index: int) -> Room:
    """Send one staged block."""
    room = await push.room(fence.ticket_id, BLOCK)
    assert room is not None
    end.store.read_blocks_into([first_index], room.memory)
    frame, _ = encode_staged_frame(fence, first_index, 1, room.memory, room.place)
    await push.send(frame)
    return room


@pytest.mark.parametrize("ending", ["abort", "commit"])
async def test_what_a_broken_stream_leaves_is_not_written_again_before_decode_has_answered_for_the_ticket(
    ending: str,
) -> None:
    async with both() as ends:
        end, transport = ends.prefill, ShmTransport(GrpcTransport(ends.decode.ref), CONFIG)
        ticket = end.ticket(2 * 16)
        fence = Fence.of(ticket)
        await transport.offer(ticket, 5.0)
        assert transport.staging is not None
        slots = transport.staging.slots
        ends.decode.port.gate.clear()
        push = await transport.open_push()
        rooms = [await fill(end, push, fence, index) for index in range(2)]
        await push.close()
        assert (slots.num_quarantined, slots.num_free) == (2, 2)
        ends.decode.port.gate.set()
        push = await transport.open_push()
        for index in range(2):
            room = await fill(end, push, fence, index)
            assert room.place not in [other.place for other in rooms]
            acks = push.acks()
            assert decode_ack(await anext(acks)).error is None
        await push.close()
        assert slots.num_quarantined == 2
        if ending == "abort":
            await transport.abort(fence, "test", 5.0)
        else:
            first, second = (payload_checksum(fence.ticket_id, end.store.block(index)) for index in range(2))
            await transport.commit(fence, CommitClaim(ticket.num_tokens, 2, first ^ second))
        assert (slots.num_quarantined, slots.num_free) == (0, 4)
        await transport.close()


async def test_with_all_slots_in_quarantine_payloads_travel_in_frames_and_new_memory_is_attached() -> None:
    async with both() as ends:
        end, transport = ends.prefill, ShmTransport(GrpcTransport(ends.decode.ref), CONFIG)
        ticket = end.ticket(4 * 16)
        await transport.offer(ticket, 5.0)
        assert transport.staging is not None
        old = transport.staging.staging_id
        ends.decode.port.gate.clear()
        push = await transport.open_push()
        for index in range(4):
            await fill(end, push, Fence.of(ticket), index)
        waiting = asyncio.create_task(push.room(ticket.ticket_id, BLOCK))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "a slot may still be acknowledged"
        other = await transport.open_push()
        await push.close()
        assert await waiting is None
        assert await other.room(ticket.ticket_id, BLOCK) is None
        await other.close()
        ends.decode.port.gate.set()
        await transport.offer(end.ticket(16), 5.0)
        assert transport.staging is not None
        assert transport.staging.staging_id != old
        await transport.close()


async def test_memory_that_is_worn_by_tickets_nobody_speaks_of_is_replaced_at_an_offer() -> None:
    async with both() as ends:
        end, transport = ends.prefill, ShmTransport(GrpcTransport(ends.decode.ref), CONFIG)
        ticket = end.ticket(4 * 16)
        await transport.offer(ticket, 5.0)
        assert transport.staging is not None
        old = transport.staging.staging_id
        ends.decode.port.gate.clear()
        push = await transport.open_push()
        for index in range(2):
            await fill(end, push, Fence.of(ticket), index)
        await push.close()
        ends.decode.port.gate.set()
        await transport.offer(end.ticket(16), 5.0)
        assert transport.staging is not None
        assert transport.staging.staging_id != old
        await transport.close()


async def test_a_memory_that_is_lost_in_mid_push_costs_no_block_the_rest_travels_in_frames() -> None:
    async with both() as ends:
        assert ends.decode.acceptor is not None
        end = ends.prefill
        ticket = end.ticket(40 * 16)
        session = end.open(ticket)
        await session.offered()
        session.add_blocks(0, range(20))
        await until(lambda: ends.decode.received_bytes(SHM) == 20 * BLOCK)
        ends.decode.port.gate.clear()
        session.add_blocks(20, range(20, 32))
        await asyncio.sleep(0.05)
        await ends.decode.acceptor.close()  # decode's end of the connection breaks, nothing else
        ends.decode.port.gate.set()
        session.add_blocks(32, range(32, 40))
        await session.finish(ticket.num_tokens)
        assert ends.decode.holds(ticket, end.store)
        assert ends.decode.received_bytes(SHM) + ends.decode.received_bytes("grpc") == 40 * BLOCK
        assert ends.decode.received_bytes("grpc") >= 8 * BLOCK
        await end.hand_over(3)
        assert end.num_fallbacks(Fallback.UNREACHABLE) == 1


async def test_a_slot_that_changes_after_its_frame_was_sent_ends_the_ticket_and_is_never_committed() -> None:
    async with both() as ends:
        end, transport = ends.prefill, ShmTransport(GrpcTransport(ends.decode.ref), CONFIG)
        ticket = end.ticket(2 * 16)
        await transport.offer(ticket, 5.0)
        ends.decode.port.gate.clear()
        push = await transport.open_push()
        room = await fill(end, push, Fence.of(ticket), 0)
        await asyncio.sleep(0.05)  # the frame was checked and waits for its turn in the blocks
        room.memory[-1] ^= 1
        ends.decode.port.gate.set()
        error = decode_ack(await anext(push.acks())).error
        assert isinstance(error, TransferCorrupt)
        assert ticket.ticket_id in ends.decode.port.aborted
        assert ends.decode.received_bytes(SHM) == 0
        await push.close()
        await transport.close()


async def test_more_tickets_than_slots_wait_for_one_another_and_all_arrive() -> None:
    async with both(replace(CONFIG, staging_bytes=8 * BLOCK)) as ends:
        tickets = await asyncio.gather(*(ends.prefill.hand_over(15) for _ in range(12)))
        assert all(ends.decode.holds(ticket, ends.prefill.store) for ticket in tickets)
        assert ends.decode.received_bytes(SHM) == 12 * 15 * BLOCK
