"""The Watch stream and its pages ↔ protobuf: WorkerStatus, BlockEvent, WatchEvent, SnapshotJob, BlockPage.

Malformed input raises InvalidRequest with `details["param"]`. Pure functions; usable from any thread.
"""

from __future__ import annotations

import math
import struct

from core.block_hash import NUM_PARTS, BlockHash, part_of
from core.ids import Epoch, WorkerId
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.pair_status import PairStatus
from core.worker_status import BlockEvent, BlockEventKind, BlockTier, StepCost, WorkerStatus
from protos import inference_pb2 as pb
from protos.value_codec import (
    HASH_BYTES,
    decode_hashes,
    decode_worker_ref,
    encode_hashes,
    encode_worker_ref,
    malformed,
)


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
        pairs=[_encode_pair(pair) for pair in status.pairs],
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
        pairs=tuple(_decode_pair(pair) for pair in message.pairs),
    )


def _encode_pair(pair: PairStatus) -> pb.PairStatus:
    return pb.PairStatus(
        worker_id=pair.worker_id,
        epoch=pair.epoch,
        transport=pair.transport,
        bytes_per_s=pair.bytes_per_s,
        num_bytes=dict(pair.num_bytes),
        fallbacks=dict(pair.fallbacks),
        is_warm=pair.is_warm,
        problem=pair.problem,
    )


def _decode_pair(message: pb.PairStatus) -> PairStatus:
    if not 0.0 <= message.bytes_per_s < math.inf:
        raise malformed("status.pairs", "has a rate that is none")
    return PairStatus(
        WorkerId(message.worker_id),
        Epoch(message.epoch),
        message.transport,
        message.bytes_per_s,
        tuple(sorted(message.num_bytes.items())),
        tuple(sorted(message.fallbacks.items())),
        message.is_warm,
        message.problem,
    )


def _encode_cost(cost: StepCost) -> pb.StepCost:
    return pb.StepCost(
        decode_s=cost.decode_s,
        stream_s=cost.stream_s,
        prefill_s=cost.prefill_s,
        token_s=cost.token_s,
        kv_s=cost.kv_s,
        pair_s=cost.pair_s,
    )


def _decode_cost(message: pb.StepCost, param: str) -> StepCost:
    seconds = (
        *(message.decode_s, message.stream_s, message.prefill_s, message.token_s),
        *(message.kv_s, message.pair_s),
    )
    if not all(0.0 <= value < math.inf for value in seconds):
        raise malformed(param, "is no time")
    return StepCost(*seconds)


def encode_block_event(event: BlockEvent) -> pb.BlockEvent:
    return pb.BlockEvent(
        kind=event.kind.value,
        block_hash=event.block_hash or b"",
        parent=event.parent or b"",
        tier=event.tier,
    )


def decode_block_event(message: pb.BlockEvent) -> BlockEvent:
    try:
        kind = BlockEventKind(message.kind)
    except ValueError:
        raise malformed("event.kind", f"is {message.kind[:40]!r}") from None
    block_hash = _optional_hash(message.block_hash, "event.block_hash")
    if (block_hash is None) != (kind is BlockEventKind.CLEARED):
        raise malformed("event.block_hash", f"does not fit the kind {kind.value}")
    tier = _tier(message.tier, "event.tier")
    return BlockEvent(kind, block_hash, _optional_hash(message.parent, "event.parent"), tier)


def encode_watch_event(event: WatchEvent) -> pb.WatchEvent:
    message = pb.WatchEvent(
        number=event.number,
        events=[encode_block_event(entry) for entry in event.events],
        epoch=event.epoch,
        age_s=event.age_s,
    )
    if event.status is not None:
        message.status.CopyFrom(encode_status(event.status))
    if event.digest is not None:
        message.digest.CopyFrom(pb.BlockDigest(count=event.digest[0], xor=event.digest[1]))
    return message


def decode_watch_event(message: pb.WatchEvent) -> WatchEvent:
    has_status, has_digest = message.HasField("status"), message.HasField("digest")
    if has_status + bool(message.events) > 1 or not (has_status or message.events or has_digest):
        raise malformed("watch_event", "must carry a status, events or a digest, and not both of the first")
    if len(message.events) > message.number:
        raise malformed("watch_event.number", "is less than the number of its events")
    if not 0.0 <= message.age_s < math.inf:
        raise malformed("watch_event.age_s", "is no time")
    return WatchEvent(
        number=message.number,
        status=decode_status(message.status) if has_status else None,
        events=tuple(decode_block_event(entry) for entry in message.events),
        digest=(message.digest.count, message.digest.xor) if has_digest else None,
        epoch=Epoch(message.epoch),
        age_s=message.age_s,
    )


def snapshot_request(job: SnapshotJob, receiver_epoch: Epoch) -> pb.SnapshotRequest:
    return pb.SnapshotRequest(
        receiver_epoch=receiver_epoch,
        first_part=job.first_part,
        end_part=job.end_part,
        known=struct.pack(f"<{len(job.known)}Q", *job.known),
    )


def snapshot_job(message: pb.SnapshotRequest) -> SnapshotJob:
    _check_parts(message.first_part, message.end_part, "snapshot")
    num_known, rest = divmod(len(message.known), 8)
    if rest or num_known > message.end_part - message.first_part:
        raise malformed("snapshot.known", "is not 8 bytes for each of the parts")
    return SnapshotJob(message.first_part, message.end_part, struct.unpack(f"<{num_known}Q", message.known))


def snapshot_reply(page: BlockPage) -> pb.SnapshotReply:
    return pb.SnapshotReply(
        epoch=page.epoch,
        number=page.number,
        first_part=page.first_part,
        end_part=page.end_part,
        changed=page.changed,
        hashes=encode_hashes(page.hashes),
        tiers=bytes(page.tiers),
    )


def block_page(message: pb.SnapshotReply) -> BlockPage:
    _check_parts(message.first_part, message.end_part, "page")
    changed = tuple(message.changed)
    hashes = decode_hashes(message.hashes, "page.hashes")
    if not all(message.first_part <= part < message.end_part for part in changed):
        raise malformed("page.changed", "names a part that is not in the page")
    if not {part_of(block_hash) for block_hash in hashes}.issubset(changed):
        raise malformed("page.hashes", "has a block of another part")
    if message.tiers and len(message.tiers) != len(hashes):
        raise malformed("page.tiers", "is not parallel to the hashes")
    return BlockPage(
        epoch=Epoch(message.epoch),
        number=message.number,
        first_part=message.first_part,
        end_part=message.end_part,
        changed=changed,
        hashes=hashes,
        tiers=tuple(_tier(tier, "page.tiers") for tier in message.tiers),
    )


def _check_parts(first: int, end: int, param: str) -> None:
    if not 0 <= first < end <= NUM_PARTS:
        raise malformed(f"{param}.end_part", f"is not between first_part and {NUM_PARTS}")


def _tier(value: int, param: str) -> BlockTier:
    try:
        return BlockTier(value)
    except ValueError:
        raise malformed(param, f"is {value}") from None


def _optional_hash(data: bytes, param: str) -> BlockHash | None:
    if not data:
        return None
    if len(data) != HASH_BYTES:
        raise malformed(param, f"is not {HASH_BYTES} bytes")
    return BlockHash(data)
