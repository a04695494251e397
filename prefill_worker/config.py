"""PrefillConfig: the section `prefill` of the configuration. Owns its defaults; values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.config import BridgeConfig, ReceiverConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How a prefill worker schedules and hands over.

    `token_budget` tokens at most are computed in one step; a longer prompt is read in chunks of it.
    `max_num_seqs` prompts are under way at once, `max_waiting` wait at most (more are refused with
    Retry-After). The shortest is read first; `aging`: seconds of work that a second of waiting makes up for.
    The worker calls itself unhealthy when there was work but no progress for `stall_s`.
    `home_pool` and `model` are what it announces. `bridge` are the silences and sizes of the handoff.

    Blocks that a decode worker lends: `borrowing` is what this worker offers to those of its host;
    `borrowing_silence_s` after the last push or keepalive their room is given back.
    """

    token_budget: int = 512
    max_num_seqs: int = 16
    max_waiting: int = 256
    aging: float = 0.5
    stall_s: float = 60.0
    status_period_s: float = 1.0
    home_pool: str = "prefill"
    model: str = ""
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    borrowing: ReceiverConfig = field(default_factory=ReceiverConfig)
    borrowing_silence_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not self.aging >= 0:
            raise ValueError("aging must not be negative")
        for name in ("stall_s", "status_period_s", "borrowing_silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
