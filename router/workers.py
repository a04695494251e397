"""What the router needs of a worker and of whoever knows the workers: Worker, Connect, MembershipSource.

Protocols only. `worker_clients.GrpcWorker` fulfils `Worker` over gRPC; a worker in the same process fulfils
it through `InProcessWorker`. All coroutines run on the router's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from core.ids import WorkerRef
from core.jobs import (
    BlockPage,
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SnapshotJob,
    WatchEvent,
)
from core.worker_status import Announcement


class WorkerSurface(Protocol):
    """What a prefill or a decode worker offers, wherever it lives. Errors are `core.errors`."""

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Read a prompt, sample first tokens, hand the KV over. Cancelling the call cancels the work."""
        ...

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        """Tokens until each sample of the job has a finish reason. Closing the iterator detaches from the
        job.
        """
        ...

    async def lend(self, job: LendJob) -> LendResult:
        """Send cached blocks to a prefill worker. Cancelling the call cancels the transfer."""
        ...

    async def cancel(self, job: CancelJob) -> None:
        """Stop what this worker does for the request; unknown names are not an error."""
        ...

    def watch(self) -> AsyncIterator[WatchEvent]:
        """The digest of the cached blocks, then numbered changes and a status now and then, until the worker
        is gone.
        """
        ...

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        """Some of the cached blocks, as of the number that the page says."""
        ...

    async def metrics(self) -> bytes:
        """The worker's metrics in Prometheus' text format."""
        ...


class Worker(WorkerSurface, Protocol):
    """One incarnation of a worker as the router holds it: its surface, and a connection to let go of."""

    async def close(self) -> None:
        """Give up the connection, not the worker. Calls in flight fail with WorkerLost."""
        ...


Connect = Callable[[WorkerRef], Worker]
"""How a worker is reached; must not block and must not fail: a worker that cannot be reached fails its
calls.
"""


class MembershipSource(Protocol):
    """Who serves at present. Polled about twice a second; any exception but cancellation means "unknown",
    the router then keeps its last table.
    """

    async def announcements(self) -> tuple[Announcement, ...]: ...


class InProcessWorker:
    """A worker of this process (or any object with its surface), with nothing to close."""

    def __init__(self, surface: WorkerSurface) -> None:
        self._surface = surface

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        return await self._surface.prefill(job)

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        return self._surface.generate(job)

    async def lend(self, job: LendJob) -> LendResult:
        return await self._surface.lend(job)

    async def cancel(self, job: CancelJob) -> None:
        await self._surface.cancel(job)

    def watch(self) -> AsyncIterator[WatchEvent]:
        return self._surface.watch()

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        return await self._surface.snapshot(job)

    async def metrics(self) -> bytes:
        return await self._surface.metrics()

    async def close(self) -> None:
        return None
