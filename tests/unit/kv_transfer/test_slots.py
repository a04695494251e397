"""A slot is in one place at a time, and is used again only when decode reads it no more."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from core.ids import TicketId
from kv_transfer.shm_slots import Slot, Slots
from tests.unit.kv_transfer.doubles import in_virtual_time, quick

A, B = TicketId("a"), TicketId("b")


def make(num_slots: int = 3) -> Slots:
    return Slots(memoryview(bytearray(num_slots * 8 + 5)), 8)


async def taken(slots: Slots) -> Slot:
    slot = await slots.take()
    assert slot is not None
    return slot


@in_virtual_time
async def test_slots_are_apart_and_the_last_one_given_back_is_the_next_one_used() -> None:
    slots = make()
    first, second, third = [await taken(slots) for _ in range(3)]
    assert [slot.offset for slot in (first, second, third)] == [0, 8, 16]
    first.memory[:], second.memory[:], third.memory[:] = b"a" * 8, b"b" * 8, b"c" * 8
    assert (bytes(first.memory), bytes(third.memory)) == (b"a" * 8, b"c" * 8)
    slots.give_back(first)
    slots.give_back(second)
    assert await slots.take() is second


@in_virtual_time
async def test_who_waits_first_is_served_first_also_before_one_who_comes_later_and_need_not_wait() -> None:
    slots = make(1)
    slot = await taken(slots)
    served: list[int] = []

    async def use(number: int) -> None:
        mine = await taken(slots)
        served.append(number)
        await asyncio.sleep(0)
        slots.give_back(mine)

    waiting = [asyncio.create_task(use(number)) for number in range(3)]
    await asyncio.sleep(1)
    slots.give_back(slot)
    await use(3)
    await asyncio.gather(*waiting)
    assert served == [0, 1, 2, 3]


@in_virtual_time
async def test_a_cancelled_wait_loses_no_slot_even_if_it_was_just_served() -> None:
    slots = make(1)
    slot = await taken(slots)
    waiting = [asyncio.create_task(slots.take()) for _ in range(3)]
    await asyncio.sleep(1)
    waiting[1].cancel()
    slots.give_back(slot)
    waiting[0].cancel()  # served, but not run yet
    assert await waiting[2] is slot
    await asyncio.gather(*waiting, return_exceptions=True)


@in_virtual_time
async def test_a_quarantined_slot_is_not_used_before_its_own_ticket_is_released() -> None:
    slots = make(2)
    first, second = await taken(slots), await taken(slots)
    slots.quarantine(A, [first])
    slots.quarantine(B, [second])
    assert slots.is_exhausted
    assert await slots.take() is None, "nothing in flight could free a slot"
    slots.release(B)
    assert await slots.take() is second
    slots.release(B)
    slots.release(A)
    assert await slots.take() is first


@in_virtual_time
async def test_who_waits_is_sent_away_when_no_slot_can_become_free_or_all_is_closed() -> None:
    for ending in ("quarantine", "close"):
        slots = make(1)
        slot = await taken(slots)
        waiting = asyncio.create_task(slots.take())
        await asyncio.sleep(1)
        if ending == "quarantine":
            slots.quarantine(A, [slot])
        else:
            slots.close()
        assert await waiting is None
        slots.close()
        slots.give_back(slot)
        assert await slots.take() is None


@in_virtual_time
async def test_slots_are_worn_when_half_of_them_wait_for_tickets_that_nobody_speaks_of() -> None:
    slots = make(4)
    used = [await taken(slots) for _ in range(3)]
    slots.quarantine(A, used[:2])
    assert not slots.is_worn, "one is in flight"
    slots.give_back(used[2])
    assert slots.is_worn
    slots.release(A)
    assert not slots.is_worn


@quick
@given(
    st.lists(st.tuples(st.sampled_from(["take", "ack", "break", "release"]), st.integers(0, 3)), max_size=60)
)
def test_every_slot_is_free_in_flight_or_quarantined_and_never_two_of_them(
    acts: list[tuple[str, int]],
) -> None:
    @in_virtual_time
    async def run() -> None:
        slots = make(4)
        in_flight: list[Slot] = []
        quarantined: dict[TicketId, list[Slot]] = {}
        for act, number in acts:
            ticket_id = TicketId(str(number % 2))
            if act == "take" and slots.num_free:
                in_flight.append(await taken(slots))
            elif act == "ack" and in_flight:
                slots.give_back(in_flight.pop(number % len(in_flight)))
            elif act == "break" and in_flight:
                slot = in_flight.pop(number % len(in_flight))
                slots.quarantine(ticket_id, [slot])
                quarantined.setdefault(ticket_id, []).append(slot)
            elif act == "release":
                slots.release(ticket_id)
                quarantined.pop(ticket_id, None)
            held = [*in_flight, *(slot for group in quarantined.values() for slot in group)]
            assert slots.num_free + len(held) == 4
            assert slots.num_quarantined == sum(map(len, quarantined.values()))
            assert max(Counter(slot.offset for slot in held).values(), default=0) <= 1
        for ticket_id in quarantined:
            slots.release(ticket_id)
        for slot in in_flight:
            slots.give_back(slot)
        assert sorted([(await taken(slots)).offset for _ in range(4)]) == [0, 8, 16, 24]

    run()
