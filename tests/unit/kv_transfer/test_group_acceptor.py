"""Decode's side of the stream on which a group is agreed upon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from core.ids import Epoch
from core.peer_security import PeerSecurity
from kv_transfer.config import ReceiverConfig
from kv_transfer.group_acceptor import GroupAcceptor
from kv_transfer.group_messages import NONCE_BYTES
from kv_transfer.group_transport import usable_groups
from kv_transfer.key_exchange import KeyExchange
from kv_transfer.pair_group import PairGroup
from protos import kv_transfer_pb2 as pb
from tests.unit.kv_transfer.doubles import until


class Nobody:
    """No group can be formed."""

    backend = "gloo"

    def form(self, rank: int, keys: KeyExchange, num_bytes: int, attach_s: float, op_s: float) -> PairGroup:
        raise OSError("no such network")


async def test_the_call_ends_only_after_a_write_that_is_under_way() -> None:
    """gRPC refuses the end of a call that still writes, and the other end would wait for it for ever."""
    config = ReceiverConfig()
    groups = usable_groups(config.distributed, PeerSecurity(), Nobody())
    assert groups is not None
    sent: list[bytes] = []
    is_writing, may_end = asyncio.Event(), asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        hello = pb.GroupHello(
            receiver_epoch=7, sender_epoch=8, backend="gloo", num_bytes=64, nonce=b"n" * NONCE_BYTES
        )
        yield pb.GroupMessage(hello=hello).SerializeToString()
        await asyncio.sleep(3600)

    async def send(message: bytes) -> None:
        is_writing.set()
        await may_end.wait()
        sent.append(message)

    acceptor = GroupAcceptor(Epoch(7), config, lambda num_bytes: None, groups)
    serving = asyncio.create_task(acceptor.serve(messages(), send))
    await is_writing.wait()
    await until(lambda: acceptor.num_bytes == 0)
    await asyncio.sleep(0.01)
    assert not serving.done()
    may_end.set()
    await asyncio.wait_for(serving, 5.0)
    assert [pb.GroupMessage.FromString(message).WhichOneof("kind") for message in sent] == ["grant"]
