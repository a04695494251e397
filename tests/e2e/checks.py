"""Checks that many cases share: survival, equality of answers, and what a refused request looks like.

Pure assertions over `client` and `scrape`; no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.e2e.answers import Answer
from tests.e2e.client import CHAT, COMPLETIONS, Client, assert_error_body
from tests.e2e.harness import System
from tests.e2e.reference import NEAR_TIE, TOLERANCE

PROBE = "The capital of France is"


@contextmanager
def survives(system: System) -> Iterator[None]:
    """What happens inside leaves the system answering as before, by the very same processes."""
    text = probe(system.client)
    pids = {process.pid for process in system.processes()}
    yield
    assert probe(system.client) == text, "the answer to the probe has changed"
    assert pids <= {process.pid for process in system.processes()}, "a process was replaced"


def probe(client: Client) -> str:
    return client.complete(PROBE, max_tokens=4, temperature=0).text


def assert_same(one: Answer, other: Answer, where: str) -> None:
    """Equal texts and ends; reported logprobs equal within the tolerance.

    A divergence is accepted only at a near tie, which takes two candidates in the answers to see.
    """
    if one.tokens and one.tokens != other.tokens:
        position = first_difference(one.tokens, other.tokens)
        assert is_near_tie(one, position), (
            f"{where}: differ at token {position}: {one.tokens[position : position + 3]} against "
            f"{other.tokens[position : position + 3]}; {one.tops[position : position + 1]}"
        )
        return
    assert one.text == other.text, f"{where}: {one.text!r} against {other.text!r}"
    assert one.finish_reason == other.finish_reason, f"{where}: {one.finish_reason}, {other.finish_reason}"
    assert_same_logprobs(one.logprobs, other.logprobs, where)


def assert_same_logprobs(one: Sequence[float | None], other: Sequence[float | None], where: str) -> None:
    assert len(one) == len(other), f"{where}: {len(one)} logprobs against {len(other)}"
    for position, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine is None or theirs is None:
            assert mine is theirs, f"{where}: only one logprob at {position}"
        else:
            assert abs(mine - theirs) <= TOLERANCE, f"{where}: logprob {position}: {mine} against {theirs}"


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    for position, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return position
    return min(len(one), len(other))


def is_near_tie(answer: Answer, position: int) -> bool:
    """Whether the two best candidates that the answer reports at `position` are that close."""
    if position >= len(answer.tops) or len(answer.tops[position] or {}) < 2:
        return False
    best, second = sorted((answer.tops[position] or {}).values(), reverse=True)[:2]
    return best - second < NEAR_TIE


def refused(client: Client, path: str, body: Any, *statuses: int) -> dict[str, Any]:
    """An error body with one of `statuses` (400 unless given), also for streams: before any event."""
    return assert_error_body(client.post(path, body), *(statuses or (400,)))


def refused_both(client: Client, path: str, body: dict[str, Any], *statuses: int) -> None:
    """Refused, whether streamed or not."""
    for stream in (False, True):
        refused(client, path, {**body, "stream": stream}, *statuses)


BOTH = (COMPLETIONS, CHAT)


def minimal(path: str) -> dict[str, Any]:
    """The smallest valid body."""
    return {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
