"""The gRPC face of a PrefillWorker: decode, check the epoch, call, encode.

Owns the translation of errors into status codes and the `baton-error-bin` trailer; no policy. Runs on the IO
loop. The bridge's service is not here: a prefill worker only sends.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio

from core.errors import ServingError, StaleEpoch
from kv_transfer.grpc_transport import SERVER_OPTIONS
from prefill_worker.worker import PrefillWorker
from protos import codec
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

_log = logging.getLogger(__name__)

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def serve(worker: PrefillWorker, host: str) -> tuple[grpc.aio.Server, int]:
    """Serve `worker` on a free port of `host`; returns the started server and its port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(PrefillService(worker), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"[{host}]:0" if ":" in host else f"{host}:0")
    await server.start()
    return server, port


class PrefillService(WorkerServicer):
    """One method per RPC. A broken or cancelled Prefill call cancels its handler, and with it the work."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(  # noqa: N802
        self,
        request: pb.PrefillRequest,
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillReply],
    ) -> pb.PrefillReply:
        try:
            with self._typed_errors(request.receiver_epoch):
                return codec.prefill_reply(await self._worker.prefill(codec.prefill_job(request)))
        except ServingError as error:
            await _abort(context, error)

    async def Generate(  # noqa: N802
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent],
    ) -> None:
        try:
            with self._typed_errors(request.receiver_epoch):
                self._worker.generate(codec.generate_job(request))
        except ServingError as error:
            await _abort(context, error)

    async def Cancel(  # noqa: N802
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelReply]
    ) -> pb.CancelReply:
        try:
            with self._typed_errors(request.receiver_epoch):
                await self._worker.cancel(codec.cancel_job(request))
                return pb.CancelReply()
        except ServingError as error:
            await _abort(context, error)

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchEvent]
    ) -> AsyncIterator[pb.WatchEvent]:
        try:
            with self._typed_errors(request.receiver_epoch):
                async with aclosing(self._worker.watch()) as events:
                    async for event in events:
                        yield codec.encode_watch_event(event)
        except ServingError as error:
            await _abort(context, error)

    async def Metrics(  # noqa: N802
        self,
        request: pb.MetricsRequest,
        context: grpc.aio.ServicerContext[pb.MetricsRequest, pb.MetricsReply],
    ) -> pb.MetricsReply:
        try:
            with self._typed_errors(request.receiver_epoch):
                return pb.MetricsReply(exposition=await self._worker.metrics())
        except ServingError as error:
            await _abort(context, error)

    @contextmanager
    def _typed_errors(self, receiver_epoch: int) -> Iterator[None]:
        """Refuse a message that was meant for another incarnation; let nothing but a ServingError out."""
        if receiver_epoch != self._worker.ref.epoch:
            raise StaleEpoch(
                "the message was meant for another incarnation", worker_id=self._worker.ref.worker_id
            )
        try:
            yield
        except ServingError:
            raise
        except Exception as error:
            _log.exception("a call failed")
            raise ServingError(f"the worker failed ({type(error).__name__})") from error


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    context.set_trailing_metadata(((codec.ERROR_METADATA_KEY, codec.encode_error(error)),))
    await context.abort(_STATUS.get(error.http_status, grpc.StatusCode.INTERNAL), error.code)
