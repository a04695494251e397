"""A plan has the wanted rate, lengths and sharing, and is the same for the same seed."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from cluster.loadtest.plan import Part, Planner, Session, Turn, fitting
from cluster.loadtest.settings import (
    ArrivalKind,
    Arrivals,
    LoadTestSettings,
    Range,
    Workload,
    WorkloadKind,
)
from cluster.loadtest.traces import TraceRecord
from core.errors import InvalidConfig

RECORDS = [
    TraceRecord(0.0, 1000, 40, (1, 2)),
    TraceRecord(1.0, 1100, 20, (1, 2, 3)),
    TraceRecord(4.0, 512, 10, (9,)),
]


def planner(kind: WorkloadKind, arrivals: Arrivals | None = None, **workload: Any) -> Planner:
    is_trace = kind is WorkloadKind.TRACE
    given = {"trace": "t.jsonl"} if is_trace else {}
    settings = LoadTestSettings(
        arrivals=arrivals or Arrivals(rate=2.0), workload=Workload(kind, **{**given, **workload})
    )
    return Planner(settings, RECORDS if is_trace else ())


def keys(session: Session) -> list[str]:
    return [part.key for turn in session.turns for part in turn.parts]


def test_random_prompts_share_nothing_and_have_lengths_of_the_range() -> None:
    plan = planner(WorkloadKind.RANDOM, prompt=Range(10, 20), output=Range(3, 5))
    found = list(plan.sessions(2.0, 500.0))
    assert len(found) == pytest.approx(1000, abs=5 * 1000**0.5)
    assert all(0.0 < session.start_s < 500.0 for session in found)
    assert len({key for session in found for key in keys(session)}) == len(found)
    assert {session.turns[0].num_new_tokens for session in found} == set(range(10, 21))
    assert {session.turns[0].num_output_tokens for session in found} == {3, 4, 5}


def test_the_same_seed_is_the_same_plan_and_a_round_has_its_own_prompts() -> None:
    plan = planner(WorkloadKind.RANDOM)
    first, again, other = (list(plan.sessions(2.0, 50.0, name)) for name in ("a", "a", "b"))
    assert first == again
    assert not set(keys(first[0])) & {key for session in other for key in keys(session)}


def test_shared_prefixes_are_shared_also_between_rounds() -> None:
    plan = planner(WorkloadKind.SHARED_PREFIX, prefix_tokens=100, num_prefixes=3)
    both = [session for name in ("a", "b") for session in islice(plan.sessions(2.0, None, name), 100)]
    assert {session.turns[0].parts[0] for session in both} == {Part(f"prefix {i}", 100) for i in range(3)}
    assert len({session.turns[0].parts[1].key for session in both}) == 200


def test_a_conversation_has_its_turns_and_requests_keep_the_rate() -> None:
    plan = planner(WorkloadKind.MULTI_TURN, turns=Range(2, 6), think_s=3.0, prefix_tokens=0)
    found = list(plan.sessions(2.0, 500.0))
    assert {len(session.turns) for session in found} == {2, 3, 4, 5, 6}
    assert sum(len(session.turns) for session in found) == pytest.approx(1000, rel=0.2)
    assert [turn.think_s for turn in found[0].turns[:2]] == [0.0, 3.0]


def test_a_trace_keeps_its_times_lengths_and_shared_blocks() -> None:
    plan = planner(WorkloadKind.TRACE, Arrivals(ArrivalKind.TRACE))
    first, second, third = plan.sessions(None, None)
    assert [session.start_s for session in (first, second, third)] == [0.0, 1.0, 4.0]
    assert first.turns == (Turn((Part(" block 1", 512), Part(" block 2", 488)), 40),)
    assert second.turns[0].parts[:2] == (Part(" block 1", 512), Part(" block 2", 512))
    assert plan.trace_rate == 0.5


@pytest.mark.parametrize(("rate", "speed"), [(None, 2.0), (1.0, 5.0)])
def test_a_trace_is_replayed_faster_by_speed_or_to_a_rate(rate: float | None, speed: float) -> None:
    plan = planner(WorkloadKind.TRACE, Arrivals(ArrivalKind.TRACE, speed=speed))
    assert [session.start_s for session in plan.sessions(rate, None)] == [0.0, 0.5, 2.0]


def test_scaled_lengths_scale_their_blocks() -> None:
    plan = planner(WorkloadKind.TRACE, Arrivals(ArrivalKind.TRACE), length_scale=0.1)
    second = list(plan.sessions(None, None))[1].turns[0]
    assert (second.num_new_tokens, second.num_output_tokens) == (110, 2)
    assert [part.num_tokens for part in second.parts] == [51, 51, 8]


def test_requests_that_do_not_fit_are_left_out() -> None:
    workload = Workload(WorkloadKind.TRACE, trace="t.jsonl", max_context=1040)  # type: ignore[arg-type]
    assert fitting(RECORDS, workload) == [RECORDS[0], RECORDS[2]]


def test_a_trace_can_have_other_arrivals() -> None:
    plan = planner(WorkloadKind.TRACE, Arrivals(ArrivalKind.CONSTANT, rate=4.0))
    assert [session.start_s for session in plan.sessions(4.0, None)] == [0.25, 0.5, 0.75]
    with pytest.raises(InvalidConfig, match="more than one moment"):
        _ = Planner(plan.settings, RECORDS[:1]).trace_rate
