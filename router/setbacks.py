"""Setbacks: what went wrong with a request so far, and what follows for its next placement.

Owns which worker is avoided and for how long, which may not be sent KV any more, and when enough is enough.
Decides by error type only. One per request; used on the event loop.
"""

from __future__ import annotations

import math

from core.clock import Clock
from core.errors import (
    Cancelled,
    ContextTooLong,
    HandoffError,
    Overloaded,
    ReservationRefused,
    ServingError,
    StaleEpoch,
    WorkerDraining,
    WorkerLost,
)
from core.ids import Epoch, WorkerId, WorkerRef
from router.config import RouterConfig

_Incarnation = tuple[WorkerId, Epoch]

# so often a decode worker may refuse KV before the request queues there to be read by that worker itself
_MAX_REFUSED_OFFERS = 2


class Setbacks:
    """`num_failures` counts what points at the request or a broken worker; refusals and lost workers'
    successors do not.
    """

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self.num_failures = 0
        self.last_error: ServingError | None = None
        self._config = config
        self._clock = clock
        self._avoided_until: dict[_Incarnation, float] = {}
        self._num_refusals: dict[_Incarnation, int] = {}
        self._local_only: set[_Incarnation] = set()

    def note(self, error: ServingError, callee: WorkerRef, target: WorkerRef | None = None) -> None:
        """Remember that a call to `callee` failed, which was to send KV to `target`.

        Raises `error` itself if placing again cannot help, or has been tried often enough.
        """
        blamed = _blamed(error, callee, target)
        match error:
            case ReservationRefused() | Overloaded() | WorkerDraining():
                self._refused(error, blamed)
            case ContextTooLong() if target is not None:
                # the prompt does not fit this prefill worker's pool; a decode worker may still read it
                self._avoid(blamed, math.inf)
            case WorkerLost() | StaleEpoch():
                if blamed is target:
                    # prefill cannot reach it; if our own way to it is open, it can read the prompt itself
                    self._local_only.add(_name(blamed))
                self._avoid(blamed, self._config.max_backoff_s)
                self._count(error)
            case HandoffError() if blamed is target:
                self._local_only.add(_name(blamed))
                self._count(error)
            case _ if error.retryable or isinstance(error, Cancelled):
                self._avoid(blamed, self._config.refusal_backoff_s)
                self._count(error)
            case _:
                raise error
        self.last_error = error

    def is_avoided(self, ref: WorkerRef) -> bool:
        """Whether `ref` is to be left alone at present."""
        return self._clock.now() < self._avoided_until.get(_name(ref), 0.0)

    def is_handoff_target(self, ref: WorkerRef) -> bool:
        """Whether KV may be sent to `ref`; if not, it can still read the prompt itself."""
        return _name(ref) not in self._local_only

    def next_chance_at(self) -> float:
        """When the next avoided worker may be tried again; infinity if none is avoided."""
        now = self._clock.now()
        return min((until for until in self._avoided_until.values() if until > now), default=math.inf)

    def _refused(self, error: ServingError, blamed: WorkerRef) -> None:
        name = _name(blamed)
        count = self._num_refusals[name] = self._num_refusals.get(name, 0) + 1
        if isinstance(error, ReservationRefused) and count >= _MAX_REFUSED_OFFERS:
            self._local_only.add(name)
        backoff_s = self._config.refusal_backoff_s * 2.0 ** min(count - 1, 20)
        self._avoid(blamed, min(backoff_s, self._config.max_backoff_s))

    def _avoid(self, ref: WorkerRef, seconds: float) -> None:
        until = self._clock.now() + seconds
        self._avoided_until[_name(ref)] = max(until, self._avoided_until.get(_name(ref), 0.0))

    def _count(self, error: ServingError) -> None:
        self.num_failures += 1
        if self.num_failures > self._config.max_failures:
            raise error


def _name(ref: WorkerRef) -> _Incarnation:
    return (ref.worker_id, ref.epoch)


def _blamed(error: ServingError, callee: WorkerRef, target: WorkerRef | None) -> WorkerRef:
    """The worker at fault: the one the error names, else decode for a failed handoff, else the one that
    was called.
    """
    if target is None:
        return callee
    named = error.details.get("worker_id")
    if named == target.worker_id:
        return target
    if isinstance(error, HandoffError) and named != callee.worker_id:
        return target
    return callee
