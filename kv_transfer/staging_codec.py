"""Replies of offer and meet ↔ values: the blocks that decode holds, where it offers staging memory. Pure
functions.
"""

from __future__ import annotations

from kv_transfer.transport import GroupAddress, OfferedStaging, StagingAddress
from protos import kv_transfer_pb2 as pb


def offer_reply(held: tuple[int, ...], offered: OfferedStaging) -> pb.OfferReply:
    return pb.OfferReply(
        held=held,
        staging=_message(offered.shm),
        device_staging=_message(offered.device),
        group=_group(offered.group),
    )


def meet_reply(offered: OfferedStaging) -> pb.MeetReply:
    return pb.MeetReply(
        staging=_message(offered.shm),
        device_staging=_message(offered.device),
        group=_group(offered.group),
    )


def offered_staging(reply: pb.OfferReply | pb.MeetReply) -> OfferedStaging:
    return OfferedStaging(
        _address(reply.staging) if reply.HasField("staging") else None,
        _address(reply.device_staging) if reply.HasField("device_staging") else None,
        GroupAddress(reply.group.backend) if reply.HasField("group") else None,
    )


def _group(address: GroupAddress | None) -> pb.GroupAddress | None:
    return None if address is None else pb.GroupAddress(backend=address.backend)


def _message(address: StagingAddress | None) -> pb.StagingAddress | None:
    if address is None:
        return None
    return pb.StagingAddress(
        host_id=address.host_id,
        socket_name=address.socket_name,
        token=address.token,
        device_id=address.device_id,
    )


def _address(found: pb.StagingAddress) -> StagingAddress:
    return StagingAddress(found.host_id, found.socket_name, found.token, found.device_id)
