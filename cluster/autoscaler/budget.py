"""How two pools share what they may have together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from core.ids import Role

# a division stands until another one relieves the pool that lacks most by so much
_WORTH_MOVING = 1.25


def divide(
    wanted: Mapping[Role, int],
    needs: Mapping[Role, float],
    least: Mapping[Role, int],
    present: Mapping[Role, int],
    budget: int,
) -> dict[Role, int]:
    """Workers by role, `budget` at most, if both together want more than that.

    One after the other goes to the pool that lacks most, measured by need per worker; nobody gets more than
    wanted, or less than `least` as far as that goes. A present division that is nearly as good stays.
    """
    if sum(wanted.values()) <= budget:
        return dict(wanted)
    given = {role: min(least[role], wanted[role]) for role in Role}
    while sum(given.values()) < budget:
        short = [role for role in Role if given[role] < wanted[role]]
        role = max(short, key=lambda role: (needs[role] / max(given[role], 1e-6), role is Role.DECODE))
        given[role] += 1
    is_possible = sum(present.values()) == budget and all(
        least[role] <= present[role] <= wanted[role] for role in Role
    )
    if is_possible and _worst(needs, present) <= _WORTH_MOVING * _worst(needs, given):
        return dict(present)
    return given


def _worst(needs: Mapping[Role, float], given: Mapping[Role, int]) -> float:
    return max(needs[role] / max(given[role], 1e-6) for role in Role)
