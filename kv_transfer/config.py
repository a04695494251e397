"""BridgeConfig: sizes and silences of the bridge's sending side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """How much is sent at once, and how long decode may be silent.

    `silence_s` is how long decode may not be heard before a transfer is given up; `keepalive_s` must be well
    below it.

    `frame_bytes` is the payload that consecutive blocks are packed to (a single larger block still travels),
    `max_bytes_in_flight` the payload of one ticket that is sent but not acknowledged.
    """

    frame_bytes: int = 1 << 20
    max_bytes_in_flight: int = 8 << 20
    keepalive_s: float = 1.0
    silence_s: float = 5.0
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 0.5
    abort_s: float = 2.0
    idle_connection_s: float = 60.0

    def __post_init__(self) -> None:
        if min(self.frame_bytes, self.max_bytes_in_flight) < 1:
            raise ValueError("frame_bytes and max_bytes_in_flight must be positive")
        if not 0 < self.keepalive_s < self.silence_s:
            raise ValueError("keepalive_s must be positive and below silence_s")
        if not 0 < self.reconnect_min_s <= self.reconnect_max_s:
            raise ValueError("reconnect_min_s must be positive and at most reconnect_max_s")
        if self.abort_s <= 0 or self.idle_connection_s <= 0:
            raise ValueError("abort_s and idle_connection_s must be positive")
