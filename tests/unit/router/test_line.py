"""Who waits for a turn: in order, bounded, refused at once when it would take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from core.clock import Deadline
from core.errors import DeadlineExceeded, Overloaded
from core.ids import TenantId
from router.line import Line
from router.promises import Promises
from router.tenants import Tenant
from router.tenants_config import TenantLimits
from tests.doubles import FakeClock, settle

TENANT = Tenant(TenantId("a"), TenantLimits("a"), "a")
FAR = 1000.0


class Gate:
    """A line whose requests run until they are let go."""

    def __init__(
        self,
        max_queue: int = 4,
        capacity: Callable[[], int] = lambda: 1,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.counts = (0, 0)
        self.promises = Promises(self.clock)
        self.line = Line(max_queue, 10.0, self.clock, capacity, self._observe, self.promises)
        self.started: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    def _observe(self, num_waiting: int, num_running: int) -> None:
        self.counts = (num_waiting, num_running)

    def send(self, name: str, priority: int = 5, timeout_s: float = FAR) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()
        deadline = Deadline.after(timeout_s, self.clock)
        self.line.check([10.0], priority, hash(name), deadline)
        return asyncio.create_task(self._run(name, priority, deadline))

    async def _run(self, name: str, priority: int, deadline: Deadline) -> None:
        async with self.line.place(TENANT, priority, 10.0, deadline):
            self.started.append(name)
            await self.ends[name].wait()

    async def let_go(self, name: str, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.ends[name].set()
        await settle()


async def test_equals_go_in_order_and_a_higher_one_before_all_that_wait() -> None:
    gate = Gate()
    tasks = [gate.send(name) for name in "abc"]
    await settle()
    tasks.append(gate.send("high", priority=9))
    await settle()
    for name in ("a", "high", "b", "c"):
        await gate.let_go(name)
    assert gate.started == ["a", "high", "b", "c"]
    await asyncio.gather(*tasks)
    assert gate.counts == (0, 0)


async def test_a_full_line_refuses_equals_and_its_last_lower_one_gives_way() -> None:
    gate = Gate(max_queue=2)
    tasks = [gate.send(name, priority=3) for name in ("runs", "waits", "last")]
    await settle()
    with pytest.raises(Overloaded) as refused:
        gate.send("equal", priority=3)
    assert refused.value.details["reason"] == "queue_full"
    tasks.append(gate.send("higher", priority=4))
    await settle()
    with pytest.raises(Overloaded) as gave_way:
        await tasks[2]
    assert gave_way.value.details["reason"] == "shed"
    assert isinstance(gave_way.value.details["retry_after_s"], int)
    for name in ("runs", "higher", "waits"):
        await gate.let_go(name)
    await asyncio.gather(tasks[0], tasks[1], tasks[3])


async def test_what_cannot_begin_before_its_deadline_is_refused_at_once() -> None:
    gate = Gate(max_queue=100)
    measured = gate.send("measured")
    await settle()
    await gate.let_go("measured", after_s=10.0)
    await measured
    tasks = [gate.send(name) for name in "abcd"]
    await settle()
    assert gate.line.predicted_wait_s(5) == pytest.approx(40.0)
    with pytest.raises(Overloaded) as refused:
        gate.send("hurried", timeout_s=30.0)
    assert refused.value.details["reason"] == "deadline"
    tasks.append(gate.send("important", priority=9, timeout_s=30.0))
    await settle()
    for name in ("a", "important", "b", "c", "d"):
        await gate.let_go(name)
    await asyncio.gather(*tasks)


async def test_the_refused_are_told_to_come_one_after_the_other_as_places_become_free() -> None:
    gate = Gate(max_queue=1)
    measured = gate.send("measured")
    await settle()
    await gate.let_go("measured", after_s=4.0)
    await measured
    tasks = [gate.send(name) for name in "ab"]
    await settle()
    after = []
    for number in range(5):
        with pytest.raises(Overloaded) as refused:
            gate.send(f"more {number}")
        after.append(refused.value.details["retry_after_s"])
    assert after == [4, 8, 12, 16, 20]
    for name in "ab":
        await gate.let_go(name)
    await asyncio.gather(*tasks)


async def test_whoever_goes_away_leaves_its_place_to_others() -> None:
    gate = Gate()
    tasks = [gate.send(name) for name in "abc"]
    await settle()
    tasks[0].cancel()
    tasks[1].cancel()
    await settle()
    assert gate.started == ["a", "c"]
    await gate.let_go("c")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.counts == (0, 0)


async def test_a_deadline_that_passes_while_waiting_is_told_as_such() -> None:
    gate = Gate()
    first = gate.send("a")
    second = gate.send("b", timeout_s=0.01)
    with pytest.raises(DeadlineExceeded):
        await second
    await gate.let_go("a")
    await first
    assert gate.counts == (0, 0)


async def test_who_was_refused_by_one_router_is_let_in_by_another_and_the_kept_place_is_free_again() -> None:
    first = Gate(max_queue=1)
    second = Gate(max_queue=1, clock=first.clock)
    tasks = [gate.send(name) for gate in (first, second) for name in "ab"]
    await settle()
    with pytest.raises(Overloaded):
        first.send("again")
    await first.let_go("a")
    first.clock.advance(1.0)
    with pytest.raises(Overloaded):
        second.send("again")  # nobody has told it yet
    with pytest.raises(Overloaded):
        first.send("new")  # the place is kept
    second.promises.hear(first.promises.told(), ())
    tasks.append(second.send("again"))
    with pytest.raises(Overloaded):
        second.send("again")  # once only
    first.promises.hear((), second.promises.take_claims())
    tasks.append(first.send("new"))
    await settle()
    for name in ("b", "new"):
        await first.let_go(name)
    for name in ("a", "b", "again"):
        await second.let_go(name)
    await asyncio.gather(*tasks)


async def test_who_would_be_served_too_late_is_refused_at_once_or_when_its_turn_comes_too_late() -> None:
    gate = Gate(max_queue=100)
    measured = gate.send("measured")
    await settle()
    await gate.let_go("measured", after_s=10.0)
    await measured
    tasks = [gate.send("a")]
    await settle()
    with pytest.raises(Overloaded) as refused:
        gate.send("no time to be served", timeout_s=15.0)  # ten to wait and ten to run
    assert refused.value.details["reason"] == "deadline"
    assert "about 20.0 s" in refused.value.message
    late = gate.send("late", timeout_s=25.0)
    await settle()
    await gate.let_go("a", after_s=20.0)
    with pytest.raises(Overloaded) as gave_up:
        await late
    assert gave_up.value.details["reason"] == "deadline"
    assert "late" not in gate.started
    await asyncio.gather(*tasks)
    assert gate.counts == (0, 0)


async def _measured(gate: Gate, seconds: float) -> None:
    task = gate.send("measured", timeout_s=FAR)
    await settle()
    await gate.let_go("measured", after_s=seconds)
    await task


async def test_who_finds_a_place_free_runs_however_long_the_ones_before_took() -> None:
    gate = Gate()
    await _measured(gate, 90.0)  # a worker had to be started for it
    task = gate.send("next", timeout_s=30.0)
    await settle()
    assert gate.started == ["measured", "next"]
    await gate.let_go("next", after_s=1.0)
    await task


async def test_an_answer_that_was_cut_short_is_not_taken_for_a_quick_one() -> None:
    gate = Gate()
    await _measured(gate, 10.0)
    for number in range(60):
        task = gate.send(f"gone {number}")
        await settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    first = gate.send("a")
    late = gate.send("late", timeout_s=15.0)
    await settle()
    await gate.let_go("a", after_s=8.0)
    assert late.done(), "seven seconds are left, and ten are needed"
    with pytest.raises(Overloaded):
        await late
    await first


async def test_who_waits_and_cannot_be_answered_in_time_hears_of_it_while_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.line._LOOK_AGAIN_S", 0.0)
    gate = Gate()
    await _measured(gate, 10.0)
    first = gate.send("a")
    late = gate.send("late", timeout_s=25.0)
    await settle()
    gate.clock.advance(16.0)
    with pytest.raises(Overloaded) as refused:
        await late
    assert refused.value.details["reason"] == "deadline"
    assert "a" in gate.started
    await gate.let_go("a")
    await first
    assert gate.counts == (0, 0)


async def test_a_small_request_is_not_thought_quicker_than_those_like_it_were() -> None:
    gate = Gate()
    for number in range(40):
        cost = 1000.0 if number % 2 else 100.0  # both take as long: it is the answer that takes its time
        async with gate.line.place(TENANT, 5, cost, Deadline.after(FAR, gate.clock)):
            gate.clock.advance(10.0)
    running = gate.send("a")
    await settle()
    with pytest.raises(Overloaded):
        gate.send("late", timeout_s=18.0)  # ten to wait and ten to run
    await gate.let_go("a")
    await running


async def test_nobody_gives_way_for_a_call_that_is_not_let_in_all_the_same() -> None:
    gate = Gate(max_queue=2)
    tasks = [gate.send("runs"), gate.send("equal"), gate.send("low", priority=3)]
    await settle()
    with pytest.raises(Overloaded) as refused:
        gate.line.check([10.0, 10.0], 5, 77, Deadline.after(FAR, gate.clock))
    assert refused.value.details["reason"] == "queue_full"
    for name in ("runs", "equal", "low"):
        await gate.let_go(name)
    await asyncio.gather(*tasks)
    assert gate.started == ["runs", "equal", "low"]


async def test_a_flood_that_never_comes_back_does_not_send_others_away_for_ever() -> None:
    gate = Gate(max_queue=2)
    await _measured(gate, 1.0)
    tasks = [gate.send(name) for name in "abc"]
    await settle()
    for number in range(3000):
        gate.clock.advance(0.01)
        with pytest.raises(Overloaded) as refused:
            gate.send(f"flood {number}")
    after_s = refused.value.details["retry_after_s"]
    assert isinstance(after_s, int)
    assert after_s <= 41  # twenty rounds of a line of two, a second each
    for name in "abc":
        await gate.let_go(name)
    await asyncio.gather(*tasks)


async def test_a_call_of_many_prompts_waits_for_its_last_one() -> None:
    gate = Gate(max_queue=100, capacity=lambda: 2)
    await _measured(gate, 10.0)
    running = gate.send("a")
    await settle()
    for num, timeout_s, is_refused in ((1, 12.0, False), (5, 29.0, True), (5, 31.0, False)):
        deadline = Deadline.after(timeout_s, gate.clock)  # four wait, five seconds each, and ten to run
        with pytest.raises(Overloaded) if is_refused else nullcontext():
            gate.line.check([10.0] * num, 5, 1, deadline)
    await gate.let_go("a")
    await running


async def test_a_large_request_is_thought_to_take_what_large_ones_took() -> None:
    gate = Gate()
    for number in range(60):
        cost, seconds = (1000.0, 15.0) if number % 2 else (100.0, 5.0)
        async with gate.line.place(TENANT, 5, cost, Deadline.after(FAR, gate.clock)):
            gate.clock.advance(seconds)
    running = gate.send("a")
    await settle()
    gate.line.check([1000.0], 5, 1, Deadline.after(27.0, gate.clock))  # ten to wait and fifteen to run
    with pytest.raises(Overloaded):
        gate.line.check([1000.0], 5, 1, Deadline.after(22.0, gate.clock))
    gate.line.check([100.0], 5, 1, Deadline.after(22.0, gate.clock))
    await gate.let_go("a")
    await running


async def test_one_slow_call_at_the_start_is_soon_forgotten() -> None:
    gate = Gate()
    for seconds in (90.0, *[2.0] * 9):
        async with gate.line.place(TENANT, 5, 10.0, Deadline.after(FAR, gate.clock)):
            gate.clock.advance(seconds)
    running = gate.send("a")
    await settle()
    assert gate.line.predicted_wait_s(5) < 12.0
    gate.line.check([10.0], 5, 1, Deadline.after(40.0, gate.clock))
    await gate.let_go("a")
    await running


async def test_a_call_of_more_prompts_than_have_room_is_let_in_once_nobody_else_is_there() -> None:
    gate = Gate(max_queue=2)
    task = gate.send("runs")
    await settle()
    with pytest.raises(Overloaded):
        gate.line.check([10.0] * 8, 5, hash("many"), Deadline.after(FAR, gate.clock))
    await gate.let_go("runs")
    await task
    gate.line.check([10.0] * 8, 5, hash("many"), Deadline.after(FAR, gate.clock))
