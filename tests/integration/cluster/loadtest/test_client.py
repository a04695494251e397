"""Whatever a server does, its record says so, and only whole answers are results."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.loadtest.client import Client, NoAnswer
from cluster.loadtest.prompts import Ask, request_body
from cluster.loadtest.record import Outcome, RequestRecord
from cluster.loadtest.settings import Api, StreamEnd, Target
from tests.integration.cluster.loadtest.odd_server import TOKEN_S, OddServer


async def ask(url: str, rules: str, num_tokens: int = 8, **target: Any) -> RequestRecord:
    wanted = Target(url, **target)
    ask = Ask(request_body(wanted, rules, ["one two three"], num_tokens), 5, num_tokens)
    start = time.perf_counter()
    async with Client(wanted, None, lambda: time.perf_counter() - start) as client:
        return await client.call(ask, 0.0).run()


@pytest.mark.parametrize("api", list(Api))
async def test_a_whole_answer_is_timed_by_its_texts_and_counted_by_the_server(
    server: OddServer, api: Api
) -> None:
    found = await ask(server.url, "slow:0.1", api=api)
    assert (found.outcome, found.detail) == (Outcome.COMPLETED, "")
    assert len(found.event_times_s) == 8
    assert (found.num_prompt_tokens, found.num_output_tokens, found.num_cached_tokens) == (5, 8, 1)
    assert found.ttft_s is not None
    assert found.ttft_s > 0.1, "the piece that opens a chat's answer comes at once and is no token"
    assert found.ttft_s + sum(found.pauses_s) <= found.e2e_s
    assert found.finish_reason == "length"


async def test_an_event_in_two_packets_counts_when_it_is_whole(server: OddServer) -> None:
    found = await ask(server.url, "halves")
    assert len(found.event_times_s) == 8
    assert found.tpot_s is not None
    assert found.tpot_s > 1.8 * TOKEN_S


async def test_tokens_that_come_at_once_are_counted_by_the_server(server: OddServer) -> None:
    found = await ask(server.url, "at-once:4", num_tokens=16)
    assert (found.num_output_tokens, len(found.event_times_s), found.tokens_per_event) == (16, 4, 4.0)
    assert found.tpot_s == pytest.approx(sum(found.pauses_s) / 12)


async def test_without_a_count_events_are_taken_for_tokens_and_it_is_said(server: OddServer) -> None:
    found = await ask(server.url, "uncounted")
    assert (found.outcome, found.num_output_tokens, found.has_usage) == (Outcome.COMPLETED, 8, False)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("cut", "cut off"),
        ("malformed", "not JSON"),
        ("error-event", "a worker was lost"),
        ("early-done", "without a finish reason"),
        ("early-end", "without a finish reason, after 2"),
        ("half-event", "middle of an event"),
        ("unfinished", "without \\[DONE\\]"),
        ("broken", "status 500: out of order"),
        ("page", "text/html"),
    ],
)
async def test_less_than_a_whole_answer_is_an_error(server: OddServer, rules: str, words: str) -> None:
    found = await ask(server.url, rules)
    assert found.outcome is Outcome.ERROR
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found.detail)
    assert found.ttft_s is None or found.outcome is not Outcome.COMPLETED


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_is_no_error(server: OddServer, status: int) -> None:
    found = [await ask(server.url, f"busy:{status}") for _ in range(3)]
    assert [record.outcome for record in found] == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.REFUSED]
    assert found[-1].status == status


async def test_a_server_that_leaves_out_the_last_word_is_measured_when_told_so(server: OddServer) -> None:
    found = await ask(server.url, "unfinished", stream_end=StreamEnd.FINISH)
    assert found.is_completed
    assert not (await ask(server.url, "early-end", stream_end=StreamEnd.FINISH)).is_completed


async def test_an_answer_that_does_not_end_is_an_error_after_the_timeout(server: OddServer) -> None:
    found = await ask(server.url, "hang", timeout_s=0.3)
    assert (found.outcome, found.detail) == (Outcome.ERROR, "no complete answer within 0.3 s")
    assert len(found.event_times_s) == 2


async def test_nobody_there_is_an_error(server: OddServer) -> None:
    found = await ask("http://127.0.0.1:9", "plain")
    assert found.outcome is Outcome.ERROR
    assert "Connect" in found.detail
    async with Client(Target("http://127.0.0.1:9"), None, time.perf_counter) as client:
        with pytest.raises(NoAnswer, match="9/v1/models"):
            await client.first_model()


async def test_a_call_that_is_given_up_is_unfinished_and_keeps_what_came(server: OddServer) -> None:
    target = Target(server.url)
    body = request_body(target, "hang", ["one"], 8)
    start = time.perf_counter()
    async with Client(target, None, lambda: time.perf_counter() - start) as client:
        call = client.call(Ask(body, 3, 8), 0.0)
        task = asyncio.create_task(call.run())
        while call.num_events < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        found = call.so_far()
    assert (found.outcome, len(found.event_times_s)) == (Outcome.UNFINISHED, 2)


async def test_the_key_is_shown(server: OddServer) -> None:
    async with Client(Target(server.url), "secret", time.perf_counter) as client:
        assert await client.first_model() == "plain"
        assert "secret" not in repr(client)
