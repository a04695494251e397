"""Only a whole, well-formed stream is an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.loadtest.answer import Answer
from cluster.loadtest.event_stream import BrokenStream, EventReader
from cluster.loadtest.settings import StreamEnd

DONE = b"data: [DONE]\n\n"


def data(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def said(text: str, finish_reason: str | None = None) -> bytes:
    return data({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def delta(finish_reason: str | None = None, **content: Any) -> bytes:
    return data({"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]})


USAGE = data(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
)
WHOLE = (said("a"), said(""), said("b", "length"), USAGE, DONE)


def read(*pieces: bytes, end: StreamEnd = StreamEnd.DONE) -> Answer:
    """The piece's number is its moment."""
    reader, answer = EventReader(), Answer(end)
    for now, piece in enumerate(pieces):
        for event in reader.feed(piece):
            answer.take(event, now)
    reader.end()
    answer.complete()
    return answer


def test_a_whole_stream_has_the_moments_of_its_texts_and_the_servers_counts() -> None:
    answer = read(*WHOLE)
    assert (answer.text, answer.times, answer.finish_reason) == ("ab", [0, 2], "length")
    counts = (answer.count("prompt_tokens"), answer.count("completion_tokens"), answer.num_cached_tokens)
    assert counts == (4, 3, 2)


def test_the_piece_that_only_opens_a_chat_answer_is_no_token() -> None:
    pieces = (delta(role="assistant", content=""), delta(content="a"), delta("stop"), DONE)
    assert read(*pieces).times == [1]
    thinking = (
        delta(role="assistant"),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta("stop"),
        DONE,
    )
    assert (read(*thinking).times, read(*thinking).text) == ([1, 2], "a")
    calling = (delta(tool_calls=[{"index": 0}]), delta("tool_calls"), DONE)
    assert read(*calling).times == [0]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_events_need_not_begin_where_pieces_do(size: int) -> None:
    body = b"".join(WHOLE)
    assert read(*(body[start : start + size] for start in range(0, len(body), size))).text == "ab"


def test_an_event_counts_when_its_end_has_come() -> None:
    first = said("a")
    assert read(first[:9], first[9:-1], first[-1:], *WHOLE[2:]).times == [2, 3]


def test_comments_other_fields_and_carriage_returns_are_part_of_the_format() -> None:
    body = b": ping\r\n\r\nid: 7\r\nevent: message\r\n" + b"".join(WHOLE).replace(b"\n", b"\r\n")
    assert read(body).text == "ab"
    assert read(b'data: {"choices":\ndata: []}\n\n', *WHOLE).text == "ab", "data may have several lines"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((), "without a finish reason, after 0"),
        (WHOLE[:1], "without a finish reason, after 1"),
        (WHOLE[:-1], r"without \[DONE\]"),
        ((WHOLE[0], DONE), r"\[DONE\] without a finish reason"),
        ((*WHOLE, said("c")), r"after \[DONE\]"),
        ((said("a", "stop"), said("b"), DONE), "text after the finish reason"),
        ((said("a", "stop"), said("", "stop"), DONE), "a second finish reason"),
        ((said("a", "error"), DONE), "finish reason 'error'"),
        ((said("a", "abort"), DONE), "finish reason 'abort'"),
        ((said("a"), data({"error": {"message": "lost"}})), "an error after 1 .*lost"),
        ((b'event: error\ndata: {"message": "lost"}\n\n',), "an error after 0 .*lost"),
        ((b'data: {"choices": [\n\n',), "not JSON"),
        ((data([1]),), "not a JSON object"),
        ((data({"object": "x"}),), "without choices"),
        ((data({"choices": [{"index": 1, "text": "a"}]}),), "not asked for"),
        ((data({"choices": [{"text": 5}]}),), "no text"),
        ((data({"choices": [{"delta": "a"}]}),), "no object"),
        ((b"<html>busy</html>\n",), "not a line of an event stream"),
        ((*WHOLE[:-1], DONE[:-1]), "middle of an event"),
        ((*WHOLE[:3], b'data: {"cho'), "middle of an event"),
    ],
)
def test_anything_less_is_broken(pieces: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(BrokenStream, match=message):
        read(*pieces)


def test_a_server_without_the_last_word_must_have_given_a_finish_reason() -> None:
    assert read(*WHOLE[:-1], end=StreamEnd.FINISH).text == "ab"
    with pytest.raises(BrokenStream, match="finish reason"):
        read(*WHOLE[:2], end=StreamEnd.FINISH)


def test_counts_that_are_no_numbers_are_no_counts() -> None:
    pieces = (said("a", "stop"), data({"choices": [], "usage": {"completion_tokens": "3"}}), DONE)
    assert read(*pieces).count("completion_tokens") is None
    assert read(said("a", "stop"), DONE).num_cached_tokens == 0
