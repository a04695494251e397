"""Pace: when a worker that decodes begins its next step while another worker of its host reads prompts.

A decode step is bound by memory and a prompt by arithmetic, so a step on half of the cores takes little
longer than alone, and the prompt twice as long. What a step may take longer is better given to the prompt:
the streams go on at a bounded stretch of their own pace, and the cores are the prompt's in between. Owns what
a step takes alone, learned; no clock, no threads.
"""

from __future__ import annotations

from core.running_line import RunningLine
from engine.step_costs import StepWork

_TYPICAL_STREAMS = 8.0


class Pace:
    """`stretch`: beside a worker that reads, steps begin that many times as far apart as steps take alone. 1
    or less: they never wait. Times in seconds, of one clock.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._alone = RunningLine(_TYPICAL_STREAMS)
        self._last: tuple[float, int] | None = None  # when the last step began and its streams, if it decoded

    def observe(self, work: StepWork, began_at: float, ended_at: float, was_beside: bool | None) -> None:
        """A step ran, alone, beside another worker's (`was_beside`), or in part (None)."""
        if work.num_prefill_tokens:
            self._last = None
            return
        self._last = began_at, work.num_streams
        if was_beside is False:
            self._alone.observe(work.num_streams, ended_at - began_at)

    def pause_s(self, now: float) -> float:
        """How long a worker that decoded last waits with its next step. 0 as long as no step ran alone."""
        if self._last is None or self._stretch <= 1.0:
            return 0.0
        began_at, num_streams = self._last
        return max(0.0, began_at + self._stretch * self._alone.at(num_streams) - now)
