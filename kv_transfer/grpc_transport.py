"""The bridge over gRPC: the client's transport, and the servicer that a decode worker adds to its server.

Push goes through identity serializers: a frame is handed to gRPC as the bytes it is. Errors travel as the
trailing metadata entry `baton-error-bin`; a push's errors in its last acknowledgement. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from core.errors import (
    AdmissionError,
    DeadlineExceeded,
    HandoffError,
    RequestError,
    ServingError,
    TransferTimeout,
    WorkerError,
    WorkerLost,
)
from core.handoff import HandoffTicket
from core.ids import Epoch, TicketId, WorkerId, WorkerRef
from core.peer_security import PeerSecurity
from kv_transfer.receiver import Receiver
from kv_transfer.staging_codec import meet_reply, offer_reply, offered_staging
from kv_transfer.transport import Carriage, CommitClaim, CommitReceipt, Fence, OfferedStaging, Pair
from protos import kv_transfer_pb2 as pb
from protos.error_codec import ERROR_METADATA_KEY, decode_error, encode_error
from protos.grpc_options import channel_options
from protos.transfer_codec import (
    meet_request,
    met_prefill,
    offer_request,
    offered_ticket,
    ticket_id_bytes,
    time_left,
)

SERVICE = "baton.kv_transfer.KVTransfer"

__all__ = ["GrpcTransport", "add_kv_transfer_servicer", "serving_error"]

T = TypeVar("T")

_NOTHING_TO_SHOW = PeerSecurity()


class GrpcTransport:
    """One HTTP/2 connection to one decode worker."""

    name = "grpc"
    carriage = Carriage(name)

    def __init__(self, ref: WorkerRef, security: PeerSecurity = _NOTHING_TO_SHOW) -> None:
        self._worker_id = ref.worker_id
        self._metadata = security.metadata
        self._channel = _open_channel(ref.address, security)
        self._offer = self._unary("Offer", pb.OfferRequest, pb.OfferReply)
        self._commit = self._unary("Commit", pb.CommitRequest, pb.CommitReply)
        self._abort = self._unary("Abort", pb.AbortRequest, pb.AbortReply)
        self._keepalive = self._unary("KeepAlive", pb.KeepAliveRequest, pb.KeepAliveReply)
        self._meet = self._unary("Meet", pb.MeetRequest, pb.MeetReply)
        self._push = self._channel.stream_stream(f"/{SERVICE}/Push")  # bytes in, bytes out
        self._group = self._channel.stream_stream(f"/{SERVICE}/Group")

    async def offer(self, ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        held, _ = await self.offer_and_ask(ticket, time_left_s)
        return held

    async def offer_and_ask(
        self, ticket: HandoffTicket, time_left_s: float
    ) -> tuple[tuple[int, ...], OfferedStaging]:
        """`offer`, and where decode offers staging memory to processes of its host, if it does."""
        reply = await self._call(self._offer(offer_request(ticket, time_left_s, ticket.decode.epoch)))
        return tuple(reply.held), offered_staging(reply)

    async def meet(self, pair: Pair) -> None:
        await self.ask(pair)

    async def ask(self, pair: Pair) -> OfferedStaging:
        """Where decode offers staging memory, before any ticket asks; connects."""
        request = meet_request(pair.prefill, pair.layout, pair.decode.epoch)
        return offered_staging(await self._call(self._meet(request)))

    async def prepare(self, pair: Pair, offered: OfferedStaging) -> None:
        """Payloads travel in their frames."""

    async def open_push(self) -> GrpcPush:
        return GrpcPush(self._push(metadata=self._metadata), self._worker_id)

    def open_group(self) -> GrpcPush:
        """The stream of one pair's process group; its messages are GroupMessages."""
        return GrpcPush(self._group(metadata=self._metadata), self._worker_id)

    async def commit(self, fence: Fence, claim: CommitClaim) -> CommitReceipt:
        request = pb.CommitRequest(
            receiver_epoch=fence.receiver_epoch,
            sender_epoch=fence.sender_epoch,
            ticket_id=fence.ticket_id,
            num_tokens=claim.num_tokens,
            num_pushed_blocks=claim.num_pushed_blocks,
            checksum=claim.checksum,
        )
        reply = await self._call(self._commit(request))
        return CommitReceipt(reply.num_written_blocks, reply.num_written_bytes)

    async def abort(self, fence: Fence, reason: str, time_left_s: float) -> None:
        request = pb.AbortRequest(
            receiver_epoch=fence.receiver_epoch,
            sender_epoch=fence.sender_epoch,
            ticket_id=fence.ticket_id,
            reason=reason,
            time_left_s=time_left_s,
        )
        await self._call(self._abort(request))

    async def keepalive(self, fence: Fence) -> None:
        request = pb.KeepAliveRequest(
            receiver_epoch=fence.receiver_epoch, sender_epoch=fence.sender_epoch, ticket_id=fence.ticket_id
        )
        await self._call(self._keepalive(request))

    async def close(self) -> None:
        await self._channel.close()

    def _unary(self, method: str, request: Any, reply: Any) -> Any:
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        return partial(call, metadata=self._metadata)

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise serving_error(error, self._worker_id) from error


