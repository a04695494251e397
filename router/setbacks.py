"""Setbacks: what went wrong with a request so far, and what follows for its next placement.

Owns which worker is avoided and for how long, which may not be sent KV any more, and when enough is enough.
Decides by error type only. One per request; used on the event loop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from core.clock import Clock
from core.errors import (
    Cancelled,
    ContextTooLong,
    HandoffError,
    NoWorkerAvailable,
    Overloaded,
    ReservationRefused,
    ServingError,
    StaleEpoch,
    StepFailed,
    WorkerDraining,
    WorkerLost,
    WrongRole,
)
from core.ids import Epoch, WorkerId, WorkerRef
from router.config import RouterConfig

_Incarnation = tuple[WorkerId, Epoch]

# so often a decode worker may refuse KV before the request queues there to be read by that worker itself
_MAX_REFUSED_OFFERS = 2


class Setbacks:
    """What is known of the workers is shared by all samples of the request. Failures are counted for each
    sample: what points at the request or a broken worker counts, refusals do not.
    """

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self.last_error: ServingError | None = None
        self._config = config
        self._clock = clock
        self._avoided_until: dict[_Incarnation, float] = {}
        self._num_refusals: dict[_Incarnation, int] = {}
        self._local_only: set[_Incarnation] = set()
        self._too_long: dict[_Incarnation, ContextTooLong] = {}
        self._num_failures: Counter[int] = Counter()
        self._broken_by: dict[int, set[_Incarnation]] = {}

    def note(
        self,
        error: ServingError,
        callee: WorkerRef,
        target: WorkerRef | None = None,
        samples: Sequence[int] = (0,),
    ) -> None:
        """Remember that a call to `callee` for `samples` failed, which was to send KV to `target`.

        Raises `error` itself if placing again cannot help, or has been tried often enough.
        """
        blamed = _blamed(error, callee, target)
        match error:
            case ReservationRefused() | Overloaded() | WorkerDraining() | WrongRole():
                self._refused(error, blamed)
            case ContextTooLong():
                # this worker's pool is too small; another one's may do
                self._too_long[_name(callee)] = error
                self._avoid(callee, math.inf)
            case WorkerLost() | StaleEpoch():
                if blamed is target:
                    # prefill cannot reach it; if our own way to it is open, it can read the prompt itself
                    self._local_only.add(_name(blamed))
                self._avoid(blamed, self._config.max_backoff_s)
                self._count(error, samples)
            case HandoffError() if blamed is target:
                self._local_only.add(_name(blamed))
                self._count(error, samples)
            case StepFailed():
                self._avoid(blamed, self._config.refusal_backoff_s)
                self._broke(error, blamed, samples)
                self._count(error, samples)
            case _ if error.retryable or isinstance(error, Cancelled):
                self._avoid(blamed, self._config.refusal_backoff_s)
                self._count(error, samples)
            case _:
                raise error
        self.last_error = error

    @property
    def has_failed(self) -> bool:
        """Whether a worker failed the request, not just refused it."""
        return bool(self._num_failures)

    def is_avoided(self, ref: WorkerRef, now: float) -> bool:
        """Whether `ref` is to be left alone at `now`."""
        return now < self._avoided_until.get(_name(ref), 0.0)

    def is_handoff_target(self, ref: WorkerRef) -> bool:
        """Whether KV may be sent to `ref`; if not, it can still read the prompt itself."""
        return _name(ref) not in self._local_only

    def next_chance_at(self, refs: Sequence[WorkerRef], now: float) -> float:
        """When the next one of `refs` that is avoided at `now` may be tried again; infinity if there is none.

        `now` is that of `is_avoided`: a worker whose time ends between two readings of the clock would be
        neither free nor waited for.
        """
        times = (self._avoided_until.get(_name(ref), 0.0) for ref in refs)
        return min((until for until in times if until > now), default=math.inf)

    def is_too_long_for(self, refs: Sequence[WorkerRef]) -> bool:
        """Whether there are `refs`, and the request fits the pool of none."""
        return bool(refs) and all(_name(ref) in self._too_long for ref in refs)

    def final_error(self, refs: Sequence[WorkerRef]) -> ServingError:
        """What a request ends with that is not placed again, when `refs` are there but do not take it."""
        if self.is_too_long_for(refs):
            errors = [self._too_long[_name(ref)] for ref in refs]
            return max(errors, key=lambda error: error.details.get("max_context") or 0)
        match self.last_error if refs else None:
            case None | WorkerDraining() | WrongRole() | ContextTooLong():
                return NoWorkerAvailable("no worker can answer at present", retry_after_s=5)
            case ReservationRefused():
                return Overloaded("no worker has room for the request at present", retry_after_s=1)
            case error:
                return error

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

    def _broke(self, error: StepFailed, blamed: WorkerRef, samples: Sequence[int]) -> None:
        """Once two workers could not compute a sample, it is the sample: it would only disturb others."""
        for sample in samples:
            names = self._broken_by.setdefault(sample, set())
            names.add(_name(blamed))
            if len(names) > 1:
                raise error

    def _count(self, error: ServingError, samples: Sequence[int]) -> None:
        self._num_failures.update(samples)
        if any(self._num_failures[sample] > self._config.max_failures for sample in samples):
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
