"""What breaks on the way is survived, or ends the session in bounded (virtual) time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import (
    ServingError,
    TransferTimeout,
    WorkerLost,
)
from kv_transfer.config import BridgeConfig
from tests.unit.kv_transfer.doubles import (
    LAYOUT,
    failure_of,
    in_virtual_time,
    make_ticket,
    quick,
    until,
)
from tests.unit.kv_transfer.session_pair import now, pair

# ---------------------------------------------------------------- broken connections


@in_virtual_time
async def test_a_broken_stream_is_replaced_and_what_was_not_acknowledged_is_sent_again() -> None:
    async with pair() as ends:
        ends.transport.max_frames_a_stream = 2
        ticket = make_ticket(80)
        session = ends.open(ticket)
        session.add_blocks(0, range(20))
        receipt = await session.finish(80)
        assert ends.transport.num_streams >= 5
        assert ends.arrived(ticket, range(20))
        assert receipt.num_pushed_blocks == 20
        counted = ends.decode.counted("baton_kv_transfer_bytes_total", transport="loopback")
        assert counted == 20 * LAYOUT.block_bytes


@in_virtual_time
async def test_a_short_outage_is_survived() -> None:
    async with pair() as ends:
        ticket = make_ticket(80)
        session = ends.open(ticket)
        await session.offered()
        ends.transport.is_down = True
        session.add_blocks(0, range(20))
        await asyncio.sleep(3)
        ends.transport.is_down = False
        await session.finish(80)
        assert ends.arrived(ticket, range(20))


@in_virtual_time
async def test_an_outage_longer_than_the_bounded_silence_ends_the_session() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        session.add_blocks(0, range(4))
        await asyncio.sleep(2)
        ends.transport.is_down = True
        started = now()
        assert isinstance(await session.ended(), TransferTimeout)
        assert 4.0 <= now() - started <= 5.1
        assert ends.failures("transfer_timeout") == 1


@in_virtual_time
async def test_a_peer_that_answers_nothing_ends_the_session_after_the_bounded_silence() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        ends.transport.is_silent = True
        session.add_blocks(0, range(4))
        started = now()
        assert isinstance(await failure_of(session.finish(80)), TransferTimeout)
        assert now() - started <= 5.1
        await session.abort("gone")
        assert now() - started <= 7.2


@in_virtual_time
async def test_waiting_for_room_that_other_tickets_have_is_no_silence() -> None:
    async with pair() as ends:
        ticket = make_ticket(80)
        session = ends.open(ticket)
        await session.offered()
        ends.transport.has_room.clear()
        session.add_blocks(0, range(20))
        await asyncio.sleep(30)
        assert session.error is None
        ends.transport.has_room.set()
        await session.finish(80)
        assert ends.arrived(ticket, range(20))


@in_virtual_time
async def test_a_peer_that_is_gone_while_room_is_waited_for_ends_the_session() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        ends.transport.has_room.clear()
        session.add_blocks(0, range(4))
        await asyncio.sleep(10)
        ends.transport.is_silent = True
        started = now()
        assert isinstance(await session.ended(), TransferTimeout)
        assert now() - started <= 5.1


@in_virtual_time
async def test_an_offer_that_is_never_answered_ends_after_the_bounded_silence() -> None:
    async with pair() as ends:
        ends.transport.is_silent = True
        session = ends.open(make_ticket(16))
        started = now()
        assert isinstance(await failure_of(session.offered()), TransferTimeout)
        assert now() - started <= 5.1


@in_virtual_time
async def test_an_offer_whose_connection_breaks_is_a_lost_worker_and_decode_is_told_to_abort() -> None:
    async with pair() as ends:
        ends.transport.is_down = True
        session = ends.open(make_ticket(16))
        assert isinstance(await failure_of(session.offered()), WorkerLost)
        await until(lambda: ends.transport.num_aborts == 1)


@in_virtual_time
async def test_decode_that_answers_keepalives_but_writes_nothing_is_given_up() -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(80))
        await session.offered()
        ends.decode.port.gate.clear()
        session.add_blocks(0, range(4))
        started = now()
        assert isinstance(await session.ended(), TransferTimeout)
        assert now() - started <= 6.1
        assert len(ends.decode.port.keepalives) >= 4


@in_virtual_time
async def test_a_commit_whose_reply_is_lost_is_repeated_and_commits_once() -> None:
    async with pair() as ends:
        ends.transport.lost_commits = 2
        ticket = make_ticket(16)
        session = ends.open(ticket)
        session.add_blocks(0, range(4))
        receipt = await session.finish(16)
        assert receipt.num_pushed_blocks == 4
        assert ends.decode.port.committed == {ticket.ticket_id: (16, 4)}


@pytest.mark.parametrize("left_s", [0.0, 0.5, 3.0])
@in_virtual_time
async def test_the_deadline_bounds_everything(left_s: float) -> None:
    async with pair() as ends:
        session = ends.open(make_ticket(16), left_s)
        started = now()
        session.add_blocks(0, [0])
        assert isinstance(await session.ended(), TransferTimeout)
        assert now() - started <= left_s + 0.01


# ---------------------------------------------------------------- anything


@quick
@given(st.data())
def test_under_random_trouble_all_arrives_or_the_failure_is_typed_and_decode_is_free(
    draw: st.DataObject,
) -> None:
    num_blocks = draw.draw(st.integers(1, 24))
    held = sorted(draw.draw(st.sets(st.integers(0, num_blocks - 1))))
    # (seconds, what happens then)
    troubles = draw.draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.01, 0.2, 1.5, 6.0]),
                st.sampled_from(["down", "up", "slow", "fast", "break", "corrupt", "abort"]),
            ),
            max_size=6,
        )
    )
    chunks = draw.draw(st.lists(st.integers(1, 8), min_size=24, max_size=24))

    @in_virtual_time
    async def run() -> None:
        async with pair(held) as ends:
            ticket = make_ticket(num_blocks * LAYOUT.block_size)
            session = ends.open(ticket, left_s=20.0)

            async def compute() -> None:
                done = 0
                for size in chunks:
                    ids = range(done, min(done + size, num_blocks))
                    if ids:
                        session.add_blocks(done, ids)
                    done = ids.stop
                    await asyncio.sleep(0.1)
                await session.finish(ticket.num_tokens)

            async def disturb() -> None:
                for pause, trouble in troubles:
                    await asyncio.sleep(pause)
                    if trouble in ("down", "up"):
                        ends.transport.is_down = trouble == "down"
                    elif trouble == "slow":
                        ends.decode.port.gate.clear()
                    elif trouble == "fast":
                        ends.decode.port.gate.set()
                    elif trouble == "break":
                        ends.transport.max_frames_a_stream = 1
                    elif trouble == "corrupt":
                        ends.transport.alter = lambda frame: frame[:80] + bytes([frame[80] ^ 1]) + frame[81:]
                    else:
                        await session.abort("trouble")

            started = now()
            disturbing = asyncio.create_task(disturb())
            with suppress(ServingError):
                await compute()
            assert now() - started <= 22.0
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
            ends.transport.is_down = False
            ends.decode.port.gate.set()
            error = session.error
            missing = [index for index in range(num_blocks) if index not in held]
            if error is None and ticket.ticket_id not in ends.decode.port.aborted:
                assert ends.arrived(ticket, missing)
                assert ends.decode.port.committed == {ticket.ticket_id: (ticket.num_tokens, len(missing))}
            await session.abort("over")
            await session.abort("over")  # the first may have joined one whose time ran out while all was down
            assert ticket.ticket_id not in ends.decode.port.tables
        assert ends.sender.num_sessions == 0

    run()


def test_the_settings_of_the_bridge_are_checked() -> None:
    for wrong in (
        {"frame_bytes": 0},
        {"max_bytes_in_flight": 0},
        {"keepalive_s": 6.0},
        {"keepalive_s": 0.0},
        {"reconnect_min_s": 1.0},
        {"abort_s": 0.0},
    ):
        with pytest.raises(ValueError):
            BridgeConfig(**wrong)
