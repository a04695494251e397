"""Leap: steps of a decode worker between which nothing changes, taken at once.

Owns when that is so: the same streams, none of which ends or comes to the border of a block, and no command,
tick or newcomer between. What such a step does to the loop's state is done here by sums: this module knows
the insides of scheduler and rows, and a test compares its event log with stepping. One thread.
"""

from __future__ import annotations

import numpy as np

from cluster.simulator.site_runner import EOS, SiteRunner
from decode_worker.decode_loop import DecodeLoop
from engine.metrics import EngineMetrics
from engine.step import StepPlan
from engine.step_costs import StepWork


class Leap:
    """One per decode worker. Ask `ends` after a step; then `take` some of them, or step on."""

    def __init__(self, loop: DecodeLoop, runner: SiteRunner, metrics: EngineMetrics) -> None:
        self._loop = loop
        self._runner = runner
        self._metrics = metrics
        self._plan: StepPlan | None = None
        self._begin_at = 0.0
        self._ends: list[float] = []

    def ends(self, now: float, limit_at: float) -> list[float]:
        """When the steps that repeat the last one would end, the first of which begins `now`; all begin
        before `limit_at`.
        """
        plan = self._runner.last_plan
        self._ends = []
        if plan is None or plan.chunks or not len(plan.streams):
            return []
        if self._loop.status().num_running != len(plan.streams):
            return []
        num_steps = _num_plain_steps(plan, self._runner.layout.block_size)
        num_streams, num_kv = len(plan.streams), int(plan.streams.num_tokens.sum())
        price, draws = self._runner.price, self._runner.draws
        self._plan, self._begin_at = plan, now
        while num_steps > 0 and now < limit_at:
            num_steps -= 1
            num_kv += num_streams
            now += price.seconds((1.0, 0.0, 0.0, float(num_streams), float(num_kv))) * draws.streaming()
            self._ends.append(now)
        return self._ends

    def take(self, num_steps: int) -> list[float]:
        """Take the first `num_steps` of them; when they end."""
        ends, plan = self._ends[:num_steps], self._plan
        if not ends:
            return ends
        assert plan is not None
        num_streams, num_kv = len(plan.streams), int(plan.streams.num_tokens.sum())
        costs, began_at = self._loop._pipeline.costs, self._begin_at
        for end in ends:
            seconds, began_at = end - began_at, end
            num_kv += num_streams
            self._metrics.observe_step(seconds, 0)
            costs.observe(seconds, StepWork(0, num_streams, num_kv), False)
        self._runner.note_steps(num_steps, ends[-1] - self._begin_at)
        more = [EOS] * num_steps
        for sequence in plan.streams.sequences:
            sequence.token_ids += more
            sequence.num_computed_tokens += num_steps
        rows = self._loop._scheduler._running.streams
        rows._num_tokens[plan.streams.slots] += num_steps
        rows.num_computed_tokens += num_steps * len(plan.streams)
        return ends


def _num_plain_steps(plan: StepPlan, block_size: int) -> int:
    """How many steps after `plan` find no stream at a block's border and end none."""
    num_tokens, traits = plan.streams.num_tokens, plan.streams.traits
    in_block = num_tokens % block_size
    num_left = np.where(in_block == 0, 0, block_size - 1 - in_block)
    num_left = np.minimum(num_left, traits["num_unending_tokens"] - 1 - num_tokens)
    num_left = np.minimum(num_left, traits["max_tokens"] - 2 - num_tokens)
    return int(num_left.min())
