"""Memory of decode's device between two ends of a host: who gets it, who goes without, when it is freed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from core.errors import HandoffError, InvalidConfig, TransferCorrupt
from core.ids import new_epoch
from kv_transfer.codec import decode_ack, encode_device_frame, payload_seed
from kv_transfer.config import BridgeConfig, CudaIpc, Distributed, ReceiverConfig, SharedMemory
from kv_transfer.cuda_ipc_transport import connect_on_device
from kv_transfer.device_thread import DeviceSpan, DeviceThread
from kv_transfer.ipc_acceptor import offer_device_memory
from kv_transfer.ipc_handshake import attach_device
from kv_transfer.shm_handshake import Fallback, Hello
from kv_transfer.shm_transport import connect_as_configured
from kv_transfer.transport import CUDA_IPC, SHM, Fence
from tests.integration.kv_transfer.ends import LAYOUT, DecodeEnd, PrefillEnd, decode_end, no_task_is_left
from tests.integration.kv_transfer.host_device import HostDevice, HostRegion
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, failure_of, until

BLOCK = LAYOUT.block_bytes
CONFIG = BridgeConfig(
    device_frame_bytes=4 * BLOCK,
    device_staging_bytes=16 * BLOCK,
    attach_again_s=0.2,
    staging_bytes=16 << 20,
    distributed=Distributed.NEVER,
)
"""Four slots of four blocks."""


@dataclass
class Ends:
    decode: DecodeEnd
    prefill: PrefillEnd


@asynccontextmanager
async def both(config: BridgeConfig = CONFIG, receiver: ReceiverConfig | None = None) -> AsyncIterator[Ends]:
    async with decode_end(StorePort(ByteStore(256, LAYOUT), 256), receiver) as decode:
        ends = Ends(decode, PrefillEnd(decode.ref, config, ByteStore(64, LAYOUT, seed=1)))
        try:
            yield ends
        finally:
            await ends.prefill.sender.close()
        await until(lambda: decode.device_acceptor.num_bytes == 0, 5.0)
        assert decode.device_staging_bytes() == 0
    await no_task_is_left()


async def test_one_memory_serves_all_tickets_of_a_pair_and_is_preferred_to_shared_memory() -> None:
    async with both() as ends:
        for _ in range(3):
            ticket = await ends.prefill.hand_over(40)
            assert ends.decode.holds(ticket, ends.prefill.store)
            assert ends.decode.device_staging_bytes() == 16 * BLOCK
        await asyncio.gather(*(ends.prefill.hand_over(7) for _ in range(8)))
        assert ends.decode.received_bytes(CUDA_IPC) == (120 + 56) * BLOCK
        assert ends.decode.staging_bytes() == 0, "nobody has asked for shared memory"


class Refusing(HostDevice):
    """A device that opens no handle."""

    def open(self, handle: bytes, num_bytes: int) -> HostRegion:
        raise OSError("invalid device context")


class Exhausted(HostDevice):
    def allocate(self, num_bytes: int) -> HostRegion:
        raise RuntimeError("out of memory")


def on(device: type[HostDevice], device_id: str = "host") -> Callable[[Ends], None]:
    """Prefill's device is another one."""

    def change(ends: Ends) -> None:
        ends.prefill.device.memory = device(ends.prefill.store, device_id)

    return change


def full(ends: Ends) -> None:
    ends.decode.device_acceptor._device.memory = Exhausted(ends.decode.port.store)


def wrong_token(ends: Ends) -> None:
    acceptor = ends.decode.device_acceptor
    acceptor.address = replace(acceptor.address, token=bytes(16))


def other_host(ends: Ends) -> None:
    acceptor = ends.decode.device_acceptor
    acceptor.address = replace(acceptor.address, host_id="elsewhere")


