"""DecodeConfig: the limits and times of one decode worker.

Values only, no behaviour beyond refusing impossible combinations. Read on the step thread and on the IO loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.config import BridgeConfig, ReceiverConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Settings of section `decode`.

    `token_budget`: tokens computed in one step at most. `prefill_chunk`: of these, tokens of local prefills
    while streams run beside them, the price that the streams pay per step (idle, a prefill may take the
    whole budget). `watermark`: share of the pool that a newcomer leaves free for the growth of those who
    run. `max_waiting`: sequences in the queue before newcomers are refused.

    `reservation_silence_s`: a reservation lives that long after the last push or keepalive.
    `commit_claim_s`: a committed ticket waits that long for its Generate. `ticket_wait_s`: a Generate waits
    that long for Offer or Commit without seeing a push, then prefills here. `tombstone_s`: how long an
    ended ticket is remembered at least.

    `bridge` is what the worker offers to prefill workers of its host, `lending` the silences and sizes of
    what it sends to them from its cache.

    `detach_grace_s`: a stream without consumers runs on that long, so that a repeated call can attach.
    `replay_s`: an ended stream can be replayed that long, as long as no more than `max_ended_events` are
    kept. `stall_s`: work, but no step finished for that long, means unhealthy. `home_pool` and `model` are
    what the worker announces.
    """

    max_num_seqs: int = 64
    token_budget: int = 512
    prefill_chunk: int = 64
    max_waiting: int = 256
    watermark: float = 0.02
    reservation_silence_s: float = 5.0
    commit_claim_s: float = 2.0
    ticket_wait_s: float = 3.0
    tombstone_s: float = 60.0
    max_tombstones: int = 4096
    detach_grace_s: float = 0.5
    replay_s: float = 10.0
    max_ended_events: int = 65_536
    status_period_s: float = 1.0
    stall_s: float = 60.0
    home_pool: str = "decode"
    model: str = ""
    bridge: ReceiverConfig = field(default_factory=ReceiverConfig)
    lending: BridgeConfig = field(default_factory=BridgeConfig)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in _TIMES:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        if self.token_budget < self.max_num_seqs:
            raise ValueError("token_budget must be at least max_num_seqs: each stream takes one token a step")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError("watermark must lie in [0, 1)")
        if self.detach_grace_s < 0 or self.replay_s < 0:
            raise ValueError("detach_grace_s and replay_s must not be negative")


_COUNTS = (
    "max_num_seqs",
    "token_budget",
    "prefill_chunk",
    "max_waiting",
    "max_tombstones",
    "max_ended_events",
)
_TIMES = (
    "reservation_silence_s",
    "commit_claim_s",
    "ticket_wait_s",
    "tombstone_s",
    "status_period_s",
    "stall_s",
)
