"""Inside one process the bridge is the same one: same frames and errors, and a worker that leaves is lost."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from core.clock import Deadline
from core.errors import TransferTimeout, WorkerLost
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.transport import Fence
from tests.unit.kv_transfer.doubles import (
    DECODE,
    LAYOUT,
    PREFILL,
    ByteStore,
    DecodeEnd,
    LoopClock,
    failure_of,
    in_virtual_time,
    make_ticket,
)


@in_virtual_time
async def test_blocks_cross_inside_one_process_and_are_counted_as_loopback() -> None:
    end, store = DecodeEnd(), ByteStore(64, seed=5)
    assert end.directory.register(DECODE.worker_id, end.receiver) == DECODE.address
    metrics = TransferMetrics(CollectorRegistry())
    sender = Sender(store, PREFILL, end.directory.connect, LoopClock(), metrics)
    ticket = make_ticket(64 * 4)
    session = sender.open(ticket, Deadline.after(10, LoopClock()))
    session.add_blocks(0, range(64))
    await session.finish(64 * 4)
    assert all(end.port.block(ticket.ticket_id, index) == store.block(index) for index in range(64))
    counted = end.counted("baton_kv_transfer_bytes_total", transport="loopback")
    assert counted == 64 * LAYOUT.block_bytes
    await sender.close()


@in_virtual_time
async def test_a_worker_that_left_the_directory_is_lost_for_every_call() -> None:
    end = DecodeEnd()
    transport = end.directory.connect(DECODE)
    ticket = make_ticket(16)
    await transport.offer(ticket, 5.0)
    push = await transport.open_push()
    end.directory.unregister(DECODE.worker_id)
    end.directory.unregister(DECODE.worker_id)
    for call in (
        transport.offer(ticket, 5.0),
        transport.open_push(),
        transport.keepalive(Fence.of(ticket)),
        transport.abort(Fence.of(ticket), "test", 1.0),
        push.send(b"frame"),
    ):
        assert isinstance(await failure_of(call), WorkerLost)
    await push.close()


@in_virtual_time
async def test_a_worker_that_leaves_in_mid_push_ends_the_session_after_the_bounded_silence() -> None:
    end, store = DecodeEnd(), ByteStore(64, seed=5)
    metrics = TransferMetrics(CollectorRegistry())
    sender = Sender(store, PREFILL, end.directory.connect, LoopClock(), metrics)
    session = sender.open(make_ticket(16), Deadline.after(60, LoopClock()))
    session.add_blocks(0, [0])
    await asyncio.sleep(1)
    end.directory.unregister(DECODE.worker_id)
    assert isinstance(await session.ended(), TransferTimeout)
    await sender.close()


@in_virtual_time
async def test_a_bug_in_the_port_ends_the_session_and_is_not_swallowed() -> None:
    end, store = DecodeEnd(), ByteStore(64, seed=5)

    async def broken(*_: object) -> None:
        raise KeyError("a bug")

    end.port.write = broken  # type: ignore[method-assign]
    metrics = TransferMetrics(CollectorRegistry())
    sender = Sender(store, PREFILL, end.directory.connect, LoopClock(), metrics)
    session = sender.open(make_ticket(16), Deadline.after(60, LoopClock()))
    session.add_blocks(0, range(4))
    error = await failure_of(session.finish(16))
    assert "a bug" in error.message
    await sender.close()


@in_virtual_time
async def test_closing_a_push_that_waits_leaves_no_task() -> None:
    end = DecodeEnd()
    push = await end.directory.connect(DECODE).open_push()
    await asyncio.sleep(0.1)
    await push.close()
    with pytest.raises(WorkerLost):
        await push.send(b"frame")
