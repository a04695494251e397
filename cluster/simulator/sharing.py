"""Sharing: workers of one host compute on the same cores, and each is slower while another one computes.

Owns which steps run, how far each has got, and when it ends: a step is slowed for exactly as long as another
worker's runs beside it, whichever began first. Whoever takes a step waits for its end in a greenlet; the
others' events go on meanwhile. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from greenlet import getcurrent, greenlet

from cluster.simulator.events import Events

_LINGER_S = 0.02  # the gap between two steps of a busy worker is shorter: see `engine.cores`


@dataclass(frozen=True, slots=True)
class Sharing:
    """While another worker of the host computes, a step that reads prompts takes `reading` times as long, and
    one that only decodes, its wait for the readers included, `decoding` times. `num_cores` are shared.
    """

    num_cores: int
    reading: float
    decoding: float

    def __post_init__(self) -> None:
        if self.num_cores < 1:
            raise ValueError("num_cores must be at least 1")
        for name in ("reading", "decoding"):
            if not getattr(self, name) >= 1.0:
                raise ValueError(f"{name} must be at least 1")


@dataclass(eq=False, slots=True)
class _Step:
    """One that runs: what is left of it, in seconds alone, at `at`; `factor` times as long beside another."""

    waiting: greenlet
    left_s: float
    factor: float
    at: float
    began_beside: bool
    was_ever_beside: bool = False
    rate: float = 1.0
    number: int = 0


class Host:
    """One host, for all of its workers."""

    def __init__(self, sharing: Sharing, events: Events) -> None:
        self.num_cores = sharing.num_cores
        self._sharing = sharing
        self._events = events
        self._steps: dict[object, _Step] = {}
        self._ended_at: dict[object, float] = {}
        self._num_changes = 0

    def now(self) -> float:
        """The time of the events."""
        return self._events.now()

    def is_busy(self, at: float, besides: object = None) -> bool:
        """Whether any worker, not counting `besides`, computes at that time or will again at once."""
        if any(worker is not besides for worker in self._steps):
            return True
        return any(
            worker is not besides and ended_at > at - _LINGER_S for worker, ended_at in self._ended_at.items()
        )

    def run(self, worker: object, alone_s: float, is_reading: bool) -> bool | None:
        """Returns when a step has ended that begins now and would take `alone_s` alone: whether another
        worker computed meanwhile, None if for a part of it. In a greenlet, whose parent lets events happen.
        """
        waiting = getcurrent()
        assert waiting.parent is not None, "a step of a shared host runs in a greenlet of its own"
        now = self._events.now()
        factor = self._sharing.reading if is_reading else self._sharing.decoding
        step = _Step(waiting, alone_s, factor, now, self.is_busy(now, worker))
        self._get_on(now)
        self._steps[worker] = step
        self._plan(now)
        waiting.parent.switch()
        now = self._events.now()
        self._get_on(now)
        del self._steps[worker]
        self._ended_at[worker] = now
        self._plan(now)
        if step.began_beside and self.is_busy(now, worker):
            return True
        return None if step.began_beside or step.was_ever_beside else False

    def _get_on(self, now: float) -> None:
        """All steps have got as far as they are now."""
        for step in self._steps.values():
            step.left_s = max(0.0, step.left_s - (now - step.at) * step.rate)
            step.at = now

    def _plan(self, now: float) -> None:
        """Steps began or ended: the others end earlier or later."""
        is_beside = len(self._steps) > 1
        self._num_changes += 1
        for step in self._steps.values():
            step.was_ever_beside |= is_beside
            step.rate = 1.0 / step.factor if is_beside else 1.0
            step.number = self._num_changes
            self._events.at(now + step.left_s / step.rate, self._end, step, step.number)

    def _end(self, step: _Step, number: int) -> None:
        if step.number == number:
            step.number = 0  # it ends once
            step.waiting.switch()
