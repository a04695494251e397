"""A whole test against a real server: the numbers are what the server did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.loadtest.client import NoAnswer
from cluster.loadtest.load_test import run_load_test
from cluster.loadtest.record import Outcome
from cluster.loadtest.report import LoadReport, Step
from cluster.loadtest.run_state import RunState
from cluster.loadtest.settings import LoadTestSettings, Window
from core.config import from_mapping
from tests.integration.cluster.loadtest.odd_server import OddServer

SLO = {"ttft_s": 2.0, "itl_s": 0.5}


class Silent:
    """Watches without a word; keeps what it saw."""

    def __init__(self) -> None:
        self.most_open = 0

    def tell(self, text: str) -> None: ...
    def begin(self, name: str, window: Window) -> None: ...
    def end(self, step: Step) -> None: ...

    def watch(self, state: RunState) -> None:
        self.most_open = max(self.most_open, len(state.running))


async def load_test(server: OddServer, rules: str, **tree: Any) -> LoadReport:
    target = {"url": server.url, "model": rules, **tree.pop("target", {})}
    lengths = {"prompt": {"low": 5, "high": 20}, "output": {"low": 2, "high": 4}}
    workload = {**lengths, **tree.pop("workload", {})}
    given = {"slo": SLO, "target": target, "workload": workload, **tree}
    return await run_load_test(from_mapping(LoadTestSettings, given), None, Silent())


def last_prompts(server: OddServer, count: int) -> list[str]:
    return [body["prompt"] for body in server.bodies[-count:]]


async def test_an_open_loop_sends_what_was_planned_when_it_was(server: OddServer) -> None:
    report = await load_test(server, "plain", arrivals={"rate": 30.0}, window={"num_requests": 40})
    summary = report.steps[0].summary
    assert report.verdict.has_passed
    assert (summary.num_completed, summary.num_wrong_prompts, summary.num_short) == (40, 0, 0)
    assert summary.offered_rps == pytest.approx(30.0, rel=0.6)
    dues = [row.due_s for row in report.detail.rows]
    assert dues == sorted(dues)
    lengths = [len(prompt.split()) + 2 for prompt in last_prompts(server, 40)]
    assert sorted(row.num_prompt_tokens for row in report.detail.rows) == sorted(lengths)
    assert all(5 <= length <= 20 for length in lengths)


async def test_a_slow_server_does_not_slow_the_sender(server: OddServer) -> None:
    """Each request takes the only place for 0.1 s; 20 a second are due, so the queue grows to a second."""
    report = await load_test(server, "queue:0.1", arrivals={"kind": "constant", "rate": 20.0},
                           window={"num_requests": 20})  # fmt: skip
    rows = report.detail.rows
    assert [row.due_s for row in rows] == pytest.approx([0.05 * (i + 1) for i in range(20)])
    assert rows[-1].ttft_s is not None
    assert rows[-1].ttft_s > 0.8, "the wait counts from when the request was due"
    assert report.steps[0].summary.offered_rps == pytest.approx(20.0, rel=0.06)


async def test_one_seed_asks_the_same_and_another_does_not(server: OddServer) -> None:
    runs = []
    for seed in (1, 1, 2):
        await load_test(server, "plain", arrivals={"rate": 100.0}, window={"num_requests": 10}, seed=seed)
        runs.append(sorted(last_prompts(server, 10)))
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


async def test_refusals_are_apart_from_errors_and_out_of_the_latencies(server: OddServer) -> None:
    report = await load_test(server, "busy:429", arrivals={"rate": 60.0}, window={"num_requests": 30})
    summary = report.steps[0].summary
    assert (summary.num_refused, summary.num_completed, summary.num_errors) == (10, 20, 0)
    assert summary.ttft is not None
    assert summary.ttft.num_values == 20
    assert summary.attainment <= 20 / 30
    assert not report.verdict.has_passed


async def test_an_error_share_above_the_limit_fails(server: OddServer) -> None:
    report = await load_test(server, "cut", arrivals={"rate": 60.0}, window={"num_requests": 20},
                           workload={"output": {"low": 1, "high": 6}})  # fmt: skip
    summary = report.steps[0].summary
    assert 0 < summary.num_errors < 20
    assert not report.verdict.has_passed
    assert summary.ttft is not None
    assert summary.ttft.num_values == summary.num_completed == 20 - summary.num_errors
    assert any("cut off" in reason for reason in report.verdict.reasons)


async def test_answers_of_one_token_have_a_first_token_and_no_gaps(server: OddServer) -> None:
    one = {"output": {"low": 1, "high": 1}}
    report = await load_test(
        server, "plain", arrivals={"rate": 60.0}, window={"num_requests": 10}, workload=one
    )
    summary = report.steps[0].summary
    assert summary.ttft is not None
    assert (summary.ttft.num_values, summary.itl, summary.tpot) == (10, None, None)
    assert report.verdict.has_passed, "no gap is too long where there is none"


async def test_a_closed_loop_keeps_its_number_of_clients(server: OddServer) -> None:
    report = await load_test(server, "plain", arrivals={"kind": "closed", "concurrency": 3},
                           window={"num_requests": 30})  # fmt: skip
    summary = report.steps[0].summary
    assert (report.steps[0].concurrency, summary.num_completed) == (3, 30)
    # a row's times are rounded to 10 µs: an answer's end may seem to come after the next one's beginning
    spans = [(row.due_s, row.due_s + row.e2e_s - 2e-5) for row in report.detail.rows]
    assert max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) == 3


async def test_a_trace_that_ends_early_ends_the_window_of_a_closed_loop(
    server: OddServer, tmp_path: Path
) -> None:
    """Six requests that take a fraction of a second are not six requests in an hour."""
    line = {"timestamp": 0, "input_length": 6, "output_length": 2}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for _ in range(6)))
    report = await load_test(server, "plain", arrivals={"kind": "closed"}, window={"duration_s": 3600.0},
                           workload={"kind": "trace", "trace": str(trace)})  # fmt: skip
    summary = report.steps[0].summary
    assert summary.num_completed == 6
    assert summary.window_s == pytest.approx(summary.elapsed_s, rel=0.1)


async def test_a_conversation_s_turns_stand_on_the_answers(server: OddServer) -> None:
    report = await load_test(server, "plain", arrivals={"rate": 30.0}, window={"num_requests": 9},
                           workload={"kind": "multi-turn", "turns": {"low": 3, "high": 3},
                                     "think_s": 0.0, "prefix_tokens": 4})  # fmt: skip
    assert report.steps[0].summary.num_completed == 9
    later = [prompt for prompt in last_prompts(server, 9) if " x " in prompt]
    assert later
    firsts = {" ".join(prompt.split()[:4]) for prompt in last_prompts(server, 9)}
    assert len(firsts) == 1, "all conversations begin with the shared prefix"


async def test_what_is_cut_off_by_the_end_is_unfinished(server: OddServer) -> None:
    report = await load_test(server, "hang", arrivals={"rate": 20.0},
                           window={"num_requests": 6, "drain_s": 0.2},
                           workload={"output": {"low": 5, "high": 5}})  # fmt: skip
    assert report.steps[0].summary.num_unfinished == 6
    assert {row.outcome for row in report.detail.rows} == {Outcome.UNFINISHED}


async def test_the_warm_up_is_sent_and_not_counted(server: OddServer) -> None:
    report = await load_test(server, "plain", arrivals={"kind": "constant", "rate": 40.0},
                           window={"duration_s": 1.0, "warm_up_s": 0.5})  # fmt: skip
    assert len(report.detail.rows) == 39
    assert report.steps[0].summary.num_requests == pytest.approx(20, abs=1)
    assert report.steps[0].summary.window_s == 0.5


async def test_a_search_finds_the_capacity_of_a_queue(server: OddServer) -> None:
    """One place, 0.05 s each: 20 a second is what it can do, and a little less what keeps 0.5 s."""
    report = await load_test(server, "queue:0.05", slo={"ttft_s": 0.5},
                           arrivals={"kind": "constant"},
                           window={"duration_s": 1.5, "drain_s": 5.0},
                           search={"precision": 0.5, "min_requests": 10})  # fmt: skip
    assert report.search is not None
    assert report.search.goodput_rps is not None
    assert report.search.failing_rps is not None
    assert 2.0 < report.search.goodput_rps < 26.0
    assert report.search.failing_rps <= report.search.goodput_rps * 1.5 * 1.001
    assert report.verdict.has_passed
    shown = report.steps[report.detail.step]
    assert shown.rate == report.search.goodput_rps
    assert any(step.is_cut_short for step in report.steps if not step.has_passed)


async def test_a_search_that_one_request_alone_fails_ends_at_once(server: OddServer) -> None:
    report = await load_test(server, "slow:0.2", slo={"ttft_s": 0.1}, search={})
    assert report.search is not None
    assert "one request alone" in report.search.reason
    assert not report.verdict.has_passed
    assert len(server.bodies) < 20


@pytest.mark.parametrize("rules", ["broken", "uncounted", "malformed"])
async def test_a_server_that_cannot_be_measured_gives_no_result(server: OddServer, rules: str) -> None:
    with pytest.raises(NoAnswer):
        await load_test(server, rules, arrivals={"rate": 1.0},
                      target={"extra_body": '{"max_tokens": 5}'})  # fmt: skip
