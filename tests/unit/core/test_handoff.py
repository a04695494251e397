"""The ticket automaton and the layout it is checked against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.handoff import TERMINAL_STATES, TicketState, may_follow, next_state
from core.kv_layout import KVLayout

LAYOUT = KVLayout("model@1", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)


def test_every_state_before_the_claim_may_abort_or_expire() -> None:
    before = [TicketState.OFFERED, TicketState.RESERVED, TicketState.SENDING, TicketState.COMMITTED]
    for state in before:
        assert may_follow(state, TicketState.ABORTED)
        assert may_follow(state, TicketState.EXPIRED)
    assert not may_follow(TicketState.CLAIMED, TicketState.ABORTED)


def test_nothing_follows_a_terminal_state() -> None:
    for state in TERMINAL_STATES:
        assert not any(may_follow(state, other) for other in TicketState)


def test_a_forbidden_transition_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="committed → sending"):
        next_state(TicketState.COMMITTED, TicketState.SENDING)


def test_the_happy_path_is_one_chain() -> None:
    chain = ["offered", "reserved", "sending", "committed", "claimed", "released"]
    state = TicketState(chain[0])
    for name in chain[1:]:
        state = next_state(state, TicketState(name))
    assert state in TERMINAL_STATES


def test_layout_bytes_and_differences() -> None:
    assert LAYOUT.bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert LAYOUT.block_bytes == LAYOUT.bytes_per_token * 16
    assert LAYOUT.num_blocks(17) == 2
    other = replace(LAYOUT, block_size=32)
    assert LAYOUT.differences(other) == ["block_size: 16 vs 32"]
    assert LAYOUT.differences(replace(LAYOUT)) == []
    assert LAYOUT.fingerprint != other.fingerprint
    assert LAYOUT.fingerprint == replace(LAYOUT).fingerprint
