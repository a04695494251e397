"""StopMatcher: finds stop strings in a growing text, wherever token borders fall.

Owns one automaton state per stop string (Knuth, Morris, Pratt 1977), so each character is looked at once and
the answer does not depend on how the text is cut into pieces. One per sample; the automata are made once for
all samples of a call. Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string at characters `[start, end)` of the whole text."""

    start: int
    end: int


class StopStrings:
    """Stop strings and their automata. Immutable."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not hold an empty string."""
        assert all(stops)
        self.stops = tuple(stops)
        self.fallbacks = [_fallback(stop) for stop in self.stops]
        self.first_characters = frozenset(stop[0] for stop in self.stops)


class StopMatcher:
    """The match that completes first wins; of several that complete at one character, the longest."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._states = [0] * len(strings.stops)
        self._num_chars = 0

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be the start of a stop string, and must not be shown
        yet.
        """
        return max(self._states, default=0)

    def feed(self, text: str, is_armed: bool = True) -> StopMatch | None:
        """Append `text`. A match that completes while not armed does not count, its text is ordinary text."""
        strings = self._strings
        if strings.first_characters.isdisjoint(text) and not any(self._states):
            self._num_chars += len(text)
            return None
        for offset, character in enumerate(text):
            longest = 0
            for index, stop in enumerate(strings.stops):
                state = self._states[index]
                fallback = strings.fallbacks[index]
                while state and stop[state] != character:
                    state = fallback[state]
                state += stop[state] == character
                if state == len(stop):
                    longest = max(longest, state)
                    state = fallback[state]
                self._states[index] = state
            if longest and is_armed:
                end = self._num_chars + offset + 1
                return StopMatch(end - longest, end)
        self._num_chars += len(text)
        return None


def _fallback(stop: str) -> list[int]:
    """`fallback[i]`: length of the longest proper prefix of `stop` that ends `stop[:i]`."""
    fallback = [0] * (len(stop) + 1)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = fallback[length]
        length += stop[length] == stop[index]
        fallback[index + 1] = length
    return fallback
