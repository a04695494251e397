"""What is told of pairs may be read on another thread at any moment, while it changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from core.ids import Epoch, WorkerRef
from kv_transfer.pair_book import PairBook
from tests.unit.kv_transfer.doubles import DECODE


def refs(num: int) -> list[WorkerRef]:
    return [replace(DECODE, epoch=Epoch(number + 1)) for number in range(num)]


def test_pairs_that_come_and_are_used_while_others_are_told_disturb_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book, known = PairBook(CollectorRegistry()), refs(4)
    for ref in known:
        book.choose(ref, "grpc", "")
    is_reading, is_changing, calculated = False, False, WorkerRef.__hash__

    def switched(ref: WorkerRef) -> int:
        """The threads may change where a name's hash is worked out, as that is Python's code."""
        nonlocal is_changing
        if is_reading and not is_changing:
            is_changing = True
            book.deliver(known[0], "grpc", 100, 1.0)
            book.choose(replace(DECODE, epoch=Epoch(99)), "grpc", "")
            is_changing = False
        return calculated(ref)

    monkeypatch.setattr(WorkerRef, "__hash__", switched)
    is_reading = True
    told = book.statuses()
    is_reading = False
    assert len(told) in (4, 5)


def test_the_pairs_that_were_heard_of_least_recently_are_forgotten() -> None:
    book, many = PairBook(CollectorRegistry()), refs(257)
    for ref in many[:256]:
        book.choose(ref, "grpc", "")
    book.choose(many[0], "shm", "")
    book.choose(many[256], "grpc", "")
    epochs = {pair.epoch for pair in book.statuses()}
    assert len(epochs) == 256
    assert many[0].epoch in epochs
    assert many[1].epoch not in epochs
    book.forget(many[0])
    assert many[0].epoch not in {pair.epoch for pair in book.statuses()}
