"""The sender keeps its moments: what is due goes out before the next one is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from cluster.loadtest.client import Call, Client
from cluster.loadtest.plan import Part, Session, Turn
from cluster.loadtest.prompts import Ask, Composer
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.runner import RunClock, Runner
from cluster.loadtest.settings import Target, Window
from cluster.loadtest.vocabulary import Vocabulary
from tests.unit.cluster.loadtest.records import record

NUM_REQUESTS = 20


class Calls:
    """A client whose calls are answered at once; `num_sent` of them were sent."""

    def __init__(self) -> None:
        self.num_sent = 0

    def call(self, ask: Ask, due_s: float) -> Call:
        return cast(Call, AtOnce(self, due_s))


class AtOnce:
    def __init__(self, calls: Calls, due_s: float) -> None:
        self.due_s = due_s
        self.index = 0
        self.record: RequestRecord | None = None
        self._calls = calls

    async def run(self) -> RequestRecord:
        self._calls.num_sent += 1
        self.record = record(self.due_s, self.due_s + 0.1, index=self.index)
        return self.record

    def so_far(self) -> RequestRecord:
        assert self.record is not None
        return self.record


async def test_a_sender_that_is_late_sends_each_request_before_it_makes_the_one_after_the_next() -> None:
    """All are due at once, as in a trace whose times are rounded."""
    calls, sent_before = Calls(), []

    def sessions() -> Iterator[Session]:
        for number in range(NUM_REQUESTS):
            sent_before.append(calls.num_sent)
            yield Session(0.0, (Turn((Part(f"{number}", 8),), 2),))

    composer = Composer(Target(), "model", Vocabulary(("a", "b"), 1), 0)
    window = Window(num_requests=NUM_REQUESTS)
    runner = Runner(cast(Client, calls), RunClock(), composer, window, lambda state: None)
    result = await runner.open_loop(sessions())
    assert len(result.records) == NUM_REQUESTS
    assert all(num_sent >= number - 1 for number, num_sent in enumerate(sent_before)), sent_before
