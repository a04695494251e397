"""Two ends of a host that may share memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kv_transfer.config import BridgeConfig, CudaIpc, Distributed, ReceiverConfig
from kv_transfer.shm_memory import create_memory
from tests.integration.kv_transfer.ends import LAYOUT, DecodeEnd, PrefillEnd, decode_end, no_task_is_left
from tests.unit.kv_transfer.doubles import ByteStore, StorePort, until

BLOCK = LAYOUT.block_bytes
CONFIG = BridgeConfig(
    staged_frame_bytes=4 * BLOCK,
    staging_bytes=16 * BLOCK,
    attach_again_s=0.2,
    cuda_ipc=CudaIpc.NEVER,
    distributed=Distributed.NEVER,
)
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
