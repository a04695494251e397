"""Shares: whose cached blocks go first when room is needed.

Owns the policy only, so that one tenant's prompts cannot push all others' prefixes out: while anybody has
more named blocks than its share of the pool, only such owners lose some, the least recently used first. An
owner is a tenant's cache salt; where there is one tenant this is plain least-recently-used. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping


class KVShares:
    """`shares`: owner → its part of the pool (0 to 1). Owners without one divide what is left equally among
    those that have blocks at present.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._shares = dict(shares or {})

    def losers(
        self, num_owned: Mapping[str, int], last_used: Mapping[str, int], num_blocks: int
    ) -> list[str]:
        """The owners of `last_used` in the order in which they lose a block: those above their share, then
        the others, each by the age of their oldest cached block. `num_owned` counts all named blocks, also
        those that are held, and what the owner that needs room is about to have; `last_used` grows with time.
        """
        if len(last_used) == 1:
            return list(last_used)
        others = [owner for owner, num in num_owned.items() if num and owner not in self._shares]
        equal = max(0.0, 1.0 - sum(self._shares.values())) / max(1, len(others))

        def order(owner: str) -> tuple[bool, int]:
            share = self._shares.get(owner, equal)
            return (num_owned.get(owner, 0) <= share * num_blocks, last_used[owner])

        return sorted(last_used, key=order)
