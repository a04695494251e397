"""Stop strings are found wherever token borders fall."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stops import StopMatch, StopMatcher, StopStrings

_letters = st.text("ab", max_size=24)
_stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def _first_completed(text: str, stops: list[str]) -> StopMatch | None:
    """The slow truth: the match with the smallest end, of these the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return StopMatch(end - max(map(len, ending)), end)
    return None


@given(_letters, _stops, st.lists(st.integers(1, 4), min_size=1))
def test_the_match_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    found, position, turn = None, 0, 0
    while found is None and position < len(text):
        size = sizes[turn % len(sizes)]
        found = matcher.feed(text[position : position + size])
        position += size
        turn += 1
    assert found == _first_completed(text, stops)


@given(_letters, _stops)
def test_what_is_held_is_the_longest_ending_that_may_still_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    if matcher.feed(text) is None:
        candidates = [
            size
            for size in range(1, len(text) + 1)
            if any(size < len(stop) and stop.startswith(text[-size:]) for stop in stops)
        ]
        assert matcher.num_held == max(candidates, default=0)


def test_an_unarmed_match_does_not_count_but_its_end_may_begin_another() -> None:
    matcher = StopMatcher(StopStrings(["aba"]))
    assert matcher.feed("aba", is_armed=False) is None
    assert matcher.num_held == 1
    assert matcher.feed("ba", is_armed=True) == StopMatch(2, 5)


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher(StopStrings([]))
    assert matcher.feed("anything") is None
    assert matcher.num_held == 0