WAYS_TO_FAIL: dict[str, tuple[Fallback, Callable[[Ends], None], int]] = {
    "the handle cannot be opened": (Fallback.UNSUPPORTED, on(Refusing), 1 << 30),
    "the devices are no peers": (Fallback.UNREACHABLE, on(HostDevice, "another"), 1 << 30),
    "decode's device has no memory left": (Fallback.UNSUPPORTED, full, 1 << 30),
    "no room for another pair": (Fallback.LIMIT, lambda ends: None, 15 * BLOCK),
    "a wrong token": (Fallback.REFUSED, wrong_token, 1 << 30),
    "another host": (Fallback.OTHER_HOST, other_host, 1 << 30),
}


@pytest.mark.parametrize("next_way", [SHM, "grpc"])
@pytest.mark.parametrize("case", list(WAYS_TO_FAIL))
async def test_where_it_cannot_be_had_payloads_go_the_next_way_and_the_reason_is_counted(
    case: str, next_way: str
) -> None:
    reason, change, max_bytes = WAYS_TO_FAIL[case]
    shm = SharedMemory.AUTO if next_way == SHM else SharedMemory.NEVER
    receiver = ReceiverConfig(shm=shm, max_device_staging_bytes=max_bytes)
    async with both(replace(CONFIG, shm=shm), receiver) as ends:
        change(ends)
        for count in (1, 2):
            ticket = await ends.prefill.hand_over(10)
            assert ends.decode.holds(ticket, ends.prefill.store)
            assert ends.prefill.num_fallbacks(f"cuda_ipc_{reason}") == count
        assert ends.decode.received_bytes(next_way) == 20 * BLOCK
        assert ends.decode.received_bytes(CUDA_IPC) == 0


@pytest.mark.parametrize("case", list(WAYS_TO_FAIL))
async def test_where_it_is_required_and_cannot_be_had_the_handoff_is_refused_and_nothing_stays_reserved(
    case: str,
) -> None:
    reason, change, max_bytes = WAYS_TO_FAIL[case]
    receiver = ReceiverConfig(max_device_staging_bytes=max_bytes)
    async with both(replace(CONFIG, cuda_ipc=CudaIpc.REQUIRED), receiver) as ends:
        change(ends)
        error = await failure_of(ends.prefill.open(ends.prefill.ticket(160)).offered())
        assert type(error) is HandoffError
        assert error.details["reason"] == reason
        assert ends.decode.port.tables == {}


async def test_a_worker_without_a_device_does_not_start_where_it_is_required() -> None:
    async with both() as ends:
        required = ReceiverConfig(cuda_ipc=CudaIpc.REQUIRED)
        with pytest.raises(InvalidConfig, match="cuda_ipc"):
            offer_device_memory(ends.decode.receiver, required, None)
        offer_device_memory(ends.decode.receiver, ReceiverConfig(), None)
        connect = connect_as_configured(CONFIG)
        with pytest.raises(InvalidConfig, match="cuda_ipc"):
            connect_on_device(replace(CONFIG, cuda_ipc=CudaIpc.REQUIRED), None, connect)
        assert connect_on_device(CONFIG, None, connect) is connect


class Breaking(HostRegion):
    """The third copy into it fails, and every later one."""

    num_puts = 0

    def put(self, offset: int, block_ids: object, seed: int) -> int:
        self.num_puts += 1
        if self.num_puts > 2:
            raise RuntimeError("an illegal memory access was encountered")
        return super().put(offset, block_ids, seed)  # type: ignore[arg-type]


async def test_a_device_that_fails_in_mid_push_costs_no_block_the_rest_goes_the_next_way() -> None:
    async with both() as ends:
        device = ends.prefill.device.memory
        assert isinstance(device, HostDevice)
        device.region_type = Breaking
        ticket = await ends.prefill.hand_over(40)
        assert ends.decode.holds(ticket, ends.prefill.store)
        assert ends.decode.received_bytes(CUDA_IPC) == 8 * BLOCK
        assert ends.decode.received_bytes(SHM) + ends.decode.received_bytes("grpc") == 32 * BLOCK


