"""The Watch stream ↔ protobuf: WorkerStatus, BlockEvent, BlockSnapshot, WatchEvent.

Malformed input raises InvalidRequest with `details["param"]`. Pure functions; usable from any thread.
"""

from __future__ import annotations

import math

from core.block_hash import BlockHash
from core.jobs import BlockSnapshot, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind, StepCost, WorkerStatus
from protos import inference_pb2 as pb
from protos.value_codec import (
    HASH_BYTES,
    decode_hashes,
    decode_worker_ref,
    encode_hashes,
    encode_worker_ref,
    malformed,
)

_NO_PARENT = BlockHash(bytes(HASH_BYTES))


def encode_status(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        ref=encode_worker_ref(status.ref),
        is_draining=status.is_draining,
        num_waiting=status.num_waiting,
        num_running=status.num_running,
        num_waiting_tokens=status.num_waiting_tokens,
        num_running_tokens=status.num_running_tokens,
        num_blocks=status.num_blocks,
        num_free_blocks=status.num_free_blocks,
        num_cached_blocks=status.num_cached_blocks,
        num_held_blocks=status.num_held_blocks,
        num_quarantined_blocks=status.num_quarantined_blocks,
        max_num_seqs=status.max_num_seqs,
        prefill_tokens_per_s=status.prefill_tokens_per_s,
        step_s=status.step_s,
        num_shared_cores=status.num_shared_cores,
        max_step_tokens=status.max_step_tokens,
        max_chunk_tokens=status.max_chunk_tokens,
        alone=_encode_cost(status.alone),
        beside=_encode_cost(status.beside),
    )


def decode_status(message: pb.WorkerStatus) -> WorkerStatus:
    if not message.HasField("ref"):
        raise malformed("status.ref", "is absent")
    return WorkerStatus(
        ref=decode_worker_ref(message.ref, "status.ref"),
        is_draining=message.is_draining,
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        num_waiting_tokens=message.num_waiting_tokens,
        num_running_tokens=message.num_running_tokens,
        num_blocks=message.num_blocks,
        num_free_blocks=message.num_free_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_held_blocks=message.num_held_blocks,
        num_quarantined_blocks=message.num_quarantined_blocks,
        max_num_seqs=message.max_num_seqs,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        step_s=message.step_s,
        num_shared_cores=message.num_shared_cores,
        max_step_tokens=message.max_step_tokens,
        max_chunk_tokens=message.max_chunk_tokens,
        alone=_decode_cost(message.alone, "status.alone"),
        beside=_decode_cost(message.beside, "status.beside"),
    )


def _encode_cost(cost: StepCost) -> pb.StepCost:
    return pb.StepCost(
        decode_s=cost.decode_s, stream_s=cost.stream_s, prefill_s=cost.prefill_s, token_s=cost.token_s
    )


def _decode_cost(message: pb.StepCost, param: str) -> StepCost:
    seconds = (message.decode_s, message.stream_s, message.prefill_s, message.token_s)
    if not all(0.0 <= value < math.inf for value in seconds):
        raise malformed(param, "is no time")
    return StepCost(*seconds)


def encode_block_event(event: BlockEvent) -> pb.BlockEvent:
    return pb.BlockEvent(
        kind=event.kind.value, block_hash=event.block_hash or b"", parent=event.parent or b""
    )


def decode_block_event(message: pb.BlockEvent) -> BlockEvent:
    try:
        kind = BlockEventKind(message.kind)
    except ValueError:
        raise malformed("event.kind", f"is {message.kind[:40]!r}") from None
    block_hash = _optional_hash(message.block_hash, "event.block_hash")
    if (block_hash is None) != (kind is BlockEventKind.CLEARED):
        raise malformed("event.block_hash", f"does not fit the kind {kind.value}")
    return BlockEvent(kind, block_hash, _optional_hash(message.parent, "event.parent"))


def encode_snapshot(snapshot: BlockSnapshot) -> pb.BlockSnapshot:
    assert len(snapshot.hashes) == len(snapshot.parents)
    return pb.BlockSnapshot(
        hashes=encode_hashes(snapshot.hashes),
        parents=encode_hashes([_NO_PARENT if parent is None else parent for parent in snapshot.parents]),
    )


def decode_snapshot(message: pb.BlockSnapshot) -> BlockSnapshot:
    hashes = decode_hashes(message.hashes, "snapshot.hashes")
    parents = decode_hashes(message.parents, "snapshot.parents")
    if len(hashes) != len(parents):
        raise malformed("snapshot.parents", "is not parallel to the hashes")
    return BlockSnapshot(hashes, tuple(None if parent == _NO_PARENT else parent for parent in parents))


def encode_watch_event(event: WatchEvent) -> pb.WatchEvent:
    message = pb.WatchEvent(number=event.number, events=[encode_block_event(entry) for entry in event.events])
    if event.status is not None:
        message.status.CopyFrom(encode_status(event.status))
    if event.snapshot is not None:
        message.snapshot.CopyFrom(encode_snapshot(event.snapshot))
    if event.digest is not None:
        message.digest.CopyFrom(pb.BlockDigest(count=event.digest[0], xor=event.digest[1]))
    return message


def decode_watch_event(message: pb.WatchEvent) -> WatchEvent:
    has_status, has_snapshot = message.HasField("status"), message.HasField("snapshot")
    if has_status + has_snapshot + bool(message.events) != 1:
        raise malformed("watch_event", "must carry exactly one of status, events and snapshot")
    return WatchEvent(
        number=message.number,
        status=decode_status(message.status) if has_status else None,
        events=tuple(decode_block_event(entry) for entry in message.events),
        snapshot=decode_snapshot(message.snapshot) if has_snapshot else None,
        digest=(message.digest.count, message.digest.xor) if message.HasField("digest") else None,
    )


def _optional_hash(data: bytes, param: str) -> BlockHash | None:
    if not data:
        return None
    if len(data) != HASH_BYTES:
        raise malformed(param, f"is not {HASH_BYTES} bytes")
    return BlockHash(data)
