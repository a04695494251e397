"""The collector runs far less often than a placement, and still runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from router.collector import collect_less_often


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


class Cycle:
    """Holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_a_thousand_short_lived_objects_collect_nothing_and_cycles_are_still_found() -> None:
    gc.collect()
    collect_less_often()
    before = gc.get_stats()[0]["collections"]
    held = [[number] for number in range(1_000)]
    assert gc.get_stats()[0]["collections"] == before, len(held)
    gone = weakref.ref(Cycle())
    many = [[number] for number in range(20_000)]
    assert gone() is None, len(many)
