"""RunningLimit: how many requests may run at once and still be answered in time.

There may be far more places than the workers serve well at a time: then all that run share what the workers
do, each takes longer the more there are, and in the end all of them too long. Found from what happens: once
many are cut off by their deadlines the limit falls, to what the workers do in two fifths of the time that a
request has, but by no more than to a quarter. From then on each answer that took less than half of its time
opens it a little, and each that took more than three fifths closes it a little, unless quick answers take as
much. A client in a hurry closes nothing: even quick answers take what it gives. Pure; time is an argument.
"""

from __future__ import annotations

import math

_FALL_TO_PART, _OPENING_PART, _CLOSING_PART = 0.4, 0.5, 0.6
_STEP = 0.5
_LARGEST_FALL = 4.0
_FEWEST = 2.0
# a quick answer's time: each that took longer moves it up by so much of the difference, far less than a crowd
# that slows all of them lasts
_QUICK_STEP = 0.002
_LITTLE_MORE, _FAR_MORE = 1.25, 1.5
# of those that ended: fewer that were cut off are what long answers come to, however few run
_MANY = 0.2
_SHARE_STEP = 0.05


class RunningLimit:
    """`num_running` is how many run at the moment, the one that ends included; `given_s` the time that a
    request had when it came, `mean_s` what it was expected to take.
    """

    def __init__(self) -> None:
        self._limit = math.inf
        self._cut_at = -math.inf
        self._quick_s = math.inf
        self._share_cut = 0.0
        self._num_ended = 0.0
        self._ended_at = -math.inf

    @property
    def num(self) -> float:
        """So many may run."""
        return self._limit

    def answered(self, held_s: float, given_s: float, mean_s: float, num_running: int, now: float) -> None:
        """One was answered to its end."""
        self._share_cut -= _SHARE_STEP * self._share_cut
        slower_s = max(0.0, held_s - self._quick_s)
        self._quick_s = min(self._quick_s, held_s) + _QUICK_STEP * slower_s
        self._num_ended = self._ended(now, mean_s) + 1.0
        self._ended_at = now
        if held_s > max(_CLOSING_PART * given_s, _FAR_MORE * self._quick_s):
            self._limit = max(_FEWEST, self._limit - _STEP)
        elif (
            held_s < max(_OPENING_PART * given_s, _LITTLE_MORE * self._quick_s)
            and num_running + 1.0 >= self._limit
        ):
            self._limit += _STEP

    def cut_off(self, held_s: float, given_s: float, mean_s: float, num_running: int, now: float) -> None:
        """The time of one was over before its answer was whole."""
        if held_s <= _FAR_MORE * self._quick_s:
            return
        self._share_cut += _SHARE_STEP * (1.0 - self._share_cut)
        if self._share_cut < _MANY or now < self._cut_at + given_s:
            return
        self._cut_at = now
        ends_per_s = self._ended(now, mean_s) / max(1.0, mean_s)
        in_time = _FALL_TO_PART * given_s * ends_per_s
        self._limit = max(_FEWEST, min(self._limit, num_running, max(in_time, num_running / _LARGEST_FALL)))

    def _ended(self, now: float, mean_s: float) -> float:
        """Answers of late, those of more than a service time ago for less and less."""
        return self._num_ended * math.exp(-(now - self._ended_at) / max(1.0, mean_s))
