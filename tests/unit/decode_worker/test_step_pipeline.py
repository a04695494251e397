"""Running ahead changes when things happen, and nothing of what happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Cancelled, StepFailed
from core.request import FinishReason, Request, SamplingParams
from engine.step import StepPlan
from engine.stream_step import UNKNOWN_TOKEN
from tests.unit.decode_worker.decode_cases import make_request
from tests.unit.decode_worker.pipeline_room import Heard, Room, expected_of


def begun(room: Room, *requests: Request, num_tokens: int = 2) -> list[Heard]:
    """Streams that have some tokens, and run ahead."""
    heard = [room.open(request) for request in requests]
    room.run(until=lambda: all(len(item.tokens[0]) >= num_tokens for item in heard))
    return heard


def make_stopped(room: Room, num_tokens: int, num_prompt: int = 6, first: int = 0) -> Request:
    """A request whose answer ends by a stop id, as its `num_tokens`-th token."""
    for attempt in range(200):
        request = make_request(num_prompt, f"stop {attempt}", first=first + 1000 * attempt, max_tokens=60)
        tokens = expected_of(request)
        if tokens[num_tokens - 1] not in tokens[: num_tokens - 1]:
            sampling = replace(request.sampling, stop_token_ids=(tokens[num_tokens - 1],))
            return replace(request, sampling=sampling)
    raise AssertionError("no such prompt")


# ------------------------------------------------------------ time


@pytest.mark.parametrize(("step_s", "host_s"), [(10.0, 3.0), (3.0, 10.0), (5.0, 5.0)])
def test_a_step_takes_the_longer_of_device_and_host_and_not_their_sum(step_s: float, host_s: float) -> None:
    intervals = {}
    for is_overlapped in (False, True):
        room = Room(is_overlapped=is_overlapped)
        room.device.step_s = step_s
        begun(room, make_request(6, max_tokens=60))
        for index in range(22):
            if index == 2:
                begin, num_steps = room.clock.now(), len(room.device.plans)
            room.step()
            room.clock.advance(host_s)  # handing over, planning, commands
        assert len(room.device.plans) == num_steps + 20
        intervals[is_overlapped] = (room.clock.now() - begin) / 20
    assert intervals[False] == pytest.approx(step_s + host_s)
    assert intervals[True] == pytest.approx(max(step_s, host_s))


def test_while_the_host_is_faster_the_device_is_never_idle() -> None:
    room = Room()
    begun(room, make_request(6, max_tokens=60))
    before = room.device.idle_s
    for _ in range(20):
        room.step()
        room.clock.advance(0.9)
    assert room.device.idle_s == before


def test_seconds_of_a_step_are_those_of_the_device_and_not_of_waiting_behind_another() -> None:
    room = Room()
    begun(room, make_request(6, max_tokens=60))
    for _ in range(30):
        room.step()
        room.clock.advance(0.5)
    cost = room.pipeline.costs.alone
    assert cost.decode_s + cost.stream_s == pytest.approx(room.device.step_s, rel=0.05)


# ------------------------------------------------------------ ends


def test_a_stop_found_late_costs_one_row_that_nobody_sees() -> None:
    room = Room()
    stopped = room.open(make_stopped(room, 9))
    other = room.open(make_request(5, "other", first=500, max_tokens=30))
    room.run()
    room.check_answers()
    assert stopped.reasons == {0: FinishReason.STOP}
    assert len(stopped.tokens[0]) == 9
    # the first token comes from the prompt; the row after the last is the one too many
    assert room.num_rows(stopped) == 8 + 1
    assert room.num_rows(other) == 29


def test_an_end_by_length_is_foreseen_and_costs_nothing() -> None:
    room = Room()
    heard = [room.open(make_request(5, str(n), first=100 * n, max_tokens=n)) for n in (2, 5, 9)]
    room.run()
    room.check_answers()
    assert [room.num_rows(item) for item in heard] == [1, 4, 8]


def test_the_blocks_of_a_stopped_stream_are_its_own_until_its_last_step_has_ended() -> None:
    room = Room()
    request = make_stopped(room, 6)
    (stopped,) = begun(room, request, num_tokens=1)
    room.run(until=lambda: stopped.is_ended)
    assert room.scheduler.num_running == 0
    assert room.cache.allocator.num_held > 0, "a step still writes to them"
    assert room.scheduler.has_work
    assert room.step()
    assert room.cache.allocator.num_held == 0
    assert not room.step()
    assert not room.scheduler.has_work


def test_kv_of_a_token_too_many_gets_no_name() -> None:
    """Blocks of 4: the stop id fills one with the token that a step too many computes."""
    room = Room()
    request = make_stopped(room, 6, num_prompt=6)  # 12 tokens, of which 11 are computed
    room.open(request)
    room.run()
    assert any(plan.streams.num_tokens.max(initial=0) == 12 for plan in room.device.plans)
    assert len(list(room.cache.allocator.prefix_cache.items())) == 2


def test_a_slot_that_changes_hands_while_its_last_row_runs_gives_each_its_own_tokens() -> None:
    room = Room(max_num_seqs=1)
    first, second = room.open(make_stopped(room, 7)), room.open(make_request(4, first=700, max_tokens=20))
    room.run()
    room.check_answers()
    assert first.is_ended
    assert second.is_ended


def test_what_is_cancelled_while_it_runs_says_no_more_and_gives_its_blocks_back_a_step_later() -> None:
    room = Room()
    running, cancelled = begun(
        room, make_request(6, "a", max_tokens=30), make_request(6, "b", first=300, max_tokens=30)
    )
    num_tokens, num_held = len(cancelled.tokens[0]), room.cache.allocator.num_held
    room.cancel(cancelled)
    assert isinstance(cancelled.error, Cancelled)
    assert room.cache.allocator.num_held == num_held
    room.step()
    assert room.cache.allocator.num_held < num_held
    assert len(cancelled.tokens[0]) == num_tokens
    room.run()
    assert running.tokens[0] == expected_of(running.request)


def test_settling_leaves_nothing_running() -> None:
    room = Room()
    (heard,) = begun(room, make_request(6, max_tokens=30))
    num_tokens = len(heard.tokens[0])
    room.pipeline.settle()
    room.collect()
    assert len(heard.tokens[0]) == num_tokens + 1
    room.cancel(heard)
    assert room.cache.allocator.num_held == 0


# ------------------------------------------------------------ what may be ahead


def ahead(plan: StepPlan) -> int:
    return int((plan.streams.token_ids == UNKNOWN_TOKEN).sum())


def test_streams_run_ahead_beside_the_chunks_of_a_prompt() -> None:
    room = Room()
    begun(room, make_request(6, max_tokens=40))
    late = room.open(make_request(40, "late", first=300, max_tokens=10))
    room.run(until=lambda: len(late.tokens[0]) > 0)
    beside = [plan for plan in room.device.plans if len(plan.streams) and plan.chunks]
    assert len(beside) > 4
    assert all(ahead(plan) for plan in beside)
    room.run()
    room.check_answers()


def test_a_resumed_stream_whose_last_token_is_read_ahead_becomes_a_stream_after_it() -> None:
    room = Room()
    begun(room, make_request(6, max_tokens=40))
    room.open(make_request(12, "resumed", first=300, max_tokens=10), num_emitted=1)  # read as 6, 6 and 1
    room.run()
    room.check_answers()


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}]
)
def test_steps_with_penalties_wait_for_the_tokens_they_count(penalty: dict[str, float]) -> None:
    room = Room()
    room.open(make_request(6, max_tokens=10, **penalty))
    room.open(make_request(6, "plain", first=300, max_tokens=30))
    room.run()
    room.check_answers()
    is_penalized = [plan.streams.traits["sampling"]["needs_history"].any() for plan in room.device.plans]
    assert any(is_penalized)
    for before, plan in zip(is_penalized, room.device.plans[1:], strict=False):
        assert not (before and ahead(plan))
    assert ahead(room.device.plans[-1]), "without them, steps run ahead again"


def test_a_bias_and_a_minimum_length_do_not_keep_a_stream_from_running_ahead() -> None:
    room = Room()
    room.open(make_request(6, max_tokens=20, min_tokens=20, logit_bias=((3, 0.5),)))
    positions: list[int] = []

    def look(plan: StepPlan) -> bool:
        if ahead(plan):
            columns = plan.streams.sampling(frozenset())
            assert columns.adjusted[0].position == columns.positions[0]
            positions.append(int(columns.positions[0]))
        return False

    room.device.is_failing = look
    room.run()
    assert positions == list(range(2, 20))


def test_nobody_is_preempted_while_a_step_runs() -> None:
    room = Room(num_blocks=7)
    for index in range(3):
        room.open(make_request(5, str(index), first=100 * index, max_tokens=18))
    num_preemptions = room.scheduler.num_preemptions
    while room.step():
        if room.scheduler.num_preemptions > num_preemptions:
            assert not ahead(room.device.plans[-1])
            num_preemptions = room.scheduler.num_preemptions
    assert num_preemptions > 0
    room.check_answers()


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_a_step_that_fails_for_all_is_run_apart_and_the_one_behind_it_is_forgotten(num_failures: int) -> None:
    room = Room()
    heard = begun(room, *(make_request(6, str(i), first=100 * i, max_tokens=20) for i in range(3)))
    left = iter([True] * num_failures)
    room.device.is_failing = lambda plan: len(plan) > 1 and next(left, False)
    room.run()
    assert next(left, None) is None
    assert [item.error for item in heard] == [None] * 3
    room.check_answers()


def test_a_request_that_fails_alone_is_lost_alone() -> None:
    room = Room()
    good, bad = begun(
        room, make_request(6, "a", max_tokens=20), make_request(6, "b", first=99, max_tokens=20)
    )

    def is_failing(plan: StepPlan) -> bool:
        rows = zip(plan.streams.sequences, plan.streams.positions.tolist(), strict=True)
        return any(sequence.request is bad.request and position == 8 for sequence, position in rows)

    room.device.is_failing = is_failing
    room.run()
    assert isinstance(bad.error, StepFailed)
    assert bad.tokens[0] == expected_of(bad.request)[:8]
    assert good.tokens[0] == expected_of(good.request)
    assert room.cache.allocator.num_held == 0


def test_a_start_that_fails_counts_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    heard = begun(room, *(make_request(6, str(i), first=100 * i, max_tokens=20) for i in range(2)))
    start, left = room.device.start, iter([False, True])

    def fail_once(plan: StepPlan) -> object:
        if next(left, False):
            raise RuntimeError("no memory")
        return start(plan)

    monkeypatch.setattr(room.device, "start", fail_once)
    room.run()
    assert [item.error for item in heard] == [None, None]
    room.check_answers()


# ------------------------------------------------------------ anything


REQUESTS = st.builds(
    lambda num_prompt, prefix, num_samples, fields: replace(
        make_request(num_prompt, first=prefix * 100, num_samples=num_samples),
        sampling=SamplingParams(seed=5, ignore_eos=True, **fields),
    ),
    st.integers(1, 20),
    st.integers(0, 2),
    st.sampled_from([1, 1, 1, 3]),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(0, 14),
            "stop_token_ids": st.sampled_from([(), (4,), (4, 5, 6)]),
            "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        }
    ),
)
ACTS = st.one_of(
    st.tuples(st.just("open"), st.tuples(REQUESTS, st.sampled_from([0, 0, 1, 3]))),
    st.tuples(st.just("steps"), st.integers(1, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 10)),
    st.tuples(st.just("fail"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(acts=st.lists(ACTS, max_size=14), num_blocks=st.integers(9, 24), is_overlapped=st.booleans())
def test_each_stream_has_its_answer_whatever_happens_beside_it(
    acts: list[tuple],  # type: ignore[type-arg]
    num_blocks: int,
    is_overlapped: bool,
) -> None:
    room = Room(num_blocks, is_overlapped=is_overlapped, max_num_seqs=4)
    for act, value in acts:
        if act == "open":
            room.open(*value)
        elif act == "steps":
            for _ in range(value):
                room.step()
        elif act == "fail":
            left = iter([True])
            room.device.is_failing = lambda plan, left=left: len(plan) > 1 and next(left, False)
        elif room.heard:
            room.cancel(list(room.heard.values())[value % len(room.heard)])
    room.run()
    room.check_answers()
    assert all(heard.is_ended for heard in room.heard.values())
    assert room.cache.allocator.num_held == 0
