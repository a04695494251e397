"""Runner: sends a plan's sessions when they are due and gathers what becomes of them.

Owns the timing. Open loop: a request is sent at its moment whatever has become of those before it, and all
latencies count from that moment, also if the sender was late: nothing is left out because the server was slow
(no coordinated omission). Closed loop: each of a fixed number of clients sends when its last answer has
ended. Runs on the load test's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass

from cluster.loadtest.client import Call, Client
from cluster.loadtest.plan import Session, Turn
from cluster.loadtest.prompts import Composer, Conversation
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.run_state import HopelessRule, RunState
from cluster.loadtest.settings import Window

TICK_S = 0.25
# a client of a closed loop whose request was not answered does not ask again at once: it would only count
# how fast a server can refuse
_AFTER_FAILURE_S = 0.1


@dataclass(frozen=True, slots=True)
class RunResult:
    """`window_s`: for how long requests were due, the warm-up included. `is_cut_short`: it was stopped, since
    its outcome was certain.
    """

    records: tuple[RequestRecord, ...]
    window_s: float
    is_cut_short: bool


class RunClock:
    """Seconds since `start` was called last; what a client's moments are counted in."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def start(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start


class Runner:
    """Runs one plan, once. `watch` is called several times a second."""

    def __init__(
        self,
        client: Client,
        clock: RunClock,
        composer: Composer,
        window: Window,
        watch: Callable[[RunState], None],
    ) -> None:
        self._client = client
        self._clock = clock
        self._composer = composer
        self._window = window
        self._watch = watch
        self._state = RunState()
        self._is_cut_short = False

    async def open_loop(self, sessions: Iterable[Session], rule: HopelessRule | None = None) -> RunResult:
        """Each session at its start. `rule` may end it early."""
        records = await self._run(self._dispatch(sessions), rule)
        if self._is_cut_short:
            return RunResult(records, self._state.elapsed_s, True)
        if self._window.num_requests is None:
            return RunResult(records, self._window.duration_s, False)
        # the last one is due at the window's end but for the gap that would follow it
        span = max((record.due_s for record in records), default=0.0)
        return RunResult(records, span * len(records) / max(len(records) - 1, 1), False)

    async def closed_loop(self, sessions: Iterator[Session], concurrency: int) -> RunResult:
        """`concurrency` clients share the sessions."""
        records = await self._run(self._clients(sessions, concurrency), None)
        ended_s = max((record.ended_s for record in records), default=0.0)
        if self._window.num_requests is not None:
            return RunResult(records, ended_s, False)
        # sessions that ran out, as those of a trace do, end the window with their last answer
        is_exhausted = next(sessions, None) is None
        window_s = min(self._window.duration_s, ended_s) if is_exhausted else self._window.duration_s
        return RunResult(records, window_s, False)

    async def _run(
        self, work: Coroutine[None, None, None], rule: HopelessRule | None
    ) -> tuple[RequestRecord, ...]:
        self._clock.start()
        working = asyncio.create_task(work)
        ticking = asyncio.create_task(self._tick(rule))
        try:
            await asyncio.wait((working, ticking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end((working, ticking))
        self._state.elapsed_s = self._clock.now()
        self._watch(self._state)
        return tuple(call.so_far() for call in self._state.calls)

    async def _dispatch(self, sessions: Iterable[Session]) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            for session in sessions:
                talk = self._composer.conversation()
                call = self._call(talk, session.turns[0], session.start_s)  # made before it is due
                if not self._is_wanted(session.start_s):
                    break
                await self._sleep_until(session.start_s)
                if not self._is_wanted(session.start_s):
                    break
                self._state.add(call)
                tasks.add(asyncio.create_task(self._talk(talk, session, call)))
            if self._window.num_requests is None:
                await self._sleep_until(self._window.duration_s)
            self._state.is_draining = True
            await _await_all(tasks, self._window.drain_s)
        finally:
            await _end(tasks)

    async def _clients(self, sessions: Iterator[Session], concurrency: int) -> None:
        tasks = {asyncio.create_task(self._closed_client(sessions)) for _ in range(concurrency)}
        window = self._window
        limit = window.duration_s + window.drain_s if window.num_requests is None else None
        try:
            await _await_all(tasks, limit)
        finally:
            await _end(tasks)

    async def _closed_client(self, sessions: Iterator[Session]) -> None:
        for session in sessions:
            now = self._clock.now()
            if not self._is_wanted(now):
                return
            talk = self._composer.conversation()
            call = self._call(talk, session.turns[0], now)
            self._state.add(call)
            await self._talk(talk, session, call)
            if call.record is None or not call.record.is_completed:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _talk(self, talk: Conversation, session: Session, call: Call) -> None:
        """The session's turns, one after the other; a turn without an answer ends it."""
        record = await self._ended(call)
        for turn in session.turns[1:]:
            due_s = record.ended_s + turn.think_s
            if not record.is_completed or not self._is_wanted(due_s):
                return
            talk.add_reply(call.text)
            call = self._call(talk, turn, due_s)
            await self._sleep_until(due_s)
            if not self._is_wanted(due_s):
                return
            self._state.add(call)
            record = await self._ended(call)

    async def _ended(self, call: Call) -> RequestRecord:
        record = await call.run()
        self._state.end(record)
        return record

    def _call(self, talk: Conversation, turn: Turn, due_s: float) -> Call:
        return self._client.call(talk.ask(turn), due_s)

    def _is_wanted(self, due_s: float) -> bool:
        if self._window.num_requests is not None:
            return len(self._state.calls) < self._window.num_requests
        return due_s < self._window.duration_s

    async def _sleep_until(self, moment_s: float) -> None:
        # also a late sender sends what is due before it makes the next one ready
        await asyncio.sleep(max(0.0, moment_s - self._clock.now()))

    async def _tick(self, rule: HopelessRule | None) -> None:
        """Returns when the run is to be cut short."""
        while not self._is_cut_short:
            await asyncio.sleep(TICK_S)
            self._state.elapsed_s = self._clock.now()
            self._watch(self._state)
            self._is_cut_short = rule is not None and rule.is_hopeless(self._state)


async def _await_all(tasks: Iterable[asyncio.Task[None]], timeout_s: float | None) -> None:
    """Until all have ended, one has failed, or the time is over."""
    if pending := list(tasks):
        await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """None of them runs afterwards. Raises what one of them failed with: a bug of the sender must not look
    like a result.
    """
    all_of_them = list(tasks)
    for task in all_of_them:
        task.cancel()
    for outcome in await asyncio.gather(*all_of_them, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
