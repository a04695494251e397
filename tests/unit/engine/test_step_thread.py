"""The step thread: commands run between steps, on one thread, and no failure takes it down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from engine.step_thread import StepThread


class Work:
    """Steps left to run, and which thread ran them."""

    def __init__(self) -> None:
        self.left = 0
        self.steps = 0
        self.threads: set[int] = set()
        self.is_broken = False
        self.done = threading.Event()

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        if self.is_broken:
            self.is_broken = False
            raise RuntimeError("broken step")
        if self.left == 0:
            return False
        self.left -= 1
        self.steps += 1
        if self.left == 0:
            self.done.set()
        return self.left > 0

    def add(self, count: int) -> None:
        self.threads.add(threading.get_ident())
        self.left += count


@pytest.fixture
def running() -> Iterator[tuple[Work, StepThread]]:
    work = Work()
    thread = StepThread("test-step", work.step, on_tick=lambda: None, idle_tick_s=0.01)
    thread.start()
    yield work, thread
    thread.stop()
    assert not thread.is_alive


def test_commands_and_steps_share_one_thread(running: tuple[Work, StepThread]) -> None:
    work, thread = running
    thread.submit(lambda: work.add(100)).result(5)
    assert work.done.wait(5)
    assert work.steps == 100
    assert work.threads == {next(iter(work.threads))}
    assert threading.get_ident() not in work.threads


def test_a_command_s_exception_reaches_its_waiter_only(running: tuple[Work, StepThread]) -> None:
    _work, thread = running

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        thread.submit(fail).result(5)
    thread.post(fail)
    assert thread.submit(lambda: 7).result(5) == 7


def test_a_broken_step_does_not_stop_the_loop(running: tuple[Work, StepThread]) -> None:
    work, thread = running
    work.is_broken = True
    thread.submit(lambda: work.add(3)).result(5)
    assert work.done.wait(5)
    assert work.steps == 3


def test_commands_that_never_cease_do_not_keep_steps_from_running(running: tuple[Work, StepThread]) -> None:
    work, thread = running
    posts = 0

    def post_again() -> None:
        nonlocal posts
        posts += 1
        if not work.done.is_set():
            thread.post(post_again)

    thread.post(post_again)
    thread.submit(lambda: work.add(50)).result(5)
    assert work.done.wait(5)
    assert posts >= 50


def test_coroutines_can_await_a_command(running: tuple[Work, StepThread]) -> None:
    _, thread = running
    assert asyncio.run(thread.call(threading.get_ident)) != threading.get_ident()


def test_a_cancelled_command_never_runs(running: tuple[Work, StepThread]) -> None:
    work, thread = running
    gate = threading.Event()

    def hold() -> None:
        assert gate.wait(5)

    thread.post(hold)
    future = thread.submit(lambda: work.add(1))
    assert future.cancel()
    gate.set()
    thread.submit(lambda: None).result(5)
    assert work.left == 0
    assert work.steps == 0


def test_ticks_go_on_while_idle() -> None:
    ticks = threading.Semaphore(0)
    thread = StepThread("test-tick", lambda: False, on_tick=ticks.release, idle_tick_s=0.005)
    thread.start()
    assert all(ticks.acquire(timeout=5) for _ in range(3))
    thread.stop()


def test_commands_run_while_the_next_step_waits_for_others() -> None:
    work, asked = Work(), threading.Event()

    def pause_s() -> float:
        asked.set()
        return 3600.0

    thread = StepThread("test-pause", work.step, on_tick=lambda: None, idle_tick_s=0.01, pause_s=pause_s)
    thread.start()
    thread.submit(lambda: work.add(2)).result(5)
    assert asked.wait(5), "there is a step to be run, and it may have to wait"
    assert thread.submit(lambda: work.steps).result(5) == 1
    assert thread.submit(lambda: work.steps).result(5) == 1
    thread.stop()
    assert not thread.is_alive


def test_the_wait_for_its_end_is_in_slices_so_that_a_stopped_process_loses_one_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, waits = threading.Event(), list[float]()
    thread = StepThread("test-stop", lambda: False, on_tick=lambda: None, idle_tick_s=0.01)
    thread.start()

    def hold() -> None:
        assert gate.wait(30)

    thread.post(hold)
    join = thread._thread.join
    monkeypatch.setattr(thread._thread, "join", waits.append)
    thread.stop(1.25)
    assert waits == [0.5, 0.5, 0.25]
    assert thread.is_alive, "it has not ended, and says so"
    gate.set()
    join()
