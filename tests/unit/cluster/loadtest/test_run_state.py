"""A run that cannot keep its SLO any more is ended, and not sooner; what it is at is told in one line."""

from __future__ import annotations

import io
from typing import cast

from rich.console import Console

from cluster.loadtest.client import Call
from cluster.loadtest.goodput import Slo
from cluster.loadtest.progress import PLAIN_PERIOD_S, ConsoleWatcher
from cluster.loadtest.record import Outcome, RequestRecord
from cluster.loadtest.run_state import HopelessRule, RunState
from cluster.loadtest.settings import Window
from tests.unit.cluster.loadtest.records import record
from tests.unit.cluster.loadtest.reports import make_report

SLO = Slo(ttft_s=1.0)


class Due:
    """A call that is due and has no answer yet."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.index = 0
        self.record: RequestRecord | None = None
        self.has_first_token = False


def state_with(*due_s: float) -> tuple[RunState, list[Due]]:
    state, calls = RunState(), [Due(due) for due in due_s]
    for call in calls:
        state.add(cast(Call, call))
    return state, calls


def end(state: RunState, call: Due, *event_times_s: float, outcome: Outcome = Outcome.COMPLETED) -> None:
    call.record = record(call.due_s, *event_times_s, index=call.index, outcome=outcome)
    state.end(call.record)


def test_ten_of_a_hundred_may_miss_it() -> None:
    state, calls = state_with(*(float(i) for i in range(12)))
    rule = HopelessRule(SLO, num_planned=100, warm_up_s=0.0)
    for call in calls[:11]:
        end(state, call, call.due_s + 3.0)
        assert not rule.is_hopeless(state)
    end(state, calls[11], 14.0)
    assert rule.is_hopeless(state)


def test_waiting_longer_than_promised_counts_before_the_answer() -> None:
    state, calls = state_with(*([0.0] * 5))
    rule = HopelessRule(SLO, num_planned=20, warm_up_s=0.0)
    state.elapsed_s = 0.9
    assert not rule.is_hopeless(state)
    state.elapsed_s = 1.1
    calls[0].has_first_token = True
    assert rule.is_hopeless(state), "four wait too long, two are allowed, one more for luck"


def test_the_warm_up_does_not_count() -> None:
    state, calls = state_with(*([0.5] * 50))
    rule = HopelessRule(SLO, num_planned=20, warm_up_s=1.0)
    for call in calls:
        end(state, call, outcome=Outcome.ERROR)
    state.elapsed_s = 9.0
    assert not rule.is_hopeless(state)


def test_counts_follow_the_calls() -> None:
    state, calls = state_with(0.0, 0.0, 0.0)
    end(state, calls[1], 0.25, 0.5)
    end(state, calls[0], outcome=Outcome.REFUSED)
    assert [call.index for call in calls] == [0, 1, 2]
    assert list(state.running) == [2]
    assert (state.outcomes[Outcome.COMPLETED], state.outcomes[Outcome.REFUSED]) == (1, 1)
    assert (state.num_output_tokens, list(state.recent_ttft_s)) == (2, [0.25])


def watched(is_terminal: bool) -> str:
    out = io.StringIO()
    with ConsoleWatcher(Console(file=out, force_terminal=is_terminal, width=150)) as watcher:
        watcher.tell("[brackets] are text")
        watcher.begin("2 requests/s", Window(duration_s=30.0))
        state, calls = state_with(0.0, 0.0, 0.0)
        end(state, calls[0], 0.25)
        end(state, calls[1], outcome=Outcome.REFUSED)
        for state.elapsed_s in (1.0, PLAIN_PERIOD_S, PLAIN_PERIOD_S + 0.5):
            watcher.watch(state)
        watcher.end(make_report(2.0).steps[0])
    return out.getvalue()


def test_outside_a_terminal_a_plain_line_comes_every_few_seconds() -> None:
    first, line, last = watched(is_terminal=False).splitlines()
    assert first == "[brackets] are text"
    assert "2 requests/s · 3 sent · 1 open · 1 done · 1 refused · TTFT p50 250 ms · 0 tok/s" in line
    assert last.startswith("✓ 2 requests/s: ")
    assert "\x1b" not in first + line + last


def test_on_a_terminal_the_line_is_live() -> None:
    text = watched(is_terminal=True)
    assert "━━" in text
    assert "3 sent" in text
    assert "\x1b" in text