async def test_blocks_that_are_in_flight_when_the_memory_is_lost_are_committed() -> None:
    async with both(replace(CONFIG, shm=SharedMemory.NEVER)) as ends:
        ticket = ends.prefill.ticket(10 * 16)
        session = ends.prefill.open(ticket)
        await session.offered()
        ends.decode.port.gate.clear()
        session.add_blocks(0, range(8))
        await asyncio.sleep(0.1)
        transport = ends.prefill.sender._peers._peers[ends.decode.ref].transport
        await ends.decode.device_acceptor.close()
        await until(lambda: transport.staging is None)  # type: ignore[attr-defined]
        ends.decode.port.gate.set()
        session.add_blocks(8, range(8, 10))
        await session.finish(ticket.num_tokens)
        assert ends.decode.holds(ticket, ends.prefill.store)


async def test_a_frame_outside_its_memory_or_changed_after_it_was_sent_ends_its_ticket() -> None:
    async with both() as ends:
        end = ends.prefill
        for case in ("outside", "changed"):
            transport = end.connect(ends.decode.ref)
            ticket = end.ticket(64)
            await transport.offer(ticket, 5.0)
            push = await transport.open_push()
            room = await push.room(ticket.ticket_id, BLOCK)
            assert room is not None
            span = room.memory
            assert isinstance(span, DeviceSpan)
            assert isinstance(span.region, HostRegion)
            digest = await span.put([0], payload_seed(ticket.ticket_id))
            place = replace(room.place, offset=16 * BLOCK - 1) if case == "outside" else room.place
            if case == "changed":
                span.region.view[span.offset + 5] ^= 1
            await push.send(encode_device_frame(Fence.of(ticket), 0, 1, BLOCK, digest, place))
            assert isinstance(decode_ack(await anext(push.acks())).error, TransferCorrupt)
            assert ticket.ticket_id in ends.decode.port.aborted
            await push.close()
            await transport.close()
        assert ends.decode.port.writes == []


class Keeping(HostDevice):
    """Remembers what it has allocated."""

    def __init__(self, store: ByteStore) -> None:
        super().__init__(store)
        self.regions: list[HostRegion] = []

    def allocate(self, num_bytes: int) -> HostRegion:
        self.regions.append(super().allocate(num_bytes))
        return self.regions[-1]


async def test_memory_whose_writer_has_said_nothing_is_not_freed_while_its_process_lives() -> None:
    async with decode_end(StorePort(ByteStore(64, LAYOUT), 64)) as decode:
        acceptor = decode.device_acceptor
        thread = DeviceThread(HostDevice(ByteStore(64, LAYOUT)))
        hello = Hello(acceptor.address.token, decode.ref.epoch, new_epoch(), BLOCK)
        keeping = Keeping(decode.port.store)
        acceptor._device.memory = keeping
        opened = await attach_device(thread, acceptor.address, hello, 1.0)
        opened.connection.close()  # without a goodbye: its last copies may still be on their way
        await asyncio.sleep(0.2)
        assert acceptor.num_bytes == BLOCK
        again = replace(hello, sender_epoch=new_epoch())
        polite = await attach_device(thread, acceptor.address, again, 1.0)
        assert acceptor.num_bytes == 2 * BLOCK
        polite.close()
        await until(lambda: acceptor.num_bytes == BLOCK)
        thread.close()
        await acceptor.close()
        assert [region.is_closed for region in keeping.regions] == [False, True]
    keeping.regions[0].close()
    opened.slots.region.close()


async def test_decode_that_goes_lets_prefill_go_first() -> None:
    async with both(replace(CONFIG, shm=SharedMemory.NEVER)) as ends:
        await ends.prefill.hand_over(3)
        await ends.decode.device_acceptor.close()
        assert ends.decode.device_staging_bytes() == 0
        await ends.prefill.hand_over(3)
        assert ends.prefill.num_fallbacks(f"cuda_ipc_{Fallback.UNREACHABLE}") == 1
