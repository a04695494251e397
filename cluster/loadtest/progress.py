"""What a person sees while a load test runs: a live line on a terminal, plain lines elsewhere.

Owns the look only. Called on the load test's event loop.
"""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from cluster.loadtest.record import Outcome
from cluster.loadtest.report import Step
from cluster.loadtest.run_state import RunState
from cluster.loadtest.settings import Window
from cluster.loadtest.verdict import duration

PLAIN_PERIOD_S = 10.0


class ConsoleWatcher:
    """Use as a context: the live line ends with it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._name = ""
        self._window = Window()
        self._told_s = 0.0

    def __enter__(self) -> ConsoleWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_live()

    def tell(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def begin(self, name: str, window: Window) -> None:
        self._end_live()
        self._name, self._window, self._told_s = name, window, 0.0
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def watch(self, state: RunState) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._bar(state)} {self._line(state)}", no_wrap=True))
        elif state.elapsed_s - self._told_s >= PLAIN_PERIOD_S:
            self._told_s = state.elapsed_s
            self._console.print(
                f"{state.elapsed_s:6.1f} s  {self._line(state)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def end(self, step: Step) -> None:
        self._end_live()
        mark = "[green]✓[/]" if step.has_passed else "[red]✗[/]"
        self._console.print(f"{mark} {escape(result_line(step))}", highlight=False, soft_wrap=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, state: RunState) -> str:
        counts = state.outcomes
        parts = [
            self._name,
            f"{len(state.calls)} sent",
            f"{len(state.running)} open",
            f"{counts[Outcome.COMPLETED]} done",
        ]
        parts += [f"{counts[Outcome.REFUSED]} refused"] if counts[Outcome.REFUSED] else []
        parts += [f"{counts[Outcome.ERROR]} errors"] if counts[Outcome.ERROR] else []
        if state.recent_ttft_s:
            parts.append(f"TTFT p50 {duration(median(state.recent_ttft_s))}")
        if state.elapsed_s:
            parts.append(f"{state.num_output_tokens / state.elapsed_s:.0f} tok/s")
        return " · ".join([*parts, *(["waiting for the last answers"] if state.is_draining else [])])

    def _bar(self, state: RunState) -> str:
        """How much of the window is over."""
        whole, width = self._window.num_requests, 20
        share = state.elapsed_s / self._window.duration_s if whole is None else len(state.calls) / whole
        filled = min(width, int(share * width))
        return "━" * filled + "╌" * (width - filled)


def result_line(step: Step) -> str:
    """What came out of a step, in one line."""
    summary = step.summary
    parts = [f"{step.name}: {summary.attainment:.1%} good of {summary.num_requests}"]
    parts.append(f"goodput {summary.goodput_rps:.3g}/s")
    for name, found in (("TTFT", summary.ttft), ("ITL", summary.itl)):
        if found is not None:
            parts.append(f"{name} p50 {duration(found.p50)} p99 {duration(found.p99)}")
    parts.append(f"{summary.output_tokens_per_s:.0f} tok/s")
    if summary.num_refused or summary.num_errors:
        parts.append(f"{summary.num_refused} refused, {summary.num_errors} errors")
    return " · ".join([*parts, *(["stopped early"] if step.is_cut_short else [])])
