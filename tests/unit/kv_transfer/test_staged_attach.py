"""A way that cannot be had costs the offers of a pair its time once, not each time that it is tried again."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from core.errors import HandoffError
from core.handoff import HandoffTicket
from kv_transfer.config import BridgeConfig
from kv_transfer.shm_handshake import Fallback, NotAttached
from kv_transfer.staged_transport import StagedTransport, StagingWish
from kv_transfer.staging import Attached
from kv_transfer.transport import OfferedStaging, Pair
from tests.unit.kv_transfer.doubles import (
    DECODE,
    LAYOUT,
    PREFILL,
    DecodeEnd,
    TroubledTransport,
    in_virtual_time,
    make_ticket,
)

AGAIN_S = BridgeConfig().attach_again_s


class Inner(TroubledTransport):
    """What the way stands on; payloads go by it."""

    async def offer_and_ask(
        self, ticket: HandoffTicket, time_left_s: float
    ) -> tuple[tuple[int, ...], OfferedStaging]:
        return await self.offer(ticket, time_left_s), OfferedStaging()

    async def ask(self, pair: Pair) -> OfferedStaging:
        return OfferedStaging()

    async def prepare(self, pair: Pair, offered: OfferedStaging) -> None:
        """Nothing to attach."""


class Way(StagedTransport):
    """Each try waits for the next of `tries`, and fails by it."""

    name = "shm"

    def __init__(self, end: DecodeEnd, *, is_required: bool = False) -> None:
        wish = StagingWish(1 << 20, 1 << 12, is_required, 1.0, AGAIN_S)
        super().__init__(Inner(end.directory.connect(DECODE)), wish)
        self.tries: deque[asyncio.Future[Fallback]] = deque()

    def obstacle(self, offered: OfferedStaging) -> Fallback | None:
        return None

    async def attach(self, offered: OfferedStaging, pair: Pair, num_bytes: int) -> Attached:
        self.tries.append(asyncio.get_running_loop().create_future())
        raise NotAttached(await self.tries[-1], "so it is")

    async def offered(self) -> None:
        await self.offer(make_ticket(16, PREFILL, DECODE, LAYOUT), 10.0)

    async def fail(self, offer: asyncio.Task[None], why: Fallback) -> None:
        """The try that `offer` waits for ends."""
        await asyncio.sleep(0.1)
        assert not offer.done()
        self.tries[-1].set_result(why)
        await offer


@in_virtual_time
async def test_after_a_try_that_took_all_of_its_time_offers_do_not_wait_for_the_next_one() -> None:
    way = Way(DecodeEnd())
    await way.fail(asyncio.create_task(way.offered()), Fallback.TIMEOUT)
    await asyncio.sleep(AGAIN_S + 0.1)
    await way.offered()
    await way.offered()
    await asyncio.sleep(0)
    assert len(way.tries) == 2, "it is tried, once for both"
    assert not way.tries[-1].done()
    await way.close()


@in_virtual_time
async def test_a_try_that_failed_at_once_is_waited_for_the_next_time() -> None:
    way = Way(DecodeEnd())
    for count in (1, 2):
        await way.fail(asyncio.create_task(way.offered()), Fallback.REFUSED)
        assert len(way.tries) == count
        await asyncio.sleep(2 * AGAIN_S + 0.1)
    await way.close()


@in_virtual_time
async def test_where_nothing_else_will_do_each_offer_waits_for_its_try() -> None:
    way = Way(DecodeEnd(), is_required=True)
    for count in (1, 2):
        with pytest.raises(HandoffError, match="required"):
            await way.fail(asyncio.create_task(way.offered()), Fallback.TIMEOUT)
        assert len(way.tries) == count
        await asyncio.sleep(2 * AGAIN_S + 0.1)
    await way.close()
