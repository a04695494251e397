"""A prefill process that hands one ticket over through staging memory, and can be caught at it.

Prints what it does, one JSON object a line. It halts in the middle of filling the slot of frame number
`halts_at`, if that is not 0, until a line comes on its standard input; or before it sends the slot through
its group, when decode knows of it and waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from core.clock import Deadline, MonotonicClock
from core.errors import ServingError
from core.ids import Epoch, Role, WorkerId, WorkerRef
from kv_transfer.config import BridgeConfig
from kv_transfer.cuda_ipc_transport import connect_on_device
from kv_transfer.device_thread import DeviceThread
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from kv_transfer.shm_transport import connect_as_configured
from kv_transfer.transport import DISTRIBUTED
from tests.integration.kv_transfer.ends import LAYOUT, WAYS
from tests.integration.kv_transfer.host_device import HostDevice
from tests.unit.kv_transfer.doubles import ByteStore, make_ticket, worker_ref


def tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class HaltingStore(ByteStore):
    """Halts half-way through writing the payload of the n-th frame to its slot."""

    halts_at = 0
    num_filled = 0

    def read_blocks_into(self, block_ids: Sequence[int], target: memoryview) -> None:
        self.num_filled += 1
        if self.num_filled != self.halts_at:
            super().read_blocks_into(block_ids, target)
            return
        payload, half = self.read_blocks(block_ids), len(target) // 2
        target[:half] = payload[:half]
        tell(event="halted")
        sys.stdin.readline()
        target[half:] = payload[half:]
        tell(event="went on")


async def main() -> None:
    spec = json.loads(sys.argv[1])
    decode = WorkerRef(WorkerId("decode-0"), Role.DECODE, Epoch(spec["epoch"]), spec["address"])
    store = HaltingStore(spec["num_blocks"], LAYOUT, seed=spec["seed"])
    groups = None
    if spec["way"] == DISTRIBUTED:
        # imported only here: torch takes seconds
        from tests.faults.kv_transfer.halting_groups import halting_groups

        groups = halting_groups(spec["halts_at"] if spec["halts_in"] == "sending" else 0, tell)
    if spec["halts_in"] == "filling":
        store.halts_at = spec["halts_at"]
    config = BridgeConfig(
        **WAYS[spec["way"]],
        staging_bytes=spec["staging_bytes"],
        staged_frame_bytes=spec["frame_bytes"],
        device_staging_bytes=spec["staging_bytes"],
        device_frame_bytes=spec["frame_bytes"],
        group_staging_bytes=spec["staging_bytes"],
        group_frame_bytes=spec["frame_bytes"],
        silence_s=60.0,
        group_s=60.0,
    )
    device = DeviceThread(HostDevice(store))
    prefill, clock = worker_ref(f"prefill-{spec['seed']}", Role.PREFILL), MonotonicClock()
    metrics = TransferMetrics(CollectorRegistry())
    connect = connect_on_device(config, device, connect_as_configured(config, groups=groups))
    sender = Sender(store, prefill, connect, clock, metrics, config)
    ticket = make_ticket(spec["num_blocks"] * LAYOUT.block_size, prefill, decode, LAYOUT)
    session = sender.open(ticket, Deadline.after(60, clock))
    session.add_blocks(0, range(spec["num_blocks"]))
    try:
        await session.finish(ticket.num_tokens)
        tell(event="ended", code="committed")
    except ServingError as error:
        tell(event="ended", code=error.code)
    await sender.close()


if __name__ == "__main__":
    asyncio.run(main())
