"""Shared memory between two ends of a host: who gets it, and what comes without it."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import replace
from typing import Any

import pytest

from core.errors import HandoffError
from core.ids import new_epoch
from kv_transfer.config import ReceiverConfig, SharedMemory
from kv_transfer.shm_handshake import Fallback, Hello, NotAttached, attach, decode_grant
from kv_transfer.transport import SHM, Place
from tests.integration.kv_transfer.ends import decode_end
from tests.integration.kv_transfer.shared_ends import BLOCK, CONFIG, Ends, both, port, prefill
from tests.unit.kv_transfer.doubles import failure_of, until

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
            assert await decode.acceptor.find(Place(staging_id, 0), BLOCK, epoch) is None
            await loop.sock_sendall(stranger, bytes(16))
            assert await loop.sock_recv(stranger, 256) == b""
            assert await decode.acceptor.find(Place(staging_id, 0), BLOCK, epoch) is None
        acceptor = decode.acceptor
        await until(lambda: acceptor.num_bytes == 0)
