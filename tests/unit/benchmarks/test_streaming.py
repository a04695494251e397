"""Only the answer that was asked for is a result. How a stream is read: tests/unit/cluster/loadtest."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.streaming import Ask, BrokenStream, Call, Endpoint, Stream, whole_stream
from cluster.loadtest.record import Outcome, RequestRecord

ASK = Ask("a prompt", 4, 3)


def record(**more: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "index": 0,
        "due_s": 1.0,
        "sent_s": 1.0,
        "ended_s": 3.0,
        "outcome": Outcome.COMPLETED,
        "event_times_s": (2.0, 2.5),
        "num_prompt_tokens": 4,
        "num_output_tokens": 3,
        "num_cached_tokens": 2,
        "finish_reason": "length",
    }
    return RequestRecord(**{**given, **more})


def test_a_whole_answer_has_the_times_of_its_texts_and_the_servers_counts() -> None:
    assert whole_stream(record(), ASK, "ab") == Stream(1.0, (2.0, 2.5), 3.0, 4, 3, 2, "ab")
    assert whole_stream(record(num_prompt_tokens=6), ASK, "ab").num_prompt_tokens == 6, (
        "counts may differ by two"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outcome": Outcome.ERROR, "detail": "the answer was cut off"}, "cut off"),
        ({"outcome": Outcome.REFUSED, "detail": "status 503: busy"}, "status 503: busy"),
        ({"finish_reason": "stop"}, "finish reason stop"),
        ({"num_output_tokens": 2}, "2 tokens instead of 3"),
        ({"has_usage": False}, "did not count"),
        ({"num_prompt_tokens": 7}, "read 7 prompt tokens, not 4"),
        ({"event_times_s": ()}, "no text"),
    ],
)
def test_anything_less_is_broken(more: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenStream, match=message):
        whole_stream(record(**more), ASK, "ab")


def test_a_call_that_has_not_begun_has_no_times() -> None:
    assert list(Call(Endpoint(1, "m"), ASK).times) == []
