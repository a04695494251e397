"""Who serves at present: soft state that announcements fill and silence empties.

Owns the rule when a worker's line lapses. Knows no Ray and no time of its own; the actor in `registry.py`
wraps it.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.awake import Awake
from core.clock import Clock
from core.ids import Epoch, WorkerId
from core.worker_status import Announcement

LAPSE_S = 3.0


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers heard of lately, ordered by name.

    `is_settled` is False while the registry is younger than `LAPSE_S`: a worker missing from it may only not
    have announced itself to the new registry yet. `ends_in_s`: the service stops, and open requests have that
    long (None: it does not stop).
    """

    announcements: tuple[Announcement, ...]
    is_settled: bool
    ends_in_s: float | None = None


class RegistryTable:
    """Worker → its last announcement and when it was heard. Only silence that could have been heard counts:
    `awake` knows when this process was stopped (None: never).
    """

    def __init__(self, clock: Clock, lapse_s: float = LAPSE_S, awake: Awake | None = None) -> None:
        self._clock = clock
        self._awake = awake or Awake(clock)
        self._lapse_s = lapse_s
        self._born = clock.now()
        self._heard: dict[WorkerId, tuple[Announcement, float]] = {}
        self._withdrawn: dict[tuple[WorkerId, Epoch], float] = {}
        self._ends_at: float | None = None

    def announce(self, announcement: Announcement) -> None:
        """Enter or refresh a worker. An incarnation that withdrew stays out, even if a late announcement
        arrives.
        """
        ref = announcement.ref
        if (ref.worker_id, ref.epoch) not in self._withdrawn:
            self._heard[ref.worker_id] = (announcement, self._clock.now())

    def withdraw(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Remove this incarnation at once; another incarnation of the same name is left alone."""
        self._withdrawn[worker_id, epoch] = self._clock.now()
        heard = self._heard.get(worker_id)
        if heard is not None and heard[0].ref.epoch == epoch:
            del self._heard[worker_id]

    def end_in(self, seconds: float) -> None:
        """The service stops: whoever asks from now on learns how long open requests have."""
        self._ends_at = self._clock.now() + seconds

    @property
    def is_ending(self) -> bool:
        """Whether the service stops."""
        return self._ends_at is not None

    def lines(self) -> tuple[Announcement, ...]:
        """The workers heard of lately, ordered by name."""
        self._heard = {name: line for name, line in self._heard.items() if self._is_recent(line[1])}
        self._withdrawn = {name: at for name, at in self._withdrawn.items() if self._is_recent(at)}
        return tuple(self._heard[name][0] for name in sorted(self._heard))

    def _is_recent(self, at: float) -> bool:
        return self._awake.elapsed_s(at) < self._lapse_s

    def membership(self) -> Membership:
        """The table without lapsed lines."""
        now = self._clock.now()
        ends_in_s = None if self._ends_at is None else max(0.0, self._ends_at - now)
        return Membership(self.lines(), now - self._born >= self._lapse_s, ends_in_s)


class MembershipView:
    """A router's memory of the table across registry restarts.

    A settled table replaces the memory. An unsettled one adds to it, so that workers which a reborn registry
    has not heard of yet stay in use; whether they live shows by their Watch streams, not here.
    """

    def __init__(self) -> None:
        self._known: dict[WorkerId, Announcement] = {}

    def update(self, membership: Membership) -> None:
        fresh = {line.ref.worker_id: line for line in membership.announcements}
        self._known = fresh if membership.is_settled else {**self._known, **fresh}

    @property
    def announcements(self) -> tuple[Announcement, ...]:
        return tuple(self._known[name] for name in sorted(self._known))
