"""A request that offers another protocol, as clients that know HTTP/2 do, is answered as if it had not."""

from __future__ import annotations

import json
import socket

import pytest

from tests.e2e import profiles
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System

OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAI\r\n",
    "other": "Connection: keep-alive, Upgrade\r\nUpgrade: TLS/1.2\r\n",
}


def requests(system: System, offer: str, *prompts: str) -> bytes:
    """Requests on one connection, one behind the other; the last one ends it and offers nothing."""
    sent = b""
    for number, prompt in enumerate(prompts):
        body = json.dumps({"model": system.client.model, "prompt": prompt, "max_tokens": 2, "echo": True})
        last = "Connection: close\r\n" if number == len(prompts) - 1 else offer
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{last}Content-Length: {len(body)}\r\n\r\n"
        )
        sent += (head + body).encode()
    return sent


@pytest.mark.parametrize("num_pieces", [1, 7])
@pytest.mark.parametrize(
    ("is_local", "name"),
    [(True, "h2c"), (True, "other"), (False, "h2c")],
    ids=["one process, h2c", "one process, other", "ray, h2c"],
)
def test_the_request_that_offers_and_the_one_behind_it_are_answered(
    fleet: Fleet, is_local: bool, name: str, num_pieces: int
) -> None:
    system = fleet.system(profiles.STD if is_local else profiles.PAIR, is_local=is_local)
    sent = requests(system, OFFERS[name], "Hello offer", "Hello again", "Hello end")
    size = -(-len(sent) // num_pieces)
    with socket.create_connection(("127.0.0.1", system.port), timeout=60) as connection:
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200") == 3, answers
    assert [answers.count(words) for words in (b"Hello offer", b"Hello again", b"Hello end")] == [1, 1, 1]
