"""PairStatus: what a worker knows of its way to another one that it hands KV to. A value."""

from __future__ import annotations

from dataclasses import dataclass

from core.ids import Epoch, WorkerId


@dataclass(frozen=True, slots=True)
class PairStatus:
    """`transport` is the way that payloads took last, or are ready to take (empty: not known yet),
    `bytes_per_s` what it achieved lately (0: not measured). `num_bytes` are committed payload bytes by
    transport, `fallbacks` tickets whose payload went another way than was wanted, by reason.

    `is_warm`: it was made ready before a request asked for it. `problem`: why nothing can be handed over, the
    last time that was so.
    """

    worker_id: WorkerId
    epoch: Epoch
    transport: str = ""
    bytes_per_s: float = 0.0
    num_bytes: tuple[tuple[str, int], ...] = ()
    fallbacks: tuple[tuple[str, int], ...] = ()
    is_warm: bool = False
    problem: str = ""
