"""Direction: from which phase to which workers last changed, and how long that stands.

Owns the patience of a turn. Where both phases lack workers, one that has just given some away lacks most and
would take them back for ever: a turn waits, and each one that the same load brings waits twice as long as the
last. An immutable value; pure; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import Role

_MAX_DOUBLINGS = 6
# times its wait: a turn that comes later than that after the last order is another load's
_FORGIVEN = 2.0


@dataclass(frozen=True, slots=True)
class Direction:
    """Workers last changed to `to` (None: none did), at `at` for the last time, after `num_turns` turns."""

    to: Role | None = None
    at: float = 0.0
    num_turns: int = 0

    def is_against(self, role: Role, now: float, hold_s: float) -> bool:
        """Whether workers that change to `role` now would turn it too soon. `hold_s`: a first turn's wait."""
        return self.to not in (None, role) and now - self.at < self._wait_s(hold_s)

    def after(self, role: Role, now: float, hold_s: float) -> Direction:
        """Workers are ordered to change to `role`."""
        if self.to is None or now - self.at >= _FORGIVEN * self._wait_s(hold_s):
            return Direction(role, now)
        return Direction(role, now, self.num_turns + (self.to is not role))

    def _wait_s(self, hold_s: float) -> float:
        return hold_s * 2.0 ** min(self.num_turns, _MAX_DOUBLINGS)
