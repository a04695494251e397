"""What the ends of a group tell each other: the same at both, bounded, and over when the stream is."""

from __future__ import annotations

import pytest

from kv_transfer.key_exchange import KeyExchange


def connected() -> tuple[KeyExchange, KeyExchange]:
    ends: list[KeyExchange] = []
    ends.append(KeyExchange(lambda key, value: ends[1].hear(key, value)))
    ends.append(KeyExchange(lambda key, value: ends[0].hear(key, value)))
    return ends[0], ends[1]


def test_what_one_end_sets_both_know() -> None:
    one, other = connected()
    assert not other.has("0/0")
    one.set("0/0", b"address")
    assert one.wait("0/0", 0.0) == other.wait("0/0", 0.0) == b"address"
    assert other.has("0/0")


def test_a_key_that_nobody_sets_is_waited_for_in_bounded_time_and_not_after_the_end() -> None:
    one, _ = connected()
    with pytest.raises(TimeoutError, match="0/1"):
        one.wait("0/1", 0.0)
    one.set("0/0", b"address")
    one.end()
    assert one.wait("0/0", 60.0) == b"address", "what is known stays known"
    with pytest.raises(ConnectionError):
        one.wait("0/1", 60.0)


@pytest.mark.parametrize(("num_keys", "num_bytes"), [(300, 1), (1, 1 << 17)])
def test_an_end_that_tells_more_than_a_group_needs_ends_it(num_keys: int, num_bytes: int) -> None:
    _, other = connected()
    for number in range(num_keys):
        other.hear(f"key {number}", bytes(num_bytes))
    with pytest.raises(ConnectionError):
        other.wait("another", 60.0)
