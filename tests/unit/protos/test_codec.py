"""Jobs, answers and the Watch stream keep every field on the wire; malformed messages are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from core.block_hash import BlockHash
from core.errors import InvalidRequest
from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef, new_ticket_id
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
from protos import codec
from protos import inference_pb2 as pb
from tests.unit.protos import strategies


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@strategies.quick
@given(strategies.prefill_jobs(), strategies.epochs)
def test_a_prefill_job_keeps_every_field(job: PrefillJob, epoch: Epoch) -> None:
    message = over_the_wire(codec.prefill_request(job, epoch))
    assert codec.prefill_job(message) == job
    assert message.receiver_epoch == epoch


@strategies.quick
@given(strategies.prefill_results)
def test_a_prefill_result_keeps_every_field(result: PrefillResult) -> None:
    assert codec.prefill_result(over_the_wire(codec.prefill_reply(result))) == result


@strategies.quick
@given(strategies.generate_jobs(), strategies.epochs)
def test_a_generate_job_keeps_every_field(job: GenerateJob, epoch: Epoch) -> None:
    message = over_the_wire(codec.generate_request(job, epoch))
    assert codec.generate_job(message) == job
    assert message.receiver_epoch == epoch


@strategies.quick
@given(strategies.generate_events)
def test_a_generate_event_keeps_every_field(event: GenerateEvent) -> None:
    assert codec.decode_generate_event(over_the_wire(codec.encode_generate_event(event))) == event


@strategies.quick
@given(strategies.lend_jobs, strategies.epochs)
def test_a_lend_job_keeps_every_field(job: LendJob, epoch: Epoch) -> None:
    message = over_the_wire(codec.lend_request(job, epoch))
    assert codec.lend_job(message) == job
    assert message.receiver_epoch == epoch


@pytest.mark.parametrize(
    ("field", "value"), [("to", None), ("ticket_id", ""), ("block_hashes", b"x" * 15), ("time_left_s", -1.0)]
)
def test_a_malformed_lend_job_is_refused_by_name(field: str, value: object) -> None:
    ref = WorkerRef(WorkerId("p"), Role.PREFILL, Epoch(7), "here")
    job = LendJob(RequestId("r"), new_ticket_id(), (BlockHash(b"x" * 16),), ref, 1.0)
    message = codec.lend_request(job, Epoch(9))
    if value is None:
        message.ClearField(field)
    else:
        setattr(message, field, value)
    with pytest.raises(InvalidRequest) as caught:
        codec.lend_job(message)
    assert caught.value.details["param"] == field


def test_a_lend_result_keeps_every_field() -> None:
    assert codec.lend_result(over_the_wire(codec.lend_reply(LendResult(96, 4)))) == LendResult(96, 4)


@strategies.quick
@given(strategies.cancel_jobs, strategies.epochs)
def test_a_cancel_job_keeps_every_field(job: CancelJob, epoch: Epoch) -> None:
    message = over_the_wire(codec.cancel_request(job, epoch))
    assert codec.cancel_job(message) == job
    assert message.receiver_epoch == epoch


@strategies.quick
@given(strategies.watch_events)
def test_a_watch_event_keeps_every_field(event: WatchEvent) -> None:
    assert codec.decode_watch_event(over_the_wire(codec.encode_watch_event(event))) == event


@strategies.quick
@given(strategies.snapshot_jobs, strategies.epochs)
def test_a_snapshot_job_keeps_every_field(job: SnapshotJob, epoch: Epoch) -> None:
    message = over_the_wire(codec.snapshot_request(job, epoch))
    assert codec.snapshot_job(message) == job
    assert message.receiver_epoch == epoch


@strategies.quick
@given(strategies.block_pages)
def test_a_page_keeps_every_field(page: BlockPage) -> None:
    assert codec.block_page(over_the_wire(codec.snapshot_reply(page))) == page


def prefill_message(**changes: Any) -> pb.PrefillRequest:
    message = pb.PrefillRequest(
        request=pb.Request(request_id="r", prompt_token_ids=bytes(8), num_samples=2, sampling={}),
        samples=[pb.SampleStart(sample_index=0)],
        ticket_id="00" * 16,
        time_left_s=1.0,
    )
    codec.prefill_job(message)  # the unchanged message is well formed
    for field, value in changes.items():
        target = message.request if field in pb.Request.DESCRIPTOR.fields_by_name else message
        target.ClearField(field)
        target.MergeFrom(type(target)(**{field: value}))
    return message


MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("request.request_id", {"request_id": ""}),
    ("request.sampling", {"sampling": None}),
    ("request.num_samples", {"num_samples": 0}),
    ("request.prompt_token_ids", {"prompt_token_ids": bytes(7)}),
    ("samples", {"samples": []}),
    ("samples", {"samples": [pb.SampleStart(sample_index=2)]}),
    ("samples", {"samples": [pb.SampleStart(sample_index=-1)]}),
    ("samples", {"samples": [pb.SampleStart(), pb.SampleStart()]}),
    ("decode.role", {"decode": pb.WorkerRef(role="king")}),
    ("ticket_id", {"ticket_id": "", "decode": pb.WorkerRef(role="decode")}),
    ("time_left_s", {"time_left_s": float("nan")}),
    ("time_left_s", {"time_left_s": float("inf")}),
    ("time_left_s", {"time_left_s": -1.0}),
    ("request", {"request": None}),
]


@pytest.mark.parametrize(("param", "changes"), MALFORMED)
def test_a_malformed_prefill_request_is_refused_by_the_fields_name(
    param: str, changes: dict[str, Any]
) -> None:
    message = prefill_message(**changes)
    with pytest.raises(InvalidRequest) as caught:
        codec.prefill_job(message)
    assert caught.value.details["param"] == param


STATUS = pb.WorkerStatus(ref=pb.WorkerRef(role="decode"))


@pytest.mark.parametrize(
    ("param", "decode", "message"),
    [
        ("request", codec.generate_job, pb.GenerateRequest(time_left_s=1)),
        ("delta", codec.decode_generate_event, pb.GenerateEvent()),
        (
            "delta.finish_reason",
            codec.decode_generate_event,
            pb.GenerateEvent(delta=pb.TokenDelta(finish_reason="bored")),
        ),
        (
            "delta.position",
            codec.decode_generate_event,
            pb.GenerateEvent(delta=pb.TokenDelta(position=-1)),
        ),
        (
            "reading",
            codec.decode_generate_event,
            pb.GenerateEvent(delta=pb.TokenDelta(), reading=pb.Reading(queue_s=float("nan"))),
        ),
        (
            "reading.cause",
            codec.decode_generate_event,
            pb.GenerateEvent(delta=pb.TokenDelta(), reading=pb.Reading(cause="bored")),
        ),
        ("watch_event", codec.decode_watch_event, pb.WatchEvent(number=1)),
        (
            "watch_event",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, status=STATUS, events=[pb.BlockEvent(kind="cleared")]),
        ),
        (
            "watch_event.number",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="cleared")] * 2),
        ),
        (
            "watch_event.age_s",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="cleared")], age_s=float("nan")),
        ),
        ("status.ref", codec.decode_watch_event, pb.WatchEvent(status=pb.WorkerStatus())),
        (
            "status.beside",
            codec.decode_watch_event,
            pb.WatchEvent(status=pb.WorkerStatus(ref=STATUS.ref, beside=pb.StepCost(token_s=float("nan")))),
        ),
        (
            "event.kind",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="eaten")]),
        ),
        (
            "event.block_hash",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="stored", block_hash=bytes(15))]),
        ),
        (
            "event.block_hash",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="stored")]),
        ),
        (
            "event.block_hash",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="cleared", block_hash=bytes(16))]),
        ),
        (
            "event.tier",
            codec.decode_watch_event,
            pb.WatchEvent(number=1, events=[pb.BlockEvent(kind="stored", block_hash=bytes(16), tier=9)]),
        ),
        ("snapshot.end_part", codec.snapshot_job, pb.SnapshotRequest(first_part=3, end_part=3)),
        ("snapshot.end_part", codec.snapshot_job, pb.SnapshotRequest(end_part=4097)),
        ("snapshot.known", codec.snapshot_job, pb.SnapshotRequest(end_part=1, known=bytes(9))),
        ("snapshot.known", codec.snapshot_job, pb.SnapshotRequest(end_part=1, known=bytes(16))),
        ("page.end_part", codec.block_page, pb.SnapshotReply(first_part=-1, end_part=4)),
        ("page.hashes", codec.block_page, pb.SnapshotReply(end_part=1, changed=[0], hashes=bytes(17))),
        ("page.hashes", codec.block_page, pb.SnapshotReply(end_part=1, hashes=bytes(16))),
        ("page.changed", codec.block_page, pb.SnapshotReply(end_part=1, changed=[1])),
        (
            "page.tiers",
            codec.block_page,
            pb.SnapshotReply(end_part=1, changed=[0], hashes=bytes(16), tiers=bytes(2)),
        ),
        (
            "page.tiers",
            codec.block_page,
            pb.SnapshotReply(end_part=1, changed=[0], hashes=bytes(16), tiers=bytes([3])),
        ),
    ],
)
def test_a_malformed_message_is_refused_by_the_fields_name(
    param: str, decode: Callable[[Any], Any], message: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(message)
    assert caught.value.details["param"] == param
