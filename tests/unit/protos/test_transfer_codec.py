"""Tickets keep every field on the wire; one whose parts disagree is refused before anyone reserves for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from core.errors import TransferCorrupt
from core.handoff import HandoffTicket
from core.ids import Epoch
from core.kv_layout import KVLayout
from protos import inference_pb2, transfer_codec
from protos import kv_transfer_pb2 as pb
from tests.unit.protos import strategies


@strategies.quick
@given(strategies.tickets(), strategies.seconds, strategies.epochs)
def test_an_offer_keeps_every_field_of_the_ticket(
    ticket: HandoffTicket, time_left_s: float, epoch: Epoch
) -> None:
    data = transfer_codec.offer_request(ticket, time_left_s, epoch).SerializeToString()
    message = pb.OfferRequest.FromString(data)
    assert transfer_codec.offered_ticket(message) == ticket
    assert transfer_codec.time_left(message) == time_left_s
    assert message.receiver_epoch == epoch


@strategies.quick
@given(strategies.layouts)
def test_a_layout_keeps_its_fingerprint(layout: KVLayout) -> None:
    assert (
        transfer_codec.decode_layout(transfer_codec.encode_layout(layout)).fingerprint == layout.fingerprint
    )


def ticket_message(**changes: Any) -> pb.Ticket:
    message = pb.Ticket(
        ticket_id="0a" * 16,
        prefill=inference_pb2.WorkerRef(role="prefill"),
        decode=inference_pb2.WorkerRef(role="decode"),
        layout=pb.KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32"),
        num_tokens=9,
        block_hashes=bytes(32),
        num_samples=1,
    )
    transfer_codec.decode_ticket(message)  # the unchanged message is well formed
    for field, value in changes.items():
        if field in pb.KVLayout.DESCRIPTOR.fields_by_name:
            setattr(message.layout, field, value)
            continue
        message.ClearField(field)
        message.MergeFrom(pb.Ticket(**{field: value}))
    return message


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket_id": ""},
        {"ticket_id": "0a" * 15},
        {"ticket_id": "0A" * 16},
        {"ticket_id": "zz" * 16},
        {"prefill": None},
        {"decode": None},
        {"layout": None},
        {"prefill": inference_pb2.WorkerRef(role="king")},
        {"num_tokens": 0},
        {"num_tokens": -4},
        {"num_tokens": 12},
        {"num_samples": 0},
        {"num_growth_tokens": -1},
        {"block_hashes": bytes(31)},
        {"block_hashes": bytes(16)},
        {"block_size": 0},
        {"head_dim": -1},
        {"dtype": "float128"},
    ],
)
def test_a_ticket_whose_parts_disagree_is_refused(changes: dict[str, Any]) -> None:
    message = ticket_message(**changes)
    with pytest.raises(TransferCorrupt):
        transfer_codec.decode_ticket(message)


@pytest.mark.parametrize("time_left_s", [float("nan"), float("inf"), -0.5])
def test_a_time_left_that_is_no_time_is_refused(time_left_s: float) -> None:
    with pytest.raises(TransferCorrupt):
        transfer_codec.time_left(pb.OfferRequest(time_left_s=time_left_s))
