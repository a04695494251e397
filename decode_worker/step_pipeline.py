"""StepPipeline: the step that runs, and the next one, which may be started before its result is read.

Owns the order of starting, awaiting and applying steps, what of a result still counts, what a failed step
takes with it, and how long steps take. Does not choose who runs (the scheduler does) nor end jobs. Used on
the step thread.

Ahead, host and device work at the same time: while step N runs, N + 1 is planned as if each stream went on,
and started; then N's tokens are read. A stream that ends by them computes one token too many, which nobody
gets to see: its KV never gets a name, and its blocks stay its own until N + 1 has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.clock import Clock
from core.errors import StepFailed
from decode_worker.generation import Generation
from decode_worker.generations import Generations
from decode_worker.scheduler import Scheduler
from engine.metrics import EngineMetrics
from engine.step import StepOutput, StepPlan
from engine.step_costs import StepCosts, work_of

_log = logging.getLogger(__name__)


class Running(Protocol):
    """See `engine.running_step.RunningStep`."""

    def result(self) -> StepOutput: ...


class StepRunner(Protocol):
    """What this needs of `engine.runner.ModelRunner`."""

    is_overlapped: bool

    @property
    def was_beside(self) -> bool | None: ...

    def start(self, plan: StepPlan) -> Running: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Started:
    """`step` is the error if the start failed: it counts when the step's turn comes."""

    plan: StepPlan
    at: float
    step: Running | Exception
    was_beside: bool | None

    def result(self) -> StepOutput:
        if isinstance(self.step, Exception):
            raise self.step
        return self.step.result()


class StepPipeline:
    """`end_failed` ends a job whose sequence fails alone. `costs` are what steps took so far."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        generations: Generations,
        clock: Clock,
        metrics: EngineMetrics,
        end_failed: Callable[[Generation, StepFailed], None],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._generations = generations
        self._clock = clock
        self._metrics = metrics
        self._end_failed = end_failed
        self._running: _Started | None = None
        self._ended_at = clock.now()
        self._num_preemptions = 0
        self.costs = StepCosts()

    def advance(self, num_reserved_samples: int) -> bool:
        """Start what can run, and apply what one step brought: the one that ran, or where none may be ahead,
        the one that was started. False if there was nothing to do. `num_reserved_samples`: places kept for
        tickets.
        """
        running = self._running
        if running is not None:
            plan = self._scheduler.try_schedule_ahead(num_reserved_samples)
            self._running = self._start(plan) if plan else None
            self._finish(running)
            return True
        plan = self._scheduler.schedule(num_reserved_samples)
        started = self._start(plan)
        if started is None:
            return False
        if self._runner.is_overlapped and not plan.must_be_known:
            self._running = started
        else:
            self._finish(started)
        return True

    def settle(self) -> None:
        """Wait for the step that runs, if one does, and apply it; then all that is known here is true."""
        running, self._running = self._running, None
        if running is not None:
            self._finish(running)

    def observe_slots(self) -> None:
        """The slots that are held now and the tokens in them."""
        held, computed = self._scheduler.num_held_slots, self._scheduler.num_computed_tokens
        self._metrics.observe_slots(held, computed, self._clock.now())

    # ------------------------------------------------------------ inside

    def _start(self, plan: StepPlan) -> _Started | None:
        """None if the plan is empty: then somebody may have lost his blocks all the same."""
        for _ in range(self._scheduler.num_preemptions - self._num_preemptions):
            self._metrics.observe_preemption()
        self._num_preemptions = self._scheduler.num_preemptions
        for sequence in self._scheduler.started:
            self._metrics.observe_start(sequence)
        self._generations.note_started(self._scheduler.started)
        self.observe_slots()
        return self._begin(plan) if len(plan) else None

    def _begin(self, plan: StepPlan) -> _Started:
        self._scheduler.begin(plan)
        at = self._clock.now()
        try:
            step: Running | Exception = self._runner.start(plan)
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            step = error
        return _Started(plan, at, step, self._runner.was_beside)

    def _finish(self, started: _Started) -> None:
        work = work_of(started.plan)
        self._apply(started)
        now = self._clock.now()
        # a step that was started while another ran began when that one had ended
        seconds = now - max(started.at, self._ended_at)
        self._ended_at = now
        self._metrics.observe_step(seconds, work.num_prefill_tokens)
        self.costs.observe(seconds, work, started.was_beside)
        self.observe_slots()

    def _apply(self, started: _Started) -> None:
        plan = started.plan
        try:
            output = started.result()
        except Exception as error:  # noqa: BLE001 - logged, and told to whom it hits
            _log.exception("a step of %d sequences failed", len(plan))
            failure = StepFailed(f"the engine failed on this request ({type(error).__name__})")
        else:
            gone = self._scheduler.end(plan)
            if gone:
                part = plan.rows_without(gone)
                plan, output = plan.take(*part), output.take(*part)
            self._generations.apply(plan, output)
            return
        following, self._running = self._running, None
        if following is not None:
            _wait_for(following)
        self._scheduler.end(plan)
        if following is not None:
            self._scheduler.end(following.plan)
        self._run_apart(plan, failure)

    def _run_apart(self, plan: StepPlan, failure: StepFailed) -> None:
        """A step failed: run its sequences one by one, so that only those which fail alone are lost.

        Nothing was applied yet, and computing a token again writes the same KV to the same slots.
        """
        for sequence, part in plan.known().apart():
            generation = self._generations.owner(sequence)
            if generation is None:
                continue  # a sibling has failed, or it left while the step ran
            if len(plan) == 1:
                self._end_failed(generation, failure)
            else:
                self._apply(self._begin(part))


def _wait_for(following: _Started) -> None:
    """A step behind a failed one has read wrong tokens: nothing of it counts, but it has to end."""
    try:
        following.result()
    except Exception as error:  # noqa: BLE001 - the one before is to blame, and its failure is told
        _log.warning("the step behind a failed one failed, too: %s", error)
