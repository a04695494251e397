"""Nothing reaches the port that was not checked, and every message may be repeated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import LayoutMismatch, ReservationRefused, StaleEpoch, TicketExpired, TransferCorrupt
from core.ids import Epoch, WorkerId
from kv_transfer.codec import Ack, decode_ack, encode_frame
from kv_transfer.transport import Fence
from tests.unit.kv_transfer.doubles import (
    DECODE,
    LAYOUT,
    PREFILL,
    DecodeEnd,
    failure_of,
    in_virtual_time,
    make_ticket,
    quick,
)
from tests.unit.kv_transfer.receiving import SOURCE, frame_of, offer, push

# ---------------------------------------------------------------- offer


@in_virtual_time
async def test_an_offer_answers_which_blocks_decode_holds() -> None:
    end = DecodeEnd(held=(0, 2))
    assert await offer(end, make_ticket(16)) == (0, 2)


@in_virtual_time
async def test_an_offer_for_another_incarnation_or_worker_is_refused_before_the_port_hears_of_it() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    calls = [
        end.receiver.offer(ticket, 10.0, Epoch(99)),
        offer(end, make_ticket(16, decode=replace(DECODE, epoch=Epoch(99)))),
        end.receiver.offer(make_ticket(16, decode=replace(DECODE, epoch=Epoch(99))), 10.0, DECODE.epoch),
        offer(end, make_ticket(16, decode=replace(DECODE, worker_id=WorkerId("other")))),
    ]
    for call in calls:
        assert isinstance(await failure_of(call), StaleEpoch)
    assert end.port.offers == []
    assert end.counted("baton_kv_transfer_failures_total", side="receiver", code="stale_epoch") == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_dim", 8),
        ("block_size", 8),
        ("dtype", "int8"),
        ("scales", "per-head"),
    ],
)
@in_virtual_time
async def test_a_layout_that_differs_in_one_field_is_refused_naming_field_and_sides(
    field: str, value: Any
) -> None:
    end = DecodeEnd()
    error = await failure_of(offer(end, make_ticket(16, layout=replace(LAYOUT, **{field: value}))))
    assert isinstance(error, LayoutMismatch)
    ours = getattr(LAYOUT, field)
    for text in (f"{field}: {value} vs {ours}", PREFILL.worker_id, DECODE.worker_id):
        assert text in error.message
    assert error.details["differences"] == f"{field}: {value} vs {ours}"
    assert end.port.offers == []


@in_virtual_time
async def test_a_repeated_offer_reserves_once_and_answers_the_same_also_while_the_first_still_waits() -> None:
    end = DecodeEnd(held=(1,))
    ticket = make_ticket(16)
    end.port.gate.clear()
    waiting = [asyncio.create_task(offer(end, ticket)) for _ in range(3)]
    await asyncio.sleep(0.1)
    waiting[0].cancel()  # its connection broke
    end.port.gate.set()
    assert await asyncio.gather(*waiting[1:]) == [(1,), (1,)]
    assert await offer(end, ticket) == (1,)
    assert end.port.offers == [ticket.ticket_id]


@in_virtual_time
async def test_two_different_offers_of_one_ticket_are_refused() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await offer(end, ticket)
    assert isinstance(await failure_of(offer(end, replace(ticket, num_samples=2))), TransferCorrupt)


@in_virtual_time
async def test_a_refused_offer_leaves_nothing_behind_and_may_be_made_again() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    end.port.refusal = ReservationRefused("no room")
    assert isinstance(await failure_of(offer(end, ticket)), ReservationRefused)
    (ack,) = await push(end, frame_of(ticket, 0, 1)[0])
    assert isinstance(ack.error, TicketExpired)
    end.port.refusal = None
    assert await offer(end, ticket) == ()


@in_virtual_time
async def test_an_abort_that_overtakes_the_offers_answer_wins() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    end.port.gate.clear()
    offering = asyncio.create_task(offer(end, ticket))
    await asyncio.sleep(0)
    await end.receiver.abort(Fence.of(ticket), "the client left", 10.0)
    end.port.gate.set()
    assert isinstance(await failure_of(offering), TicketExpired)
    assert isinstance(await failure_of(offer(end, ticket)), TicketExpired)
    assert end.port.aborted == {ticket.ticket_id: "the client left"}


# ---------------------------------------------------------------- push


@in_virtual_time
async def test_frames_are_written_acknowledged_in_order_and_counted_after_the_check() -> None:
    end = DecodeEnd()
    ticket = make_ticket(30)
    await offer(end, ticket)
    frames = [frame_of(ticket, first, 2)[0] for first in (0, 2, 4, 6)]
    assert await push(end, *frames) == [Ack(0, 2), Ack(2, 2), Ack(4, 2), Ack(6, 2)]
    assert all(end.port.block(ticket.ticket_id, index) == SOURCE.block(index) for index in range(8))
    counted = end.counted("baton_kv_transfer_bytes_total", transport="loopback")
    assert counted == 8 * LAYOUT.block_bytes


@in_virtual_time
async def test_a_frame_with_the_wrong_epoch_or_ticket_does_not_reach_the_port() -> None:
    end = DecodeEnd()
    ticket, other = make_ticket(16), make_ticket(16)
    await offer(end, ticket)
    fence = Fence.of(ticket)
    expected = [
        (replace(fence, receiver_epoch=Epoch(99)), StaleEpoch),
        (replace(fence, sender_epoch=Epoch(99)), StaleEpoch),
        (Fence.of(other), TicketExpired),
    ]
    for forged, kind in expected:
        (ack,) = await push(end, frame_of(ticket, 0, 1, forged)[0])
        assert type(ack.error) is kind
    assert end.port.writes == []
    assert end.port.aborted == {}  # a forged frame does not end the true ticket
    assert await push(end, frame_of(ticket, 0, 1)[0]) == [Ack(0, 1)]


@pytest.mark.parametrize(("first_index", "num_blocks"), [(3, 2), (4, 1), (0, 0), (2**32 - 1, 1)])
@in_virtual_time
async def test_a_frame_outside_the_ticket_aborts_it(first_index: int, num_blocks: int) -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)  # blocks 0..3
    await offer(end, ticket)
    payload = bytes(num_blocks * LAYOUT.block_bytes)
    (ack,) = await push(end, encode_frame(Fence.of(ticket), first_index, num_blocks, payload)[0])
    assert isinstance(ack.error, TransferCorrupt)
    assert end.port.writes == []
    assert end.port.aborted == {ticket.ticket_id: "transfer_corrupt"}


@in_virtual_time
async def test_a_frame_that_overwrites_a_held_block_aborts_the_ticket_and_leaves_the_block() -> None:
    end = DecodeEnd(held=(1,))
    ticket = make_ticket(16)
    await offer(end, ticket)
    (ack,) = await push(end, frame_of(ticket, 0, 2)[0])
    assert isinstance(ack.error, TransferCorrupt)
    assert end.port.writes == []


@in_virtual_time
async def test_other_content_or_other_borders_for_a_written_block_abort_the_ticket() -> None:
    for second in (
        lambda ticket: frame_of(ticket, 1, 2)[0],
        lambda ticket: encode_frame(Fence.of(ticket), 0, 2, bytes(2 * LAYOUT.block_bytes))[0],
    ):
        end = DecodeEnd()
        ticket = make_ticket(16)
        await offer(end, ticket)
        acks = await push(end, frame_of(ticket, 0, 2)[0], second(ticket))
        assert acks[0].error is None
        assert isinstance(acks[1].error, TransferCorrupt)
        assert ticket.ticket_id in end.port.aborted


@in_virtual_time
async def test_a_frame_before_the_offer_is_answered_is_refused() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    end.port.gate.clear()
    offering = asyncio.create_task(offer(end, ticket))
    await asyncio.sleep(0)
    pushing = asyncio.create_task(push(end, frame_of(ticket, 0, 1)[0]))
    (ack,) = await pushing
    assert isinstance(ack.error, TransferCorrupt)
    end.port.gate.set()
    assert isinstance(await failure_of(offering), TicketExpired)


@in_virtual_time
async def test_a_slow_step_of_decode_does_not_stop_the_stream_but_bounds_what_waits() -> None:
    end = DecodeEnd()
    ticket = make_ticket(40 * 4)
    await offer(end, ticket)
    taken = 0

    async def frames() -> AsyncIterator[bytes]:
        nonlocal taken
        for index in range(40):
            taken += 1
            yield frame_of(ticket, index, 1)[0]

    acks: list[Ack] = []

    async def send_ack(data: bytes) -> None:
        acks.append(decode_ack(data))

    end.port.gate.clear()
    pushing = asyncio.create_task(end.receiver.push(frames(), send_ack, "loopback"))
    await asyncio.sleep(1)
    assert 1 < taken <= 20
    assert acks == []
    end.port.gate.set()
    await pushing
    assert [ack.first_index for ack in acks] == list(range(40))


@in_virtual_time
async def test_a_stream_that_breaks_while_writes_wait_may_send_them_again_and_they_count_once() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await offer(end, ticket)
    first, second = frame_of(ticket, 0, 2)[0], frame_of(ticket, 2, 2)[0]
    end.port.gate.clear()
    pushing = asyncio.create_task(push(end, first, second))
    await asyncio.sleep(0.1)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    end.port.gate.set()
    assert await push(end, first, second) == [Ack(0, 2), Ack(2, 2)]
    assert end.counted("baton_kv_transfer_bytes_total", transport="loopback") == 4 * LAYOUT.block_bytes


@in_virtual_time
async def test_the_first_refusal_is_the_last_word_of_a_push() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await offer(end, ticket)
    good, bad = frame_of(ticket, 0, 1)[0], bytearray(frame_of(ticket, 1, 1)[0])
    bad[-1] ^= 1
    acks = await push(end, good, bytes(bad), frame_of(ticket, 2, 1)[0])
    assert [type(ack.error) for ack in acks] == [type(None), TransferCorrupt]
    assert end.counted("baton_kv_transfer_failures_total", side="receiver", code="transfer_corrupt") == 1


@in_virtual_time
async def test_an_unreadable_header_aborts_the_ticket_whose_stream_it_came_on() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await offer(end, ticket)
    acks = await push(end, frame_of(ticket, 0, 1)[0], bytes(100))
    assert isinstance(acks[-1].error, TransferCorrupt)
    assert ticket.ticket_id in end.port.aborted


@in_virtual_time
async def test_a_write_to_an_expired_reservation_ends_the_ticket_here_too() -> None:
    end = DecodeEnd()
    ticket = make_ticket(16)
    await offer(end, ticket)
    end.port.expire(ticket.ticket_id)
    for _ in range(2):
        (ack,) = await push(end, frame_of(ticket, 0, 1)[0])
        assert isinstance(ack.error, TicketExpired)
    assert isinstance(await failure_of(end.receiver.keepalive(Fence.of(ticket))), TicketExpired)
    assert end.counted("baton_kv_transfer_bytes_total", transport="loopback") == 0


@quick
@given(st.integers(0, 2**32))
def test_decode_never_gets_a_byte_that_prefill_did_not_send_there(seed: int) -> None:
    @in_virtual_time
    async def run() -> None:
        rng = random.Random(seed)
        end = DecodeEnd(num_blocks=8)
        ticket = make_ticket(8 * 4)
        await offer(end, ticket)
        table = end.port.tables[ticket.ticket_id]
        for _ in range(6):
            first = rng.randrange(8)
            frame = bytearray(frame_of(ticket, first, rng.randint(1, 8 - first))[0])
            for _ in range(rng.choice((0, 0, 1, 3))):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            if rng.random() < 0.2:
                del frame[rng.randrange(len(frame)) :]
            await push(end, bytes(frame))
        for index, block_id in enumerate(table):
            assert end.store.block(block_id) in (SOURCE.block(index), bytes(LAYOUT.block_bytes))

    run()
