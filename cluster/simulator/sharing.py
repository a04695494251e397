"""Sharing: workers of one host compute on the same cores, and each is slower while another one computes.

Owns who computes until when, and what that costs. A step is priced when it begins, by who computes then and
for how long that is to go on. One thread.
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
        self._going_on_until: dict[object, float] = {}

    def is_beside(self, worker: object, at: float) -> bool:
        """Whether another one than `worker` computes at that time, or will again at once."""
        return any(
            other is not worker and until > at - _LINGER_S for other, until in self._busy_until.items()
        )

    def is_busy(self, at: float) -> bool:
        """Whether any worker computes at that time, or will again at once."""
        return self.is_beside(None, at)

    def coming(self, worker: object, at: float, until: float) -> None:
        """`worker` has something to do from `at` to `until`: a step of another one that begins just before is
        beside it, too.
        """
        self._busy_until[worker] = max(at, self._busy_until.get(worker, 0.0))
        self.going_on(worker, until)

    def going_on(self, worker: object, until: float) -> None:
        """With what it has, `worker` will be busy until then."""
        self._going_on_until[worker] = until

    def seconds(self, worker: object, at: float, plan: StepPlan, alone_s: float) -> float:
        """What a step takes that would take `alone_s` alone; it begins now, and is alone again as soon as the
        others have done what they have.
        """
        seconds = alone_s
        if self.is_beside(worker, at):
            factor = self._sharing.reading if plan.chunks else self._sharing.decoding
            beside_s = self._others_until(worker, at) - at
            # of the time beside them only a part is progress
            seconds = min(alone_s * factor, alone_s + beside_s * (1.0 - 1.0 / factor))
        self._busy_until[worker] = at + seconds
        return seconds

    def _others_until(self, worker: object, at: float) -> float:
        """When the last of those ends that compute now, or will again at once."""
        until = at
        for other, busy_until in self._busy_until.items():
            if other is not worker and busy_until > at - _LINGER_S:
                until = max(until, busy_until, self._going_on_until.get(other, 0.0))
        return until
