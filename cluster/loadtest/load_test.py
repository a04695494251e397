"""LoadTest: from settings to a report.

Owns the order: ask for the model, find words of one token, read the trace, run or search, judge. Runs on the
load test's event loop, which it has for itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Protocol

from cluster.loadtest.calibration import find_vocabulary
from cluster.loadtest.client import Client, NoAnswer
from cluster.loadtest.goodput import summarize
from cluster.loadtest.plan import Planner, fitting
from cluster.loadtest.prompts import Composer
from cluster.loadtest.rate_search import RateSearch
from cluster.loadtest.record import RequestRecord
from cluster.loadtest.report import (
    FORMAT,
    LoadReport,
    SearchOutcome,
    Step,
    Verdict,
    flattened,
    make_detail,
)
from cluster.loadtest.run_state import HopelessRule, RunState
from cluster.loadtest.runner import RunClock, Runner, RunResult
from cluster.loadtest.settings import ArrivalKind, LoadTestSettings, Window, WorkloadKind
from cluster.loadtest.traces import read_trace
from cluster.loadtest.verdict import duration, has_passed, judge

_NUM_SOLO = 3


class Watcher(Protocol):
    """Shows what is going on; called on the event loop, so it must be quick."""

    def tell(self, text: str) -> None: ...

    def begin(self, name: str, window: Window) -> None:
        """A step begins."""

    def watch(self, state: RunState) -> None:
        """Several times a second during a step."""

    def end(self, step: Step) -> None:
        """The step is over."""


async def run_load_test(settings: LoadTestSettings, api_key: str | None, watcher: Watcher) -> LoadReport:
    """Raises NoAnswer if the server cannot be measured, InvalidConfig for a faulty trace."""
    clock = RunClock()
    planner = _planner(settings, watcher)
    async with Client(settings.target, api_key, clock.now) as client:
        model = settings.target.model or await client.first_model()
        vocabulary = await find_vocabulary(settings.target, model, client)
        watcher.tell(f"{model} at {settings.target.url}, {len(vocabulary.words)} words of one token each")
        composer = Composer(settings.target, model, vocabulary, settings.seed)
        return await LoadTest(settings, planner, client, clock, composer, watcher).run()


class LoadTest:
    """One test against one open client. `run` it once."""

    def __init__(
        self,
        settings: LoadTestSettings,
        planner: Planner,
        client: Client,
        clock: RunClock,
        composer: Composer,
        watcher: Watcher,
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._client = client
        self._clock = clock
        self._composer = composer
        self._watcher = watcher
        self._steps: list[Step] = []
        self._shown: tuple[int, Sequence[RequestRecord]] = (0, ())

    async def run(self) -> LoadReport:
        settings = self._settings
        started_at, started = datetime.now(UTC), time.monotonic()
        load_before = os.getloadavg()[0]
        search = None
        if settings.search is not None:
            search = await self._search()
        else:
            await self._step(self._planned_rate(), settings.window, "")
        index, records = self._shown
        counted = [record for record in records if record.due_s >= settings.window.warm_up_s]
        step = self._steps[index]
        return LoadReport(
            format=FORMAT,
            title=f"Load test of {self._composer.model}",
            tool=f"baton {importlib.metadata.version('baton')}",
            started_at=started_at.isoformat(timespec="seconds"),
            took_s=round(time.monotonic() - started, 3),
            model=self._composer.model,
            configuration=tuple(flattened(asdict(settings))),
            machine=(
                ("cores", str(os.cpu_count())),
                ("load average before", f"{load_before:.2f}"),
                ("load average after", f"{os.getloadavg()[0]:.2f}"),
                ("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"),
            ),
            slo=settings.slo,
            steps=tuple(self._steps),
            detail=make_detail(index, records, settings.slo, settings.window.warm_up_s),
            search=search,
            verdict=_with_load(
                judge(step, counted, settings.slo, settings.max_error_share, search), load_before
            ),
        )

    def _planned_rate(self) -> float | None:
        arrivals = self._settings.arrivals
        if arrivals.kind is ArrivalKind.TRACE and arrivals.rate is None:
            return self._planner.trace_rate * arrivals.speed
        return None if arrivals.is_closed else arrivals.rate

    async def _search(self) -> SearchOutcome:
        """Steps until the highest rate within the SLO is known; that one is shown."""
        wanted, slo = self._settings.search, self._settings.slo
        assert wanted is not None
        solo = await self._solo()
        completed = [record for record in solo.records if record.is_completed]
        if not completed:
            raise NoAnswer(f"one request alone is not answered: {solo.records[0].detail}")
        best = min(completed, key=lambda record: record.e2e_s)
        if not any(map(slo.is_met_by, completed)):
            self._keep("one at a time", None, solo, 0.0)
            what = f"TTFT {duration(best.ttft_s)}, mean ITL {duration(best.tpot_s)}"
            return SearchOutcome(None, None, f"one request alone misses it already ({what})")
        search = RateSearch(wanted, wanted.start or 1.0 / best.e2e_s)
        began = time.monotonic()
        while (rate := search.next_rate) is not None:
            self._watcher.tell(search.reason)
            passing = search.bracket.passing
            window = self._window(rate, wanted.min_requests)
            shown = self._shown
            step = await self._step(rate, window, f"step {len(self._steps)}")
            search.add(rate, step.has_passed, time.monotonic() - began)
            if passing is not None and search.bracket.passing == passing:
                self._shown = shown
        found = search.bracket
        return SearchOutcome(found.passing, found.failing, search.reason)

    async def _solo(self) -> RunResult:
        """A few requests one after the other: what the server can do at best, and its warm-up."""
        window = replace(self._settings.window, num_requests=_NUM_SOLO, warm_up_s=0.0)
        self._watcher.begin("one at a time", window)
        runner = self._runner(window)
        arrivals = replace(self._settings.arrivals, kind=ArrivalKind.CLOSED)
        planner = replace(self._planner, settings=replace(self._settings, arrivals=arrivals, search=None))
        return await runner.closed_loop(planner.sessions(None, None, "solo"), 1)

    def _window(self, rate: float, min_requests: int) -> Window:
        """Long enough for so many requests at that rate, after the warm-up."""
        window = self._settings.window
        needed_s = window.warm_up_s + min_requests / rate
        return replace(window, duration_s=max(window.duration_s, needed_s), num_requests=None)

    async def _step(self, rate: float | None, window: Window, round_name: str) -> Step:
        name = f"{rate:.3g} requests/s" if rate is not None else f"{self._concurrency} clients"
        self._watcher.begin(name, window)
        step = self._keep(name, rate, await self._run(rate, window, round_name), window.warm_up_s)
        self._watcher.end(step)
        return step

    def _keep(self, name: str, rate: float | None, result: RunResult, warm_up_s: float) -> Step:
        """Judges a run and shows it until another one is to be shown."""
        records = [record for record in result.records if record.due_s >= warm_up_s]
        if not records:
            raise NoAnswer(f"no request was due after the warm-up of {warm_up_s:g} s")
        summary = summarize(records, self._settings.slo, max(result.window_s - warm_up_s, 1e-3))
        step = Step(
            name=name,
            rate=rate,
            concurrency=self._concurrency if rate is None else None,
            has_passed=has_passed(summary, self._settings.max_error_share) and not result.is_cut_short,
            is_cut_short=result.is_cut_short,
            load_average=round(os.getloadavg()[0], 2),
            summary=summary,
        )
        self._shown = (len(self._steps), result.records)
        self._steps.append(step)
        return step

    async def _run(self, rate: float | None, window: Window, round_name: str) -> RunResult:
        if rate is None:
            sessions = self._planner.sessions(None, None, round_name)
            return await self._runner(window).closed_loop(sessions, self._concurrency)
        if self._settings.arrivals.kind is ArrivalKind.TRACE:
            # a trace that ends before the window does ends it
            span_s = len(self._planner.records) / rate
            window = replace(window, duration_s=min(window.duration_s, span_s))
        rule = None
        if self._settings.search is not None:
            num_planned = round(rate * (window.duration_s - window.warm_up_s))
            rule = HopelessRule(self._settings.slo, num_planned, window.warm_up_s)
        sessions = self._planner.sessions(rate, None, round_name)
        return await self._runner(window).open_loop(sessions, rule)

    def _runner(self, window: Window) -> Runner:
        return Runner(self._client, self._clock, self._composer, window, self._watcher.watch)

    @property
    def _concurrency(self) -> int:
        return self._settings.arrivals.concurrency


def _with_load(verdict: Verdict, load_average: float) -> Verdict:
    """A machine that was busy before the test is not measured alone."""
    cores = os.cpu_count() or 1
    if load_average <= cores:
        return verdict
    busy = f"this machine was busy before the test: load average {load_average:.1f} on {cores} cores"
    return replace(verdict, warnings=(*verdict.warnings, busy))


def _planner(settings: LoadTestSettings, watcher: Watcher) -> Planner:
    workload = settings.workload
    if workload.kind is not WorkloadKind.TRACE:
        return Planner(settings)
    assert workload.trace is not None
    records = read_trace(workload.trace)
    kept = fitting(records, workload)
    if not kept:
        raise NoAnswer(f"no request of {workload.trace} fits a context of {workload.max_context} tokens")
    left_out = len(records) - len(kept)
    watcher.tell(f"{workload.trace.name}: {len(kept)} requests, {left_out} left out as too long")
    return Planner(settings, kept)
