"""What crosses the edge of a worker ↔ protobuf: jobs, their answers, the Watch stream, errors.

The import for services and clients. Functions are named by what they return where message and value have
different names (`prefill_request` / `prefill_job`), else `encode_x` / `decode_x`. Malformed input raises
InvalidRequest with `details["param"]`. The bridge's messages are in `transfer_codec`. Pure functions; usable
from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.ids import Epoch, RequestId, TicketId
from core.jobs import (
    CancelJob,
    GenerateEvent,
    GenerateJob,
    LendJob,
    LendResult,
    PrefillJob,
    PrefillResult,
    SampleStart,
)
from core.request import Request
from protos import inference_pb2 as pb
from protos.error_codec import ERROR_METADATA_KEY, decode_error, encode_error
from protos.value_codec import (
    checked_time_left,
    decode_delta,
    decode_hashes,
    decode_logprobs,
    decode_reading,
    decode_request,
    decode_worker_ref,
    encode_delta,
    encode_hashes,
    encode_logprobs,
    encode_reading,
    encode_request,
    encode_worker_ref,
    malformed,
)
from protos.watch_codec import (
    block_page,
    decode_watch_event,
    encode_watch_event,
    snapshot_job,
    snapshot_reply,
    snapshot_request,
)

__all__ = [
    "ERROR_METADATA_KEY",
    "block_page",
    "cancel_job",
    "cancel_request",
    "decode_error",
    "decode_generate_event",
    "decode_watch_event",
    "encode_error",
    "encode_generate_event",
    "encode_watch_event",
    "generate_job",
    "generate_request",
    "lend_job",
    "lend_reply",
    "lend_request",
    "lend_result",
    "prefill_job",
    "prefill_reply",
    "prefill_request",
    "prefill_result",
    "snapshot_job",
    "snapshot_reply",
    "snapshot_request",
]


def prefill_request(job: PrefillJob, receiver_epoch: Epoch) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        receiver_epoch=receiver_epoch,
        request=encode_request(job.request),
        samples=_encode_samples(job.samples),
        ticket_id=job.ticket_id,
        decode=encode_worker_ref(job.decode) if job.decode is not None else None,
        attempt=job.attempt,
        time_left_s=job.time_left_s,
    )


def prefill_job(message: pb.PrefillRequest) -> PrefillJob:
    request = _decode_request(message.HasField("request"), message.request)
    decode = decode_worker_ref(message.decode, "decode") if message.HasField("decode") else None
    if decode is not None and not message.ticket_id:
        raise malformed("ticket_id", "is empty although the KV is to be handed over")
    return PrefillJob(
        request=request,
        samples=_decode_samples(message.samples, request),
        ticket_id=TicketId(message.ticket_id),
        decode=decode,
        attempt=message.attempt,
        time_left_s=checked_time_left(message.time_left_s),
    )


def prefill_reply(result: PrefillResult) -> pb.PrefillReply:
    return pb.PrefillReply(
        deltas=[encode_delta(delta) for delta in result.deltas],
        num_cached_tokens=result.num_cached_tokens,
        queue_s=result.queue_s,
        compute_s=result.compute_s,
        prompt_logprobs=encode_logprobs(result.prompt_logprobs),
    )


def prefill_result(message: pb.PrefillReply) -> PrefillResult:
    return PrefillResult(
        deltas=tuple(decode_delta(delta) for delta in message.deltas),
        num_cached_tokens=message.num_cached_tokens,
        queue_s=message.queue_s,
        compute_s=message.compute_s,
        prompt_logprobs=decode_logprobs(message.prompt_logprobs),
    )


def generate_request(job: GenerateJob, receiver_epoch: Epoch) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        receiver_epoch=receiver_epoch,
        request=encode_request(job.request),
        samples=_encode_samples(job.samples),
        ticket_id=job.ticket_id or "",
        attempt=job.attempt,
        time_left_s=job.time_left_s,
    )


def generate_job(message: pb.GenerateRequest) -> GenerateJob:
    request = _decode_request(message.HasField("request"), message.request)
    return GenerateJob(
        request=request,
        samples=_decode_samples(message.samples, request),
        ticket_id=TicketId(message.ticket_id) if message.ticket_id else None,
        attempt=message.attempt,
        time_left_s=checked_time_left(message.time_left_s),
    )


def encode_generate_event(event: GenerateEvent) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        delta=encode_delta(event.delta),
        prompt_logprobs=encode_logprobs(event.prompt_logprobs),
        reading=None if event.reading is None else encode_reading(event.reading),
    )


def decode_generate_event(message: pb.GenerateEvent) -> GenerateEvent:
    if not message.HasField("delta"):
        raise malformed("delta", "is absent")
    reading = decode_reading(message.reading) if message.HasField("reading") else None
    return GenerateEvent(decode_delta(message.delta), decode_logprobs(message.prompt_logprobs), reading)


def lend_request(job: LendJob, receiver_epoch: Epoch) -> pb.LendRequest:
    return pb.LendRequest(
        receiver_epoch=receiver_epoch,
        request_id=job.request_id,
        ticket_id=job.ticket_id,
        block_hashes=encode_hashes(job.block_hashes),
        to=encode_worker_ref(job.to),
        time_left_s=job.time_left_s,
    )


def lend_job(message: pb.LendRequest) -> LendJob:
    if not message.HasField("to"):
        raise malformed("to", "is absent")
    if not message.ticket_id:
        raise malformed("ticket_id", "is empty")
    return LendJob(
        request_id=RequestId(message.request_id),
        ticket_id=TicketId(message.ticket_id),
        block_hashes=decode_hashes(message.block_hashes, "block_hashes"),
        to=decode_worker_ref(message.to, "to"),
        time_left_s=checked_time_left(message.time_left_s),
    )


def lend_reply(result: LendResult) -> pb.LendReply:
    return pb.LendReply(num_tokens=result.num_tokens, num_sent_blocks=result.num_sent_blocks)


def lend_result(message: pb.LendReply) -> LendResult:
    return LendResult(message.num_tokens, message.num_sent_blocks)


def cancel_request(job: CancelJob, receiver_epoch: Epoch) -> pb.CancelRequest:
    return pb.CancelRequest(
        receiver_epoch=receiver_epoch,
        request_id=job.request_id,
        ticket_id=job.ticket_id or "",
        reason=job.reason,
        sample_index=job.sample_index,
    )


def cancel_job(message: pb.CancelRequest) -> CancelJob:
    return CancelJob(
        request_id=RequestId(message.request_id),
        ticket_id=TicketId(message.ticket_id) if message.ticket_id else None,
        reason=message.reason,
        sample_index=message.sample_index if message.HasField("sample_index") else None,
    )


def _decode_request(is_present: bool, message: pb.Request) -> Request:
    if not is_present:
        raise malformed("request", "is absent")
    return decode_request(message)


def _encode_samples(samples: Sequence[SampleStart]) -> list[pb.SampleStart]:
    return [pb.SampleStart(sample_index=sample.sample_index, emitted=sample.emitted) for sample in samples]


def _decode_samples(messages: Iterable[pb.SampleStart], request: Request) -> tuple[SampleStart, ...]:
    samples = tuple(SampleStart(message.sample_index, tuple(message.emitted)) for message in messages)
    indexes = [sample.sample_index for sample in samples]
    if not indexes or len(set(indexes)) != len(indexes):
        raise malformed("samples", "must name at least one sample, each once")
    if min(indexes) < 0 or max(indexes) >= request.num_samples:
        raise malformed("samples", f"must lie in 0..{request.num_samples - 1}")
    return samples
