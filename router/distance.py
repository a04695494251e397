"""Distance: what a handoff between two workers is assumed to cost until that pair has measured it.

Owns the steps of nearness: one node, one zone, further. Pure.
"""

from __future__ import annotations

from typing import Protocol

from router.config import RouterConfig
from router.decision import Candidate
from router.speeds import Handoff


class Located(Protocol):
    """Whatever is known by where it runs."""

    @property
    def node(self) -> str: ...

    @property
    def zone(self) -> str: ...


class Distances:
    """By `config`; of a pair that has handed over before, what it measured counts instead."""

    def __init__(self, config: RouterConfig) -> None:
        fixed = config.assumed_handoff_ms
        self._node = Handoff(fixed, 1e3 / config.assumed_bytes_per_s)
        self._zone = Handoff(fixed, 1e3 / config.assumed_node_bytes_per_s)
        self._far = Handoff(fixed + config.assumed_zone_ms, 1e3 / config.assumed_zone_bytes_per_s)

    def handoff(self, source: Candidate, target: Candidate) -> Handoff:
        """From `source` to `target`."""
        measured = source.handoffs.get(target.ref.worker_id)
        return self.assumed(source, target) if measured is None else measured

    def assumed(self, source: Located, target: Located) -> Handoff:
        """The same where that pair has measured nothing."""
        if source.node == target.node:
            return self._node
        return self._zone if source.zone == target.zone else self._far
