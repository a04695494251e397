"""Only a complete stream is a result."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.streaming import Ask, BrokenStream, Call, Endpoint, Stream

ASK = Ask("a prompt", 4, 3)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    return _data({"choices": [{"text": text, "finish_reason": finish_reason}], **more})


def usage(num_output_tokens: int = 3, num_prompt_tokens: int = 4) -> bytes:
    counts = {"completion_tokens": num_output_tokens, "prompt_tokens": num_prompt_tokens}
    return _data({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 2}}})


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = (event("a"), event(""), event("b", "length"), usage(), DONE)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read(*pieces: bytes) -> Stream:
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return await Call(Endpoint(1, "m"), ASK).read(reader, due_at=0.0)


async def test_a_complete_stream_has_the_times_of_its_texts_and_the_servers_counts() -> None:
    stream = await read(HEAD, *map(chunk, WHOLE), END)
    assert stream.text == "ab"
    assert len(stream.times) == 2, "an event without text is not a token that a client sees"
    assert (stream.num_prompt_tokens, stream.num_output_tokens, stream.num_cached_tokens) == (4, 3, 2)
    assert 0.0 < stream.times[0] <= stream.times[1] <= stream.ended_at


async def test_events_need_not_begin_where_chunks_do() -> None:
    body = b"".join(WHOLE)
    pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
    assert (await read(HEAD, *map(chunk, pieces), END)).text == "ab"


async def test_a_body_without_length_lasts_until_the_connection_closes() -> None:
    assert (await read(b"HTTP/1.1 200 OK\r\n\r\n", *WHOLE)).text == "ab"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([HEAD, *map(chunk, WHOLE)], "cut in the middle"),
        ([HEAD, chunk(WHOLE[0])[:-4]], "cut in the middle"),
        ([HEAD, *map(chunk, WHOLE[:-1]), END], "without .DONE. after 2 events"),
        ([HEAD, *map(chunk, (event("a", "stop"), usage(), DONE)), END], "finish reason stop"),
        ([HEAD, *map(chunk, (event("a", "length"), usage(2), DONE)), END], "2 tokens instead of 3"),
        ([HEAD, *map(chunk, (event("a", "length"), DONE)), END], "None tokens instead of 3"),
        ([HEAD, *map(chunk, (event("a", "length"), usage(3, 7), DONE)), END], "read 7 prompt tokens, not 4"),
        (
            [HEAD, *map(chunk, (event("a"), event("", error={"message": "lost"}))), END],
            "after 1 events.*lost",
        ),
        ([HEAD, *map(chunk, (event("", "length"), usage(), DONE)), END], "no text"),
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"], "status 503: busy"),
        ([b""], "closed before the answer began"),
    ],
)
async def test_anything_less_is_broken(pieces: list[bytes], message: str) -> None:
    with pytest.raises(BrokenStream, match=message):
        await read(*pieces)
