"""Pairs are told as ready only for as long as somebody keeps them so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from kv_transfer.config import BridgeConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.sender import Sender
from tests.unit.kv_transfer.doubles import (
    PREFILL,
    ByteStore,
    DecodeEnd,
    LoopClock,
    in_virtual_time,
    until,
)


@asynccontextmanager
async def warm_pair() -> AsyncIterator[tuple[Sender, TransferMetrics]]:
    decode, metrics = DecodeEnd(), TransferMetrics(CollectorRegistry())
    config = BridgeConfig(max_warm_pairs=1)
    sender = Sender(ByteStore(4), PREFILL, decode.directory.connect, LoopClock(), metrics, config)
    sender.expect([decode.ref])
    await until(lambda: is_warm(metrics))
    yield sender, metrics
    await sender.close()
    await decode.receiver.close()


def is_warm(metrics: TransferMetrics) -> bool:
    return any(pair.is_warm for pair in metrics.pairs.statuses())


@in_virtual_time
async def test_a_worker_that_has_left_its_role_keeps_no_pair_ready() -> None:
    async with warm_pair() as (sender, metrics):
        await sender.close()
        assert not is_warm(metrics)
        assert len(metrics.pairs.statuses()) == 1, "what was carried is still told"


@in_virtual_time
async def test_a_worker_that_is_gone_is_forgotten() -> None:
    async with warm_pair() as (sender, metrics):
        sender.expect([])
        await until(lambda: not is_warm(metrics))
        assert metrics.pairs.statuses() == ()
