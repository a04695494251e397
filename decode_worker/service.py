"""The gRPC face of a DecodeWorker: the calls of routers, and beside them the bridge's.

Owns the check of the receiver's epoch and the translation of errors into status codes and the
`baton-error-bin` trailer; no policy. Runs on the IO loop. A Generate call that breaks detaches from its
stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio

from core.errors import ServingError, StaleEpoch
from decode_worker.worker import DecodeWorker
from kv_transfer.grpc_transport import SERVER_OPTIONS, add_kv_transfer_servicer
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


async def serve(worker: DecodeWorker, host: str) -> tuple[grpc.aio.Server, int]:
    """Serve `worker` and its receiver on a free port of `host`; returns the started server and its port."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(DecodeService(worker), server)  # type: ignore[no-untyped-call]
    add_kv_transfer_servicer(server, worker.receiver)
    port = server.add_insecure_port(f"[{host}]:0" if ":" in host else f"{host}:0")
    await server.start()
    return server, port


class DecodeService(WorkerServicer):
    """One method for each call of `Worker`."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Prefill(  # noqa: N802
        self,
        request: pb.PrefillRequest,
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillReply],
    ) -> pb.PrefillReply:
        try:
            with self._checked(request.receiver_epoch):
                return codec.prefill_reply(await self._worker.prefill(codec.prefill_job(request)))
        except ServingError as error:
            await _abort(context, error)

    async def Generate(  # noqa: N802
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent],
    ) -> AsyncIterator[pb.GenerateEvent]:
        try:
            with self._checked(request.receiver_epoch):
                async with aclosing(self._worker.generate(codec.generate_job(request))) as events:
                    async for event in events:
                        yield codec.encode_generate_event(event)
        except ServingError as error:
            await _abort(context, error)

    async def Cancel(  # noqa: N802
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelReply]
    ) -> pb.CancelReply:
        try:
            with self._checked(request.receiver_epoch):
                await self._worker.cancel(codec.cancel_job(request))
                return pb.CancelReply()
        except ServingError as error:
            await _abort(context, error)

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchEvent]
    ) -> AsyncIterator[pb.WatchEvent]:
        try:
            with self._checked(request.receiver_epoch):
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
            with self._checked(request.receiver_epoch):
                return pb.MetricsReply(exposition=await self._worker.metrics())
        except ServingError as error:
            await _abort(context, error)

    @contextmanager
    def _checked(self, receiver_epoch: int) -> Iterator[None]:
        """Refuse a message for another incarnation; let out nothing but ServingErrors."""
        own = self._worker.ref
        if receiver_epoch != own.epoch:
            raise StaleEpoch("the message was meant for another incarnation", worker_id=own.worker_id)
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
