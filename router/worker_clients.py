"""GrpcWorker: a worker of another process.

Owns one channel and the translation of gRPC's errors into ours, once: an error that the worker sent is that
error, any other failure of a call means that the worker is lost. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import grpc
import grpc.aio

from core.errors import DeadlineExceeded, RequestError, ServingError, WorkerError, WorkerLost
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
from core.peer_security import PeerSecurity
from core.role_change import RoleChange, RoleOrder
from protos import codec
from protos import inference_pb2 as pb
from protos.grpc_options import channel_options
from protos.inference_pb2_grpc import RolesStub, WorkerStub
from protos.role_codec import role_change, role_request

M = TypeVar("M")
T = TypeVar("T")

# a worker answers "too late" itself; this is for one that does not answer at all
_GRACE_S = 1.0
_METRICS_TIMEOUT_S = 5.0
_SNAPSHOT_TIMEOUT_S = 5.0
_CHANGE_TIMEOUT_S = 60.0
_NOTHING_TO_SHOW = PeerSecurity()


class GrpcWorker:
    """`Worker` over gRPC; connects with its first call. Each message names the incarnation it is meant
    for.
    """

    def __init__(self, ref: WorkerRef, security: PeerSecurity = _NOTHING_TO_SHOW) -> None:
        self._ref = ref
        self._is_closed = False
        self._metadata = security.metadata
        options, tls = channel_options(security), security.tls
        if tls is None:
            self._channel = grpc.aio.insecure_channel(ref.address, options=options)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
            self._channel = grpc.aio.secure_channel(ref.address, credentials, options=options)
        self._stub = WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        message = codec.prefill_request(job, self._ref.epoch)
        with self._translated():
            reply = await self._stub.Prefill(
                message, timeout=job.time_left_s + _GRACE_S, metadata=self._metadata
            )
        return self._read(codec.prefill_result, reply)

    async def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]:
        message = codec.generate_request(job, self._ref.epoch)
        with self._translated():
            call = self._stub.Generate(message, timeout=job.time_left_s + _GRACE_S, metadata=self._metadata)
            try:
                async for reply in call:
                    yield self._read(codec.decode_generate_event, reply)
            finally:
                call.cancel()

    async def lend(self, job: LendJob) -> LendResult:
        message = codec.lend_request(job, self._ref.epoch)
        with self._translated():
            reply = await self._stub.Lend(
                message, timeout=job.time_left_s + _GRACE_S, metadata=self._metadata
            )
        return self._read(codec.lend_result, reply)

    async def cancel(self, job: CancelJob) -> None:
        with self._translated():
            await self._stub.Cancel(codec.cancel_request(job, self._ref.epoch), metadata=self._metadata)

    async def watch(self) -> AsyncIterator[WatchEvent]:
        with self._translated():
            message = pb.WatchRequest(receiver_epoch=self._ref.epoch)
            call = self._stub.Watch(message, metadata=self._metadata)
            try:
                async for reply in call:
                    yield self._read(codec.decode_watch_event, reply)
            finally:
                call.cancel()

    async def snapshot(self, job: SnapshotJob) -> BlockPage:
        message = codec.snapshot_request(job, self._ref.epoch)
        with self._translated():
            reply = await self._stub.Snapshot(message, timeout=_SNAPSHOT_TIMEOUT_S, metadata=self._metadata)
        return self._read(codec.block_page, reply)

    async def metrics(self) -> bytes:
        message = pb.MetricsRequest(receiver_epoch=self._ref.epoch)
        with self._translated():
            reply = await self._stub.Metrics(message, timeout=_METRICS_TIMEOUT_S, metadata=self._metadata)
        exposition: bytes = reply.exposition
        return exposition

    async def change_role(self, order: RoleOrder) -> RoleChange:
        """Have it take the role that is ordered, and wait until it serves that."""
        stub = RolesStub(self._channel)  # type: ignore[no-untyped-call]
        with self._translated():
            reply = await stub.Change(role_request(order), timeout=_CHANGE_TIMEOUT_S, metadata=self._metadata)
        return self._read(role_change, reply)

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close(grace=None)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Failures of a call as our errors. Our own closing of the channel is the worker's loss too: it
        cancels calls in flight and refuses new ones.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        except grpc.aio.UsageError as error:
            raise self._lost("closed") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_closed or task is None or task.cancelling():
                raise
            raise self._lost("closed") from None

    def _read(self, decode: Callable[[M], T], message: M) -> T:
        """An answer that cannot be read is the worker's fault, not the client's."""
        try:
            return decode(message)
        except RequestError as error:
            raise WorkerError(
                f"worker {self._ref.worker_id} sent what cannot be read: {error.message}",
                worker_id=self._ref.worker_id,
            ) from error

    def _translate(self, error: grpc.aio.AioRpcError) -> ServingError:
        trailer = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
        for key, value in trailer:
            if key == codec.ERROR_METADATA_KEY and isinstance(value, bytes):
                return codec.decode_error(value)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the worker did not answer before the deadline")
        return self._lost(error.code().name)

    def _lost(self, why: str) -> WorkerLost:
        return WorkerLost(
            f"the connection to worker {self._ref.worker_id} broke ({why})", worker_id=self._ref.worker_id
        )
