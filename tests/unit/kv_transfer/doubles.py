"""Doubles of the bridge's neighbours: a store of plain bytes, a port that reserves in it, tickets, virtual
time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from prometheus_client import CollectorRegistry

from core.block_hash import BlockHash
from core.errors import ReservationRefused, ServingError, TicketExpired, TransferCorrupt, WorkerLost
from core.handoff import HandoffTicket
from core.ids import Epoch, RequestId, Role, TicketId, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.kv_layout import KVLayout
from kv_transfer.loopback import LoopbackDirectory
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.transport import (
    Carriage,
    CommitClaim,
    CommitReceipt,
    Fence,
    Pair,
    Payload,
    PushStream,
    Room,
    Transport,
    WriteCheck,
)

# a busy machine is no failure
quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LAYOUT = KVLayout(model="toy", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)
"""256 bytes a block."""


class _VirtualSelector(selectors.DefaultSelector):
    """Waits by moving the clock instead of the world's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            # only another thread could wake this loop
            ready = super().select(5.0)
            assert ready, "nothing will ever happen on this loop"
        elif not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose sleeps take no time; also a Clock."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def now(self) -> float:
        return self._virtual.now


class LoopClock:
    """The running loop's time as a Clock."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on a VirtualLoop; it fails when the test leaves a task behind."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            await test(*args, **kwargs)
            await assert_no_task_left()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    del run.__wrapped__  # pytest must see a plain function, with the test's own parameters
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


async def assert_no_task_left() -> None:
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


class ByteStore:
    """A BlockStore of plain bytes; counts what it is asked for."""

    def __init__(self, num_blocks: int, layout: KVLayout = LAYOUT, seed: int | None = None) -> None:
        self._layout = layout
        size = num_blocks * layout.block_bytes
        self.data = bytearray(random.Random(seed).randbytes(size)) if seed is not None else bytearray(size)
        self.blocks_read: list[int] = []

    @property
    def layout(self) -> KVLayout:
        return self._layout

    def read_blocks(self, block_ids: Sequence[int]) -> memoryview:
        self.blocks_read += block_ids
        return memoryview(b"".join([self.block(block_id) for block_id in block_ids]))

    def read_blocks_into(self, block_ids: Sequence[int], target: memoryview) -> None:
        target[:] = self.read_blocks(block_ids)

    def write_blocks(
        self,
        block_ids: Sequence[int],
        payload: memoryview | bytes,
        observe: Callable[[memoryview], object] | None = None,
    ) -> None:
        size = self._layout.block_bytes
        assert len(payload) == len(block_ids) * size
        for position, block_id in enumerate(block_ids):
            self.data[block_id * size : (block_id + 1) * size] = payload[
                position * size : (position + 1) * size
            ]
            if observe is not None:
                observe(memoryview(self.block(block_id)))

    def block(self, block_id: int) -> bytes:
        size = self._layout.block_bytes
        return bytes(memoryview(self.data)[block_id * size : (block_id + 1) * size])


class StorePort:
    """A ReservationPort over a ByteStore. `gate`, cleared, lets nothing through; the test calls `expire`."""

    def __init__(self, store: ByteStore, num_blocks: int, held: Sequence[int] = ()) -> None:
        self.store = store
        self.held = tuple(held)
        self.tables: dict[TicketId, list[int]] = {}
        self.committed: dict[TicketId, tuple[int, int]] = {}
        self.aborted: dict[TicketId, str] = {}
        self.offers: list[TicketId] = []
        self.writes: list[tuple[TicketId, int, int]] = []
        self.keepalives: list[float] = []
        self.refusal: ServingError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self._free = list(range(num_blocks))

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        await self.gate.wait()
        self.offers.append(ticket.ticket_id)
        if self.refusal is not None:
            raise self.refusal
        if ticket.ticket_id in self.aborted:
            raise TicketExpired("aborted before it was offered")
        if len(self._free) < ticket.num_blocks:
            raise ReservationRefused("no room", num_free=len(self._free))
        self.tables[ticket.ticket_id] = [self._free.pop() for _ in range(ticket.num_blocks)]
        return self.held

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: Payload,
        check: WriteCheck | None,
    ) -> None:
        await self.gate.wait()
        table = self._table(ticket_id)
        if (ticket_id, first_index, num_blocks) in self.writes:
            return
        self.writes.append((ticket_id, first_index, num_blocks))
        block_ids = table[first_index : first_index + num_blocks]
        if isinstance(payload, memoryview):
            self.store.write_blocks(block_ids, payload, None if check is None else check.observe)
        else:
            payload.write_to(block_ids)
        if check is not None and not check.is_right:
            self.expire(ticket_id)
            raise TransferCorrupt("what arrived does not match its checksum", ticket_id=ticket_id)

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        await self.gate.wait()
        self._table(ticket_id)
        assert ticket_id not in self.committed, "committed twice"
        self.committed[ticket_id] = (num_tokens, num_pushed_blocks)

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        self.expire(ticket_id)
        self.aborted[ticket_id] = reason

    async def keepalive(self, ticket_id: TicketId) -> None:
        self._table(ticket_id)
        self.keepalives.append(asyncio.get_running_loop().time())

    def expire(self, ticket_id: TicketId) -> None:
        self._free += self.tables.pop(ticket_id, [])

    def block(self, ticket_id: TicketId, index: int) -> bytes:
        return self.store.block(self.tables[ticket_id][index])

    def _table(self, ticket_id: TicketId) -> list[int]:
        table = self.tables.get(ticket_id)
        if table is None:
            raise TicketExpired("no such reservation", ticket_id=ticket_id)
        return table


def worker_ref(name: str, role: Role, address: str = "") -> WorkerRef:
    return WorkerRef(WorkerId(name), role, new_epoch(), address)


PREFILL = WorkerRef(WorkerId("prefill-0"), Role.PREFILL, Epoch(7), "")
DECODE = WorkerRef(WorkerId("decode-0"), Role.DECODE, Epoch(11), "loopback:decode-0")


def make_ticket(
    num_tokens: int,
    prefill: WorkerRef = PREFILL,
    decode: WorkerRef = DECODE,
    layout: KVLayout = LAYOUT,
    ticket_id: TicketId | None = None,
) -> HandoffTicket:
    num_full = num_tokens // layout.block_size
    return HandoffTicket(
        ticket_id=ticket_id or new_ticket_id(),
        request_id=RequestId("cmpl-1"),
        prefill=prefill,
        decode=decode,
        layout=layout,
        num_tokens=num_tokens,
        block_hashes=tuple(BlockHash(index.to_bytes(16, "little")) for index in range(1, num_full + 1)),
    )


class DecodeEnd:
    """A receiver with its port, store and counters, reachable by loopback."""

    def __init__(self, num_blocks: int = 64, held: Sequence[int] = (), ref: WorkerRef = DECODE) -> None:
        self.ref = ref
        self.registry = CollectorRegistry()
        self.store = ByteStore(num_blocks)
        self.port = StorePort(self.store, num_blocks, held)
        self.receiver = Receiver(self.port, ref, LAYOUT, TransferMetrics(self.registry), LoopClock())
        self.directory = LoopbackDirectory()
        self.directory.register(ref.worker_id, self.receiver)

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


class TroubledTransport:
    """A transport in which a test can break things; else the wrapped one."""

    name = "troubled"
    carriage = Carriage(name)

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.is_down = False
        self.is_silent = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.alter: Callable[[bytes], bytes] = lambda frame: frame
        self.max_frames_a_stream: int | None = None
        self.lost_commits = 0
        self.num_streams = 0
        self.num_frames = 0
        self.num_aborts = 0
        self.num_offers = 0
        self.is_closed = False

    async def meet(self, pair: Pair) -> None:
        await self._pass()
        await self.inner.meet(pair)

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        self.num_offers += 1
        await self._pass()
        return await self.inner.offer(ticket, time_left_s)

    async def open_push(self) -> PushStream:
        await self._pass()
        self.num_streams += 1
        return _TroubledPush(self, await self.inner.open_push())

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        await self._pass()
        receipt = await self.inner.commit(fence, claim)
        if self.lost_commits > 0:
            self.lost_commits -= 1
            raise WorkerLost("the reply got lost")
        return receipt

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        self.num_aborts += 1
        await self._pass()
        await self.inner.abort(fence, reason, time_left_s)

    async def keepalive(self, fence: Fence) -> None:
        await self._pass()
        await self.inner.keepalive(fence)

    async def close(self) -> None:
        self.is_closed = True
        await self.inner.close()

    async def _pass(self) -> None:
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        if self.is_down:
            raise WorkerLost("down")


class _TroubledPush:
    def __init__(self, transport: TroubledTransport, inner: PushStream) -> None:
        self._transport = transport
        self._inner = inner
        self._left = transport.max_frames_a_stream
        self._broken = asyncio.Event()

    async def room(self, ticket_id: TicketId, num_bytes: int) -> Room | None:
        await self._transport.has_room.wait()
        return await self._inner.room(ticket_id, num_bytes)

    async def send(self, frame: bytes) -> None:
        await self._transport._pass()
        if self._left is not None:
            if self._left == 0:
                self._broken.set()
                raise WorkerLost("the stream broke")
            self._left -= 1
        self._transport.num_frames += 1
        await self._inner.send(self._transport.alter(frame))

    async def acks(self) -> AsyncIterator[bytes]:
        acks = aiter(self._inner.acks())
        while True:
            reading = asyncio.ensure_future(_next(acks))
            breaking = asyncio.ensure_future(self._broken.wait())
            try:
                await asyncio.wait((reading, breaking), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise WorkerLost("the stream broke")
                ack = reading.result()
            finally:
                reading.cancel()
                breaking.cancel()
                await asyncio.gather(reading, breaking, return_exceptions=True)
            if ack is None:
                return
            yield ack

    async def close(self) -> None:
        await self._inner.close()


async def _next(items: AsyncIterator[bytes]) -> bytes | None:
    return await anext(items, None)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait in small steps of the loop's time until `condition()`; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions are states of doubles, without events
            await asyncio.sleep(0.01)


async def failure_of(work: Awaitable[Any]) -> ServingError:
    try:
        await work
    except ServingError as error:
        return error
    raise AssertionError("it did not fail")