class GrpcPush:
    """One stream of messages to decode and back: a push, or what a process group needs."""

    def __init__(self, call: Any, worker_id: WorkerId) -> None:
        self._call = call
        self._worker_id = worker_id

    async def room(self, ticket_id: TicketId, num_bytes: int) -> None:
        """Payloads travel in their frames."""

    async def send(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise serving_error(error, self._worker_id) from error
        except asyncio.InvalidStateError as error:  # the call is over; its end is told by `acks`
            raise WorkerLost("the push is over", worker_id=self._worker_id) from error

    async def acks(self) -> AsyncIterator[bytes]:
        try:
            async for ack in self._call:
                yield ack
        except grpc.aio.AioRpcError as error:
            raise serving_error(error, self._worker_id) from error

    async def close(self) -> None:
        self._call.cancel()


def _open_channel(address: str, security: PeerSecurity) -> Any:
    """The published type stubs of grpc.aio are incomplete, hence Any for channels and calls."""
    options, tls = channel_options(security), security.tls
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.aio.secure_channel(address, credentials, options=options)


def serving_error(error: grpc.aio.AioRpcError, worker_id: WorkerId) -> ServingError:
    """What the peer raised, if it could say so; else what the status code means for the caller."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == ERROR_METADATA_KEY:
            return decode_error(value)
    code, detail = error.code(), f"{error.code().name}: {error.details()}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeout(detail, worker_id=worker_id)
    is_broken = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
    if is_broken or "Stream removed" in (error.details() or ""):
        return WorkerLost(detail, worker_id=worker_id)
    return WorkerError(detail, worker_id=worker_id)


# ---------------------------------------------------------------- decode's side


def add_kv_transfer_servicer(server: grpc.aio.Server, receiver: Receiver) -> None:
    """Answer the bridge's calls on `server`, made with SERVER_OPTIONS, on the receiver's loop."""
    add_receiver_of(server, lambda: receiver)


def add_receiver_of(server: grpc.aio.Server, find: Callable[[], Receiver]) -> None:
    """The same for a worker whose receiver comes and goes with its role: `find` gives the one of the moment,
    or raises the ServingError that the call ends with.
    """
    servicer = _Servicer(find)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Offer": _unary_handler(servicer.offer, pb.OfferRequest),
        "Commit": _unary_handler(servicer.commit, pb.CommitRequest),
        "Abort": _unary_handler(servicer.abort, pb.AbortRequest),
        "KeepAlive": _unary_handler(servicer.keepalive, pb.KeepAliveRequest),
        "Meet": _unary_handler(servicer.meet, pb.MeetRequest),
        "Push": grpc.stream_stream_rpc_method_handler(servicer.push),
        "Group": grpc.stream_stream_rpc_method_handler(servicer.group),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class _Servicer:
    """Messages to values, the receiver's answers to messages."""

    def __init__(self, find: Callable[[], Receiver]) -> None:
        self._find = find

    @property
    def _receiver(self) -> Receiver:
        return self._find()

    async def offer(self, request: pb.OfferRequest) -> pb.OfferReply:
        self._receiver.check_version(request.ticket.prefill.worker_id, request.version)
        ticket, time_left_s = offered_ticket(request), time_left(request)
        held = await self._receiver.offer(ticket, time_left_s, Epoch(request.receiver_epoch))
        return offer_reply(held, self._receiver.offered_staging)

    async def meet(self, request: pb.MeetRequest) -> pb.MeetReply:
        self._receiver.check_version(request.prefill.worker_id, request.version)
        prefill, layout = met_prefill(request)
        return meet_reply(self._receiver.meet(prefill, layout, Epoch(request.receiver_epoch)))

    async def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        claim = CommitClaim(request.num_tokens, request.num_pushed_blocks, request.checksum)
        receipt = await self._receiver.commit(_fence(request), claim)
        return pb.CommitReply(
            num_written_blocks=receipt.num_written_blocks, num_written_bytes=receipt.num_written_bytes
        )

    async def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        await self._receiver.abort(_fence(request), request.reason, time_left(request))
        return pb.AbortReply()

    async def keepalive(self, request: pb.KeepAliveRequest) -> pb.KeepAliveReply:
        await self._receiver.keepalive(_fence(request))
        return pb.KeepAliveReply()

    async def push(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        try:
            receiver = self._receiver
        except ServingError as error:
            await _abort(context, error)
        else:
            await receiver.push(frames, context.write, GrpcTransport.name)

    async def group(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        await self._receiver.serve_group(messages, context.write)


def _fence(request: pb.CommitRequest | pb.AbortRequest | pb.KeepAliveRequest) -> Fence:
    ticket_id_bytes(request.ticket_id)
    return Fence(Epoch(request.receiver_epoch), Epoch(request.sender_epoch), TicketId(request.ticket_id))


def _unary_handler(answer: Callable[[Any], Awaitable[Any]], request: Any) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await answer(message)
        except ServingError as error:
            await _abort(context, error)

    return grpc.unary_unary_rpc_method_handler(
        handle,
        request_deserializer=request.FromString,
        response_serializer=lambda reply: reply.SerializeToString(),
    )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> None:
    metadata = ((ERROR_METADATA_KEY, encode_error(error)),)
    await context.abort(_status_code(error), error.code, trailing_metadata=metadata)


def _status_code(error: ServingError) -> grpc.StatusCode:
    """For people and proxies; our own client reads the metadata."""
    if isinstance(error, RequestError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, DeadlineExceeded):
        return grpc.StatusCode.DEADLINE_EXCEEDED
    if isinstance(error, AdmissionError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, HandoffError):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.ABORTED
