"""Sharing: workers of one host compute on the same cores, and each is slower while another one computes.

Owns who computes until when, and what that costs. A step is priced when it begins, by who computes then. One
thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.step import StepPlan

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


class Host:
    """One host, for all of its workers."""

    def __init__(self, sharing: Sharing) -> None:
        self.num_cores = sharing.num_cores
        self._sharing = sharing
        self._busy_until: dict[object, float] = {}

    def is_beside(self, worker: object, at: float) -> bool:
        """Whether another one than `worker` computes at that time, or will again at once."""
        return any(
            other is not worker and until > at - _LINGER_S for other, until in self._busy_until.items()
        )

    def coming(self, worker: object, at: float) -> None:
        """`worker` has something to do from then on: a step of another one that begins just before is beside
        it for nearly all of its time.
        """
        self._busy_until[worker] = max(at, self._busy_until.get(worker, 0.0))

    def seconds(self, worker: object, at: float, plan: StepPlan, alone_s: float) -> float:
        """What a step takes that would take `alone_s` alone; it begins now."""
        seconds = alone_s
        if self.is_beside(worker, at):
            seconds *= self._sharing.reading if plan.chunks else self._sharing.decoding
        self._busy_until[worker] = at + seconds
        return seconds
