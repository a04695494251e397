"""Decode's end of the bridge as a process with a pool of its own, and what prefill's end shares with it.

Decode's process prints its epoch and port; then it answers each ticket id on its standard input with a digest
of the blocks that it holds for that ticket, read back from its pool. Writes run on a step thread, as a
worker's do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from functools import partial

import grpc.aio
import xxhash
from prometheus_client import CollectorRegistry

from core.block_hash import hash_blocks, root_hash
from core.errors import ReservationRefused, TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import RequestId, Role, TicketId, WorkerId, WorkerRef, new_epoch, new_ticket_id
from core.kv_layout import KVLayout
from engine.kv.pool import KVPool
from engine.step_thread import StepThread
from kv_transfer.config import ReceiverConfig
from kv_transfer.grpc_transport import add_kv_transfer_servicer
from kv_transfer.metrics import TransferMetrics
from kv_transfer.receiver import Receiver
from kv_transfer.shm_acceptor import offer_shared_memory
from kv_transfer.transport import WriteCheck
from protos.grpc_options import SERVER_OPTIONS

DECODE = WorkerId("decode-0")
PREFILL = WorkerId("prefill-0")


class PoolPort:
    """A ReservationPort over a pool: one ticket after the other has all of it."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._tables: dict[TicketId, list[int]] = {}
        self._thread = StepThread("step", lambda: False, lambda: None)
        self._thread.start()

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        if ticket.num_blocks > self._pool.num_blocks:
            raise ReservationRefused("no room", num_free=self._pool.num_blocks)
        # backwards, so that a block's place is not its index
        self._tables = {ticket.ticket_id: list(reversed(range(ticket.num_blocks)))}
        return ()

    async def write(
        self,
        ticket_id: TicketId,
        first_index: int,
        num_blocks: int,
        payload: memoryview,
        check: WriteCheck | None,
    ) -> None:
        block_ids = self._table(ticket_id)[first_index : first_index + num_blocks]
        observe = None if check is None else check.observe
        await self._thread.call(partial(self._pool.write_blocks, block_ids, payload, observe))
        if check is not None and not check.is_right:
            raise TransferCorrupt("what arrived does not match its checksum", ticket_id=ticket_id)

    async def commit(self, ticket_id: TicketId, num_tokens: int, num_pushed_blocks: int) -> None:
        self._table(ticket_id)

    async def abort(self, ticket_id: TicketId, reason: str, time_left_s: float) -> None:
        self._tables.pop(ticket_id, None)

    async def keepalive(self, ticket_id: TicketId) -> None:
        self._table(ticket_id)

    def close(self) -> None:
        self._thread.stop()

    async def digest(self, ticket_id: TicketId) -> str:
        return await self._thread.call(partial(digest, self._pool, self._table(ticket_id)))

    def _table(self, ticket_id: TicketId) -> list[int]:
        if ticket_id not in self._tables:
            raise TicketExpired("another ticket came", ticket_id=ticket_id)
        return self._tables[ticket_id]


def digest(pool: KVPool, block_ids: list[int]) -> str:
    """Of these blocks' bytes, in this order."""
    return xxhash.xxh3_64_hexdigest(pool.read_blocks(block_ids))


def make_ticket(num_tokens: int, prefill: WorkerRef, decode: WorkerRef, layout: KVLayout) -> HandoffTicket:
    names = hash_blocks(root_hash("", layout.fingerprint, ""), range(num_tokens), layout.block_size)
    return HandoffTicket(new_ticket_id(), RequestId("r"), prefill, decode, layout, num_tokens, tuple(names))


def decode_command(layout: KVLayout, num_blocks: int, device: str) -> list[str]:
    """What starts decode's end, in the repository's root."""
    command = [sys.executable, "-m", "benchmarks.gpu.handoff_ends", "--layout", json.dumps(asdict(layout))]
    return [*command, "--num-blocks", str(num_blocks), "--device", device]


async def serve(layout: KVLayout, num_blocks: int, device: str) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    ref = WorkerRef(DECODE, Role.DECODE, new_epoch(), f"127.0.0.1:{port}")
    reservations = PoolPort(KVPool(layout, num_blocks, device))
    receiver = Receiver(reservations, ref, layout, TransferMetrics(CollectorRegistry()))
    offer_shared_memory(receiver, ReceiverConfig())
    add_kv_transfer_servicer(server, receiver)
    await server.start()
    print(ref.epoch, port, flush=True)
    while question := await asyncio.to_thread(sys.stdin.readline):
        print(await reservations.digest(TicketId(question.strip())), flush=True)
    await server.stop(0)
    await receiver.close()
    reservations.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    asyncio.run(serve(KVLayout(**json.loads(options.layout)), options.num_blocks, options.device))


if __name__ == "__main__":
    main()
