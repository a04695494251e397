"""The gRPC face of a worker: decode, check the epoch, call, encode.

Owns the check of who calls and of the receiver's epoch, and the translation of errors into status codes and
the `baton-error-bin` trailer; no policy. Serves any object with the workers' surface, whatever its role: a
phase that it lacks answers with the error that the worker raises. Runs on the IO loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from core.errors import ServingError, StaleEpoch, Unauthenticated
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
from core.peer_security import TOKEN_METADATA_KEY, ClusterToken, PeerSecurity
from core.role_change import RoleChange, RoleOrder
from protos import codec
from protos import inference_pb2 as pb
from protos.grpc_options import SERVER_OPTIONS
from protos.inference_pb2_grpc import (
    RolesServicer,
    WorkerServicer,
    add_RolesServicer_to_server,
    add_WorkerServicer_to_server,
)
from protos.role_codec import role_order, role_reply

E = TypeVar("E")
M = TypeVar("M")
Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class ServedWorker(Protocol):
    """What is served of a worker."""

    @property
    def ref(self) -> WorkerRef: ...

    async def prefill(self, job: PrefillJob) -> PrefillResult: ...

    def generate(self, job: GenerateJob) -> AsyncIterator[GenerateEvent]: ...

    async def lend(self, job: LendJob) -> LendResult: ...

    async def cancel(self, job: CancelJob) -> None: ...

    def watch(self) -> AsyncIterator[WatchEvent]: ...

    async def snapshot(self, job: SnapshotJob) -> BlockPage: ...

    async def metrics(self) -> bytes: ...


class RoleChanger(Protocol):
    """A worker that can run both phases."""

    @property
    def ref(self) -> WorkerRef: ...

    async def change_role(self, order: RoleOrder) -> RoleChange: ...


def add_role_service(server: grpc.aio.Server, worker: RoleChanger) -> None:
    """Let `worker` be told to change its role, by whoever may call it at all."""
    add_RolesServicer_to_server(RoleService(worker), server)  # type: ignore[no-untyped-call]


async def serve_worker(
    worker: ServedWorker,
    host: str,
    security: PeerSecurity,
    add_services: Callable[[grpc.aio.Server], None] | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Serve `worker`, and what `add_services` adds, on a free port of `host` to those whom `security` admits.

    Returns the started server and its port. Raises RuntimeError when the host cannot be bound.
    """
    guards = [] if security.token is None else [TokenGuard(security.token)]
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=guards)
    add_WorkerServicer_to_server(WorkerService(worker), server)  # type: ignore[no-untyped-call]
    if add_services is not None:
        add_services(server)
    port = _listen(server, address_of(host, 0), security)
    await server.start()
    return server, port


def address_of(host: str, port: int) -> str:
    """As gRPC reads it: a host that is a number of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(server: grpc.aio.Server, address: str, security: PeerSecurity) -> int:
    """The port that was bound; with TLS, callers must show a certificate of the authority too."""
    tls = security.tls
    if tls is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)], root_certificates=tls.authority, require_client_auth=True
    )
    return server.add_secure_port(address, credentials)


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Lets a call in that shows the token; any other ends with UNAUTHENTICATED before a byte of it is read.

    Asked once for each call, not for each message of a stream.
    """

    def __init__(self, token: ClusterToken) -> None:
        self._token = token
        # whatever the method's kind: a handler of streams reads nothing unless it wants to
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        for key, value in handler_call_details.invocation_metadata:
            if key == TOKEN_METADATA_KEY and self._token.matches(value):
                return await continuation(handler_call_details)
        return self._refusal


async def _refuse(messages: AsyncIterator[bytes], context: Context) -> None:
    await _abort(context, Unauthenticated("the call does not carry this cluster's token"))


class WorkerService(WorkerServicer):
    """One method for each call of `Worker`.

    A broken or cancelled Prefill or Lend call cancels its handler, and with it the work; a broken Generate
    call detaches from its stream.
    """

    def __init__(self, worker: ServedWorker) -> None:
        self._worker = worker

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillReply:  # noqa: N802
        try:
            with self._checked(request.receiver_epoch):
                return codec.prefill_reply(await self._worker.prefill(codec.prefill_job(request)))
        except ServingError as error:
            await _abort(context, error)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateEvent]:
        try:
            with self._checked(request.receiver_epoch):
                events = self._worker.generate(codec.generate_job(request))
                async for message in _encoded(events, codec.encode_generate_event):
                    yield message
        except ServingError as error:
            await _abort(context, error)

    async def Lend(self, request: pb.LendRequest, context: Context) -> pb.LendReply:  # noqa: N802
        try:
            with self._checked(request.receiver_epoch):
                return codec.lend_reply(await self._worker.lend(codec.lend_job(request)))
        except ServingError as error:
            await _abort(context, error)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:  # noqa: N802
        try:
            with self._checked(request.receiver_epoch):
                await self._worker.cancel(codec.cancel_job(request))
                return pb.CancelReply()
        except ServingError as error:
            await _abort(context, error)

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchEvent]:
        try:
            with self._checked(request.receiver_epoch):
                async for message in _encoded(self._worker.watch(), codec.encode_watch_event):
                    yield message
        except ServingError as error:
            await _abort(context, error)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotReply:  # noqa: N802
        try:
            with self._checked(request.receiver_epoch):
                return codec.snapshot_reply(await self._worker.snapshot(codec.snapshot_job(request)))
        except ServingError as error:
            await _abort(context, error)

    async def Metrics(self, request: pb.MetricsRequest, context: Context) -> pb.MetricsReply:  # noqa: N802
        try:
            with self._checked(request.receiver_epoch):
                return pb.MetricsReply(exposition=await self._worker.metrics())
        except ServingError as error:
            await _abort(context, error)

    def _checked(self, receiver_epoch: int) -> AbstractContextManager[None]:
        return _checked(self._worker.ref, receiver_epoch)


class RoleService(RolesServicer):
    """The one method of `Roles`."""

    def __init__(self, worker: RoleChanger) -> None:
        self._worker = worker

    async def Change(self, request: pb.RoleRequest, context: Context) -> pb.RoleReply:  # noqa: N802
        own = self._worker.ref
        try:
            with _checked(own, request.receiver_epoch):
                return role_reply(await self._worker.change_role(role_order(request, own)))
        except ServingError as error:
            await _abort(context, error)


@contextmanager
def _checked(own: WorkerRef, receiver_epoch: int) -> Iterator[None]:
    """Refuse a message for another incarnation; let out nothing but ServingErrors."""
    if receiver_epoch != own.epoch:
        raise StaleEpoch("the message was meant for another incarnation", worker_id=own.worker_id)
    try:
        yield
    except ServingError:
        raise
    except Exception as error:
        _log.exception("a call failed")
        raise ServingError(f"the worker failed ({type(error).__name__})") from error


async def _encoded(events: AsyncIterator[E], encode: Callable[[E], M]) -> AsyncIterator[M]:
    """`events` as messages; closes the events' generator when the call ends, however it ends."""
    async with aclosing(events) as open_events:  # type: ignore[type-var]  # generators in fact, all have aclose
        async for event in open_events:
            yield encode(event)


async def _abort(context: Context, error: ServingError) -> NoReturn:
    context.set_trailing_metadata(((codec.ERROR_METADATA_KEY, codec.encode_error(error)),))
    status = _STATUS.get(error.http_status, grpc.StatusCode.INTERNAL)
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED if isinstance(error, Unauthenticated) else status, error.code
    )
