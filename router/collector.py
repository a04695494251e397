"""How often a router's process looks for garbage in cycles.

A placement makes some hundred objects that live for a millisecond and die by their count. At Python's own
threshold of 700 the collector runs at every second one, now and then through all that is alive, and whoever
is placed then waits for it. Process-wide: for processes that do nothing but route.
"""

from __future__ import annotations

import gc

_THRESHOLDS = (10_000, 10, 10)


def collect_less_often() -> None:
    """Cycles are found all the same, some fourteen times less often."""
    gc.set_threshold(*_THRESHOLDS)
