"""The highest rate within the SLO, by a few runs: steps up and down from a start, then halves.

Owns the search, not the runs. Pure but for what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

# beyond the rate at which so little of the most good answers a second is left, no more is to be found
_FALLEN = 0.9


class Measured(Protocol):
    """What a run at one rate came to."""

    @property
    def is_slo_met(self) -> bool: ...

    @property
    def goodput_rps(self) -> float:
        """Rate × attainment."""
        ...


@dataclass(frozen=True, slots=True)
class Steps:
    """Multiples of a rate: `start`, `step` between them, none above `most`, none below `step`. The last step
    is halved `num_halvings` times.
    """

    start: float = 2.0
    step: float = 0.25
    most: float = 6.0
    num_halvings: int = 3

    def __post_init__(self) -> None:
        if not 0.0 < self.step <= self.start <= self.most:
            raise ValueError("0 < step <= start <= most must hold")
        if self.num_halvings < 0:
            raise ValueError("num_halvings must not be negative")


Run = TypeVar("Run", bound=Measured)


@dataclass(slots=True)
class Search(Generic[Run]):
    """All that was run. Upwards until the SLO is missed and the good answers a second have fallen for good,
    so that neither a dip nor the peak is overlooked; downwards until it is met.
    """

    run: Callable[[float], Run]
    steps: Steps = field(default_factory=Steps)
    found: dict[float, Run] = field(default_factory=dict)

    @property
    def highest(self) -> float | None:
        """The highest multiple at which the SLO was met; None: at none."""
        return max((speed for speed, run in self.found.items() if run.is_slo_met), default=None)

    @property
    def peak(self) -> float:
        """Where most answers a second were good, whatever share of all they were."""
        return max(self.found, key=lambda speed: self.found[speed].goodput_rps)

    def go(self) -> None:
        steps = self.steps
        speed = steps.start
        while self._at(speed).is_slo_met or not self._has_fallen(speed):
            if speed + steps.step > steps.most:
                break
            speed += steps.step
        speed = steps.start
        while self.highest is None and speed > steps.step:
            speed = max(steps.step, speed - steps.step)
            self._at(speed)
        if self.highest is None:
            return
        gap = steps.step
        for _ in range(steps.num_halvings):
            gap /= 2.0
            if self.highest + gap <= steps.most:
                self._at(self.highest + gap)

    def _at(self, speed: float) -> Run:
        if speed not in self.found:
            self.found[speed] = self.run(speed)
        return self.found[speed]

    def _has_fallen(self, speed: float) -> bool:
        return self.found[speed].goodput_rps < _FALLEN * self.found[self.peak].goodput_rps
