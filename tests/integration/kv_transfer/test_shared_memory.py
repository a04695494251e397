"""Shared memory between two ends of a host: who gets it, when a slot is used again, what comes without it."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from core.errors import HandoffError, TransferCorrupt, WorkerLost
from core.ids import new_epoch
from kv_transfer.codec import decode_ack, encode_staged_frame, payload_checksum
from kv_transfer.config import BridgeConfig, ReceiverConfig, SharedMemory
from kv_transfer.shm_handshake import Fallback, Hello, NotAttached, attach, decode_grant
from kv_transfer.shm_memory import create_memory
from kv_transfer.shm_transport import ShmTransport
from kv_transfer.transport import SHM, CommitClaim, Fence, Place, PushStream, Room
from tests.integration.kv_transfer.ends import LAYOUT, DecodeEnd, PrefillEnd, decode_end, no_task_is_left
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, failure_of, until

BLOCK = LAYOUT.block_bytes
CONFIG = BridgeConfig(staged_frame_bytes=4 * BLOCK, staging_bytes=16 * BLOCK, attach_again_s=0.2)
"""Four slots of four blocks."""


def port(num_blocks: int = 256) -> StorePort:
    return StorePort(ByteStore(num_blocks, LAYOUT), num_blocks)


def prefill(decode: DecodeEnd, config: BridgeConfig = CONFIG, seed: int = 1) -> PrefillEnd:
    return PrefillEnd(decode.ref, config, ByteStore(64, LAYOUT, seed=seed))


@dataclass
class Ends:
    decode: DecodeEnd
    prefill: PrefillEnd


@asynccontextmanager
async def both(
    config: BridgeConfig = CONFIG,
    receiver: ReceiverConfig | None = None,
    create: Callable[[int], int] = create_memory,
) -> AsyncIterator[Ends]:
    async with decode_end(port(), receiver, create) as decode:
        ends = Ends(decode, prefill(decode, config))
        try:
            yield ends
        finally:
            await ends.prefill.sender.close()
        if decode.acceptor is not None:
            acceptor = decode.acceptor
            await until(lambda: acceptor.num_bytes == 0, 5.0)
        assert decode.staging_bytes() == 0
    await no_task_is_left()


# ---------------------------------------------------------------- who gets it


async def test_one_memory_serves_all_tickets_of_a_pair_and_is_given_back_at_the_end() -> None:
    async with both() as ends:
        assert ends.decode.staging_bytes() == 0
        for _ in range(3):
            ticket = await ends.prefill.hand_over(40)
            assert ends.decode.holds(ticket, ends.prefill.store)
            assert ends.decode.staging_bytes() == 16 * BLOCK
        assert ends.decode.received_bytes(SHM) == 120 * BLOCK
        assert ends.decode.received_bytes("grpc") == 0
        await asyncio.gather(*(ends.prefill.hand_over(7) for _ in range(8)))
        assert ends.decode.received_bytes(SHM) == (120 + 56) * BLOCK


def point_elsewhere(**changes: Any) -> Callable[[Ends], None]:
    def change(ends: Ends) -> None:
        assert ends.decode.acceptor is not None
        ends.decode.acceptor.address = replace(ends.decode.acceptor.address, **changes)

    return change


def no_change(ends: Ends) -> None:
    """The configuration alone stands in the way."""


def no_memory(num_bytes: int) -> int:
    raise OSError(errno.ENOMEM, "no memory")


def unsealed(num_bytes: int) -> int:
    descriptor = os.memfd_create("baton-test")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


WAYS_TO_FAIL: dict[str, tuple[Fallback, Callable[[Ends], None], dict[str, Any]]] = {
    "decode does not offer it": (
        Fallback.NOT_OFFERED,
        no_change,
        {"receiver": ReceiverConfig(shm=SharedMemory.NEVER)},
    ),
    "another host": (Fallback.OTHER_HOST, point_elsewhere(host_id="elsewhere"), {}),
    "another network namespace": (
        Fallback.UNREACHABLE,
        point_elsewhere(socket_name=f"baton-{secrets.token_hex(16)}"),
        {},
    ),
    "a wrong token": (Fallback.REFUSED, point_elsewhere(token=bytes(16)), {}),
    "no room for another pair": (
        Fallback.LIMIT,
        no_change,
        {"receiver": ReceiverConfig(max_staging_bytes=15 * BLOCK)},
    ),
    "a frame larger than the memory": (
        Fallback.LIMIT,
        no_change,
        {"config": replace(CONFIG, staging_bytes=3 * BLOCK)},
    ),
    "the system gives no memory": (Fallback.UNSUPPORTED, no_change, {"create": no_memory}),
    "the memory is not sealed": (Fallback.REFUSED, no_change, {"create": unsealed}),
}


@pytest.mark.parametrize("case", list(WAYS_TO_FAIL))
async def test_where_it_cannot_be_had_payloads_travel_in_frames_and_the_reason_is_counted(case: str) -> None:
    reason, change, settings = WAYS_TO_FAIL[case]
    async with both(**settings) as ends:
        change(ends)
        for count in (1, 2):
            ticket = await ends.prefill.hand_over(10)
            assert ends.decode.holds(ticket, ends.prefill.store)
            assert ends.prefill.num_fallbacks(reason) == count
        assert ends.decode.received_bytes("grpc") == 20 * BLOCK
        assert ends.decode.received_bytes(SHM) == 0


@pytest.mark.parametrize("case", list(WAYS_TO_FAIL))
async def test_where_it_is_required_and_cannot_be_had_the_handoff_is_refused_and_nothing_stays_reserved(
    case: str,
) -> None:
    reason, change, settings = WAYS_TO_FAIL[case]
    config = replace(settings.get("config", CONFIG), shm=SharedMemory.REQUIRED)
    async with both(**{**settings, "config": config}) as ends:
        change(ends)
        session = ends.prefill.open(ends.prefill.ticket(160))
        error = await failure_of(session.offered())
        assert type(error) is HandoffError
        assert error.details["reason"] == reason
        assert ends.decode.port.tables == {}


async def test_switched_off_it_is_not_asked_for_and_not_counted_as_a_fallback() -> None:
    async with both(replace(CONFIG, shm=SharedMemory.NEVER)) as ends:
        await ends.prefill.hand_over(10)
        assert ends.decode.received_bytes("grpc") == 10 * BLOCK
        assert sum(ends.prefill.num_fallbacks(reason) for reason in Fallback) == 0


async def test_a_listener_that_does_not_answer_costs_the_first_offer_a_bounded_time_the_next_none() -> None:
    name = f"baton-{secrets.token_hex(16)}"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as mute:
        mute.bind(f"\0{name}")
        mute.listen()
        async with both(replace(CONFIG, attach_s=0.3, attach_again_s=60.0)) as ends:
            point_elsewhere(socket_name=name)(ends)
            clock = asyncio.get_running_loop().time
            started = clock()
            await ends.prefill.hand_over(10)
            assert 0.3 <= clock() - started < 2.0
            started = clock()
            await ends.prefill.hand_over(10)
            assert clock() - started < 0.3
            assert ends.prefill.num_fallbacks(Fallback.TIMEOUT) == 2


async def test_it_is_asked_for_again_some_time_after_it_could_not_be_had() -> None:
    async with both() as ends:
        assert ends.decode.acceptor is not None
        right = ends.decode.acceptor.address
        point_elsewhere(token=bytes(16))(ends)
        await ends.prefill.hand_over(1)
        ends.decode.acceptor.address = right
        await asyncio.sleep(CONFIG.attach_again_s)
        await ends.prefill.hand_over(1)
        assert ends.decode.received_bytes(SHM) == BLOCK


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
async def test_a_process_of_another_user_gets_nothing() -> None:
    async with decode_end(port()) as decode:
        assert decode.acceptor is not None
        address = decode.acceptor.address
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stranger:
            stranger.setblocking(False)
            os.seteuid(65534)
            try:
                stranger.connect(f"\0{address.socket_name}")
            finally:
                os.seteuid(0)
            loop = asyncio.get_running_loop()
            # closed at once, with or without a word of the stranger
            with suppress(ConnectionError):
                await loop.sock_sendall(
                    stranger, Hello(address.token, decode.ref.epoch, new_epoch(), BLOCK).encode()
                )
            with suppress(ConnectionError):
                assert await asyncio.wait_for(loop.sock_recv(stranger, 256), 2.0) == b""
        assert decode.acceptor.num_bytes == 0


async def test_silent_connections_are_bounded_and_keep_nobody_out_for_long() -> None:
    async with decode_end(port()) as decode, AsyncExitStack() as stack:
        assert decode.acceptor is not None
        address, loop = decode.acceptor.address, asyncio.get_running_loop()
        silent = []
        for _ in range(80):
            silent.append(stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))))
            silent[-1].setblocking(False)
            await loop.sock_connect(silent[-1], f"\0{address.socket_name}")
        with suppress(ConnectionError):
            assert await asyncio.wait_for(loop.sock_recv(silent[-1], 1), 2.0) == b"", "one too many"
        await asyncio.sleep(2.5)  # as long as a handshake may take
        attachment = await attach(address, decode.ref.epoch, new_epoch(), BLOCK, 1.0)
        attachment.connection.close()


async def test_a_process_that_means_another_incarnation_gets_nothing() -> None:
    async with decode_end(port()) as decode:
        assert decode.acceptor is not None
        with pytest.raises(NotAttached) as refusal:
            await attach(decode.acceptor.address, new_epoch(), new_epoch(), BLOCK, 1.0)
        assert refusal.value.reason is Fallback.REFUSED


@pytest.mark.parametrize("packet", [b"", b"x", b"BatonSM1" + bytes(40), bytes(200)])
async def test_a_process_that_says_something_else_is_answered_and_takes_nothing(packet: bytes) -> None:
    async with decode_end(port()) as decode:
        assert decode.acceptor is not None
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stranger:
            stranger.setblocking(False)
            stranger.connect(f"\0{decode.acceptor.address.socket_name}")
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(stranger, packet)
            with pytest.raises(NotAttached) as refusal:
                decode_grant(await loop.sock_recv(stranger, 256))
            assert refusal.value.reason is Fallback.REFUSED
        end = prefill(decode)
        await end.hand_over(3)  # others are served
        await end.sender.close()


async def test_one_who_does_not_prove_to_see_the_memory_is_not_served_from_it() -> None:
    async with decode_end(port()) as decode:
        assert decode.acceptor is not None
        address, epoch = decode.acceptor.address, new_epoch()
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as stranger:
            stranger.setblocking(False)
            stranger.connect(f"\0{address.socket_name}")
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(stranger, Hello(address.token, decode.ref.epoch, epoch, BLOCK).encode())
            staging_id = decode_grant(await loop.sock_recv(stranger, 256))
            assert decode.acceptor.num_bytes == BLOCK
            assert decode.acceptor.find(Place(staging_id, 0), BLOCK, epoch) is None
            await loop.sock_sendall(stranger, bytes(16))
            assert await loop.sock_recv(stranger, 256) == b""
            assert decode.acceptor.find(Place(staging_id, 0), BLOCK, epoch) is None
        acceptor = decode.acceptor
        await until(lambda: acceptor.num_bytes == 0)


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
        transports = [ShmTransport(decode.ref, CONFIG) for _ in ends]
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
        end, transport = prefill(decode), ShmTransport(decode.ref, CONFIG)
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
            transport = ShmTransport(decode.ref, CONFIG)
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
        end, transport = ends.prefill, ShmTransport(ends.decode.ref, CONFIG)
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
        end, transport = ends.prefill, ShmTransport(ends.decode.ref, CONFIG)
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
        end, transport = ends.prefill, ShmTransport(ends.decode.ref, CONFIG)
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
        end, transport = ends.prefill, ShmTransport(ends.decode.ref, CONFIG)
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
