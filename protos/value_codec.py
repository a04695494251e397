"""The values that several messages share ↔ protobuf: WorkerRef, Request, TokenDelta, logprobs, block hashes.

Malformed input raises InvalidRequest with `details["param"]`. Pure functions; usable from any thread.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence

from core.block_hash import BlockHash, token_bytes
from core.errors import InvalidRequest
from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef
from core.jobs import Reading
from core.request import FinishReason, Request, SamplingParams, TokenDelta, TokenLogprob
from core.telemetry import StallCause
from protos import inference_pb2 as pb

HASH_BYTES = 16


def malformed(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"malformed message: {param} {problem}", param=param)


def checked_time_left(time_left_s: float) -> float:
    """Seconds; a NaN would make a deadline that never passes."""
    if not math.isfinite(time_left_s) or time_left_s < 0:
        raise malformed("time_left_s", "must be a finite number of seconds, not negative")
    return time_left_s


def encode_worker_ref(ref: WorkerRef) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id=ref.worker_id, role=ref.role.value, epoch=ref.epoch, address=ref.address)


def decode_worker_ref(message: pb.WorkerRef, param: str = "ref") -> WorkerRef:
    try:
        role = Role(message.role)
    except ValueError:
        raise malformed(f"{param}.role", f"is {message.role[:40]!r}") from None
    return WorkerRef(WorkerId(message.worker_id), role, Epoch(message.epoch), message.address)


def encode_sampling(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        seed=params.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def decode_sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def encode_request(request: Request) -> pb.Request:
    return pb.Request(
        request_id=request.request_id,
        prompt_token_ids=token_bytes(request.prompt_token_ids),
        sampling=encode_sampling(request.sampling),
        model=request.model,
        adapter=request.adapter,
        num_samples=request.num_samples,
        cache_salt=request.cache_salt,
        priority=request.priority,
        is_prefix_cache_read=request.is_prefix_cache_read,
    )


def decode_request(message: pb.Request) -> Request:
    if not message.request_id:
        raise malformed("request.request_id", "is empty")
    if not message.HasField("sampling"):
        raise malformed("request.sampling", "is absent")
    if message.num_samples < 1:
        raise malformed("request.num_samples", "must be at least 1")
    return Request(
        request_id=RequestId(message.request_id),
        prompt_token_ids=_token_ids(message.prompt_token_ids),
        sampling=decode_sampling(message.sampling),
        model=message.model,
        adapter=message.adapter,
        num_samples=message.num_samples,
        cache_salt=message.cache_salt,
        priority=message.priority,
        is_prefix_cache_read=message.is_prefix_cache_read,
    )


def _token_ids(data: bytes) -> tuple[int, ...]:
    token_ids = array("i")
    if len(data) % token_ids.itemsize:
        raise malformed("request.prompt_token_ids", "is not a whole number of int32")
    token_ids.frombytes(data)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return tuple(token_ids)


def encode_logprobs(logprobs: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.Candidate(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
        )
        for entry in logprobs
    ]


def decode_logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            message.token_id, message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top)
        )
        for message in messages
    )


def encode_delta(delta: TokenDelta) -> pb.TokenDelta:
    return pb.TokenDelta(
        sample_index=delta.sample_index,
        position=delta.position,
        token_ids=delta.token_ids,
        logprobs=encode_logprobs(delta.logprobs),
        finish_reason=delta.finish_reason.value if delta.finish_reason is not None else "",
        num_cached_tokens=delta.num_cached_tokens,
    )


def decode_delta(message: pb.TokenDelta) -> TokenDelta:
    if message.sample_index < 0 or message.position < 0:
        raise malformed("delta.position", "is negative")
    try:
        finish_reason = FinishReason(message.finish_reason) if message.finish_reason else None
    except ValueError:
        raise malformed("delta.finish_reason", f"is {message.finish_reason[:40]!r}") from None
    return TokenDelta(
        sample_index=message.sample_index,
        position=message.position,
        token_ids=tuple(message.token_ids),
        logprobs=decode_logprobs(message.logprobs),
        finish_reason=finish_reason,
        num_cached_tokens=message.num_cached_tokens,
    )


def encode_reading(reading: Reading) -> pb.Reading:
    return pb.Reading(
        queue_s=reading.queue_s,
        compute_s=reading.compute_s,
        wait_s=reading.wait_s,
        cause=reading.cause.value if reading.cause is not None else "",
    )


def decode_reading(message: pb.Reading) -> Reading:
    durations = (message.queue_s, message.compute_s, message.wait_s)
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in durations):
        raise malformed("reading", "must hold finite seconds, none negative")
    try:
        cause = StallCause(message.cause) if message.cause else None
    except ValueError:
        raise malformed("reading.cause", f"is {message.cause[:40]!r}") from None
    return Reading(*durations, cause)


def encode_hashes(hashes: Sequence[BlockHash]) -> bytes:
    """16 bytes each, end to end."""
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)
    return b"".join(hashes)


def decode_hashes(data: bytes, param: str) -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise malformed(param, f"is not a whole number of {HASH_BYTES}-byte hashes")
    return tuple(BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES))
