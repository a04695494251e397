"""CallThread: one thread for calls that block; DeviceThread: that of a worker's device; DeviceSpan: a part of
a region.

Calls run in the order in which they were made, so that a region is closed after the copies that were asked
for before, and never under one. Made and awaited on the IO loop, which a copy does not hold up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from core.errors import StagingLost, WorkerLost
from kv_transfer.device_memory import DeviceCopy, DeviceMemory, DeviceRegion

_log = logging.getLogger(__name__)

_SETTLE_S = 1.0  # how long a cancelled wait lets a copy that has begun come to its end

P = ParamSpec("P")
T = TypeVar("T")


class CallThread:
    """Starts at the first call, and ends with the process or by `close`."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def post(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._executor.submit(call, *args, **kwargs)

    async def call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A wait that is cancelled lets the call end first, within a bounded time."""
        running = asyncio.wrap_future(self.post(call, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait((running,), timeout=_SETTLE_S)
            if running.done() and not running.cancelled() and (error := running.exception()) is not None:
                _log.info("a call whose caller has gone failed: %r", error)
            raise

    def close(self) -> None:
        """Let what was asked for end, without waiting for it."""
        self._executor.shutdown(wait=False)


class DeviceThread(CallThread):
    """The thread on which a worker's bridge calls its device."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__("device copies")
        self.memory = memory


class DeviceSpan:
    """Bytes `offset` … of `region`. `on_failure` hears of a device that refuses a copy into it."""

    def __init__(
        self,
        thread: CallThread,
        region: DeviceRegion,
        offset: int,
        num_bytes: int,
        on_failure: Callable[[], None],
    ) -> None:
        self.region = region
        self.offset = offset
        self._thread = thread
        self._num_bytes = num_bytes
        self._on_failure = on_failure

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice, /) -> DeviceSpan:
        first, end, step = part.indices(self._num_bytes)
        assert step == 1
        return DeviceSpan(
            self._thread, self.region, self.offset + first, max(0, end - first), self._on_failure
        )

    def release(self) -> None:
        """Nothing is held: the region's owner closes it."""

    async def put(self, block_ids: Sequence[int], seed: int) -> int:
        """See DeviceRegion.put. Raises WorkerLost, for another try by another way, if the device refuses."""
        try:
            return await self._thread.call(self.region.put, self.offset, block_ids, seed)
        except (OSError, RuntimeError) as error:
            _log.warning("a copy to staging memory of the device failed: %r", error)
            self._on_failure()
            raise WorkerLost("the device does not copy to the staging memory") from error

    async def take(self, seed: int) -> DeviceCopy:
        """See DeviceRegion.take. Raises StagingLost if the device refuses."""
        try:
            return await self._thread.call(self.region.take, self.offset, self._num_bytes, seed)
        except (OSError, RuntimeError) as error:
            _log.warning("a copy from staging memory of the device failed: %r", error)
            self._on_failure()
            raise StagingLost("the device does not copy from the staging memory") from error
