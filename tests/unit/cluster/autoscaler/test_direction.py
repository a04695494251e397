"""The patience of a turn: workers that went to one phase do not come back at once, and ever later."""

from __future__ import annotations

from cluster.autoscaler.direction import Direction
from core.ids import Role

HOLD_S = 30.0


def test_the_first_order_waits_for_nothing_and_neither_does_another_of_its_kind() -> None:
    none = Direction()
    assert not any(none.is_against(role, 0.0, HOLD_S) for role in Role)
    one = none.after(Role.PREFILL, 5.0, HOLD_S)
    assert not one.is_against(Role.PREFILL, 6.0, HOLD_S)
    assert one.is_against(Role.DECODE, 34.9, HOLD_S)
    assert not one.is_against(Role.DECODE, 35.0, HOLD_S)


def test_each_turn_waits_twice_as_long_as_the_last() -> None:
    direction, now, waits = Direction().after(Role.PREFILL, 0.0, HOLD_S), 0.0, []
    for role in (Role.DECODE, Role.PREFILL, Role.DECODE):
        began_at = now
        while direction.is_against(role, now, HOLD_S):
            now += 1.0
        waits.append(now - began_at)
        direction = direction.after(role, now, HOLD_S)
    assert waits == [30.0, 60.0, 120.0]


def test_a_turn_that_comes_much_later_is_forgiven() -> None:
    turned = Direction().after(Role.PREFILL, 0.0, HOLD_S).after(Role.DECODE, 30.0, HOLD_S)
    assert turned.is_against(Role.PREFILL, 89.0, HOLD_S)
    later = turned.after(Role.PREFILL, 150.0, HOLD_S)
    assert not later.is_against(Role.DECODE, 180.0, HOLD_S)
