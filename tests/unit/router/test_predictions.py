"""What a request will leave on its worker is expected until it is there, fails, or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from router.predictions import Predictions
from router.prefix_index import Overlap
from tests.unit.router.told_worker import IndexSite, block, deliver, removed, stored

CHAIN = [block(part * 37, part) for part in range(8)]


@pytest.fixture
def site() -> Iterator[IndexSite]:
    loop = asyncio.new_event_loop()
    site = IndexSite(loop)
    yield site
    site.end()
    loop.close()


def test_what_a_request_will_leave_is_predicted_until_it_is_there(site: IndexSite) -> None:
    site.a.tell(stored(CHAIN[0]))
    deliver(site.index, site.a)
    now = site.clock.now()
    prediction = site.index.predict(site.a.worker_id, CHAIN[:4], now + 30)
    assert site.index.overlaps(CHAIN) == {"a": Overlap(4, 1, 0, 1.0)}
    site.a.tell(stored(CHAIN[1]), stored(CHAIN[2]))
    deliver(site.index, site.a)
    assert site.index.overlaps(CHAIN) == {"a": Overlap(4, 3, 0, 1.0)}
    site.index.withdraw(prediction)
    site.index.withdraw(prediction)
    assert site.index.match(CHAIN) == {"a": 3}, "what has come true stays"
    site.index.predict(site.a.worker_id, CHAIN[:4], now + 30)
    site.a.tell(stored(CHAIN[3]), removed(CHAIN[3]))
    deliver(site.index, site.a)
    assert site.index.match(CHAIN) == {"a": 3}, "its end was there: it is expected no more"
    assert site.index.num_predictions == 0
    assert site.index.predict(site.a.worker_id, CHAIN[:3], now + 30) is None, "it is there already"


def test_a_prompt_that_begins_alike_finds_what_is_expected_of_the_common_beginning(site: IndexSite) -> None:
    until = site.clock.now() + 30
    other = [*CHAIN[:3], *(block(4000 + number, number) for number in range(5))]
    site.index.predict(site.a.worker_id, CHAIN[:2], until)
    site.index.predict(site.a.worker_id, other, until)
    site.index.predict(site.b.worker_id, CHAIN[:7], until)
    assert site.index.match(CHAIN) == {"a": 3, "b": 7}
    assert site.index.match(other) == {"a": 8, "b": 3}
    assert site.index.match(CHAIN[1:]) == {}


def test_what_is_expected_is_bounded_and_the_first_to_end_goes_first() -> None:
    predictions = Predictions(max_blocks=10)
    predictions.add(1, CHAIN[:4], 30.0)
    predictions.add(2, CHAIN[:4], 20.0)
    predictions.add(4, CHAIN[:4], 40.0)
    assert predictions.lengths(CHAIN) == {1: 4, 4: 4}
    predictions.drop(1)
    assert predictions.lengths(CHAIN) == {4: 4}


def test_a_prediction_ends_with_its_time(site: IndexSite) -> None:
    now = site.clock.now()
    short = site.index.predict(site.a.worker_id, CHAIN[:2], now + 5)
    long = site.index.predict(site.a.worker_id, CHAIN[:4], now + 30)
    site.index.end_by(short, now + 10)
    site.clock.advance(7)
    assert site.index.match(CHAIN) == {"a": 4}
    site.index.end_by(long, now + 8)
    site.clock.advance(2)
    assert site.index.match(CHAIN) == {"a": 2}
    site.clock.advance(2)
    assert site.index.match(CHAIN) == {}
    assert site.index.num_predictions == 0


def test_predictions_of_equal_prompts_stand_on_their_own(site: IndexSite) -> None:
    until = site.clock.now() + 30
    first = site.index.predict(site.a.worker_id, CHAIN[:3], until)
    second = site.index.predict(site.a.worker_id, CHAIN[:3], until)
    other = site.index.predict(site.b.worker_id, CHAIN[:1], until)
    site.index.withdraw(first)
    assert site.index.match(CHAIN) == {"a": 3, "b": 1}
    site.index.withdraw(second)
    assert site.index.match(CHAIN) == {"b": 1}
    site.index.forget(site.b.worker_id)
    site.index.withdraw(other)
    assert site.index.match(CHAIN) == {}
    assert site.index.predict(site.b.worker_id, CHAIN, until) is None
