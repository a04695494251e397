"""Patience: from a need that varies to a number of workers that stands.

Owns when a pool may grow (the need has lasted) and when it may shrink (for long, fewer would have done with a
margin to spare), and that a pool that had to grow again after it shrank does not shrink again for the same
load until that is long ago. One per pool; an immutable value, so that decisions can be repeated. Pure; time
is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cluster.autoscaler.need import Need

# of the workers that did not suffice: the need must fall below that before so few are tried again
_REGRET = 0.6
_REGRET_DECAY = 0.7
# times the patience downwards: a pool that grows later than that after it shrank has another load
_REMEMBERED = 8.0
# times the patience downwards since it grew: afterwards so few workers may be tried for the same load, too
_FORGIVEN = 20.0
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """A need at one moment."""

    at: float
    need: float


@dataclass(frozen=True, slots=True)
class Patience:
    """`recent` are the needs of the last seconds, `peaks` those that none after them exceeded. `known_since`
    and `complete_since`: from when on there is no gap in either. `grown_at`, `shrunk_at` and `shrunk_to`:
    the last time; `regret`: below this need, so few workers may be tried again.
    """

    recent: tuple[Sample, ...] = ()
    peaks: tuple[Sample, ...] = ()
    known_since: float | None = None
    complete_since: float | None = None
    grown_at: float | None = None
    shrunk_at: float | None = None
    shrunk_to: int = 0
    regret: float | None = None

    def after(self, now: float, need: Need, waits: tuple[float, float], is_complete: bool) -> Patience:
        """With one more need. `waits`: seconds that a need lasts before it counts, upwards and downwards.
        Where not `is_complete`, the true need may be larger.
        """
        least, most = need.num_workers, need.num_at_most
        if least is None or most is None:
            return replace(self, recent=(), peaks=(), known_since=None, complete_since=None)
        up_s, down_s = waits
        recent = tuple(old for old in self.recent if old.at >= now - up_s - _EPSILON)
        peaks = tuple(old for old in self.peaks if old.at >= now - down_s - _EPSILON and old.need > most)
        return replace(
            self,
            recent=(*recent, Sample(now, least)),
            peaks=(*peaks, Sample(now, most)),
            known_since=_first(self.known_since, now),
            complete_since=_first(self.complete_since, now) if is_complete else None,
        )

    def least(self, now: float, up_s: float) -> int:
        """Workers that have been needed for `up_s` without a pause; 0 if it is not known for so long."""
        if self.known_since is None or now - self.known_since < up_s - _EPSILON:
            return 0
        return whole(min(sample.need for sample in self.recent))

    def most(self, now: float, down_s: float, margin: float) -> int | None:
        """Workers that would have done for all of `down_s` with `margin` to spare; None if that is not known
        for so long, or the same load was thought to need fewer before and did not do with them: a burst of it
        may come again.
        """
        if self.complete_since is None or now - self.complete_since < down_s - _EPSILON:
            return None
        peak = max(sample.need for sample in self.peaks)
        num = whole(peak * (1.0 + margin))
        if not self._is_regretted(now, down_s, peak):
            return num
        if self.grown_at is not None and now - self.grown_at <= _REMEMBERED * down_s:
            return None
        return max(num, self.shrunk_to + 1)

    def _is_regretted(self, now: float, down_s: float, peak: float) -> bool:
        """Whether so few workers did not suffice the last time, for all that is known."""
        if self.regret is None or peak < self.regret:
            return False
        # a second wave of load looks like a mistake, too: it must not keep workers for ever
        return self.grown_at is None or now - self.grown_at <= _FORGIVEN * down_s

    def grown(self, now: float, down_s: float) -> Patience:
        """The pool grows. If it shrank not long ago, that was a mistake."""
        if self.shrunk_at is None or now - self.shrunk_at > _REMEMBERED * down_s:
            return replace(self, grown_at=now)
        regret = _REGRET * self.shrunk_to if self.regret is None else _REGRET_DECAY * self.regret
        return replace(self, regret=regret, grown_at=now, shrunk_at=None)

    def shrunk(self, now: float, num_workers: int) -> Patience:
        """The pool shrinks to `num_workers`."""
        keeps_regret = self.regret is not None and num_workers == self.shrunk_to
        return replace(
            self, shrunk_at=now, shrunk_to=num_workers, regret=self.regret if keeps_regret else None
        )


def whole(need: float) -> int:
    """Whole workers."""
    return math.ceil(need - _EPSILON)


def _first(known: float | None, now: float) -> float:
    return now if known is None else known
