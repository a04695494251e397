"""The simulation sees what it is there to see: with a guard taken out, some seed fails."""

from __future__ import annotations

import pytest

from decode_worker.inbox import Inbox
from engine.kv.cache import KVCache
from engine.sequence import Sequence
from kv_transfer.codec import Frame
from router.sample_record import SampleRecord
from tests.simulation.chain_model import BLOCK_SIZE, Oracle
from tests.simulation.scenario import scenario_of
from tests.simulation.world import play

MOST_SEEDS = 400


def first_broken() -> list[str]:
    """What the first seed that fails says."""
    oracle = Oracle()
    for seed in range(MOST_SEEDS):
        if broken := play(scenario_of(seed), oracle).broken:
            return broken
    return []


@pytest.mark.timeout(300)
def test_kv_that_was_not_verified_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frame, "verify", lambda frame, block_bytes: None)
    assert any("wrong KV" in line or "are right" in line for line in first_broken())


@pytest.mark.timeout(300)
def test_blocks_that_are_published_before_they_are_full_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = KVCache.publish_full

    def early(cache: KVCache, sequence: Sequence) -> None:
        num_computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_tokens // BLOCK_SIZE * BLOCK_SIZE
        publish(cache, sequence)
        sequence.num_computed_tokens = num_computed

    monkeypatch.setattr(KVCache, "publish_full", early)
    assert any("wrong KV" in line or "are right" in line for line in first_broken())


@pytest.mark.timeout(300)
def test_reservations_that_never_expire_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "expire", lambda inbox: None)
    assert any("holds" in line for line in first_broken())


@pytest.mark.timeout(300)
def test_tokens_that_are_given_twice_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleRecord, "take", lambda record, delta: delta)
    assert any("are right" in line or "a delta at" in line for line in first_broken())
