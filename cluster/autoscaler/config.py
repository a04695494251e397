"""AutoscalingConfig: the section `autoscaling` of the configuration. Owns its defaults and limits; values
only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from core.ids import Role


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    """Between which numbers the two pools may move, and what moves them. Off unless `is_enabled`.

    `min_*` and `max_*` bound each pool; a minimum of 0 lets it go away when nothing was asked for
    `idle_delay_s`, and the next request wakes it. `max_workers` and `max_gpus` bound both pools together
    (None: only by their own maxima).

    `target_ttft_s`: within which a prompt should be waited for and read. `target_itl_s`: between two tokens
    of a stream. A target that even one request alone does not reach moves nothing. `target_utilization` of a
    prefill worker's rate and of a decode worker's places, and `target_kv_utilization` of its KV blocks, are
    meant to be used.

    `startup_s`: until a replica that is asked for serves; demand is looked ahead that far. `flip_s`: the same
    for a worker that changes its role; `can_flip`: whether workers may. One that changed its role does not
    change it back for `flip_back_delay_s`, unless nobody else runs that phase.

    More workers come when the need has lasted for `scale_up_delay_s`; fewer are kept when, for all of
    `scale_down_delay_s`, those that are left would have `scale_down_margin` to spare. `window_s`: over which
    rates are measured; `stale_s`: after which silence means unknown.

    Each decision, one every `period_s`, is a line of `log_file`, on the host of Serve's controller (None:
    no file). Of `num_log_files` files none grows beyond `max_log_bytes`.
    """

    is_enabled: bool = False
    min_prefill_workers: int = 1
    max_prefill_workers: int = 4
    min_decode_workers: int = 1
    max_decode_workers: int = 4
    max_workers: int | None = None
    max_gpus: float | None = None

    target_ttft_s: float = 1.0
    target_itl_s: float = 0.1
    target_utilization: float = 0.8
    target_kv_utilization: float = 0.75

    startup_s: float = 30.0
    flip_s: float = 1.0
    can_flip: bool = True
    flip_back_delay_s: float = 30.0

    period_s: float = 1.0
    scale_up_delay_s: float = 3.0
    scale_down_delay_s: float = 120.0
    scale_down_margin: float = 0.2
    idle_delay_s: float = 300.0
    window_s: float = 10.0
    stale_s: float = 5.0

    log_file: Path | None = None
    max_log_bytes: int = 16 * 2**20
    num_log_files: int = 4

    def __post_init__(self) -> None:
        for pool in ("prefill", "decode"):
            low, high = getattr(self, f"min_{pool}_workers"), getattr(self, f"max_{pool}_workers")
            if low < 0:
                raise ValueError(f"min_{pool}_workers must not be negative")
            if high < max(1, low):
                raise ValueError(f"max_{pool}_workers must be at least 1 and min_{pool}_workers ({low})")
        if self.max_workers is not None and self.max_workers < self.num_least:
            raise ValueError(f"max_workers must be at least {self.num_least}, what the pools need at least")
        if self.max_gpus is not None and not self.max_gpus > 0:
            raise ValueError("max_gpus must be above 0")
        for name in (
            *("target_ttft_s", "target_itl_s", "startup_s", "flip_s", "period_s", "scale_down_delay_s"),
            *("idle_delay_s", "window_s", "stale_s"),
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0")
        for name in ("target_utilization", "target_kv_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        for name in ("scale_up_delay_s", "scale_down_margin", "flip_back_delay_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative")
        if self.stale_s < 2 * self.period_s:
            raise ValueError("stale_s must be at least twice period_s, or each gap would look like silence")
        if self.max_log_bytes < 2**16 or self.num_log_files < 1:
            raise ValueError("max_log_bytes must be at least 65536, num_log_files at least 1")

    @property
    def num_least(self) -> int:
        """What both pools need together, without which nothing is answered."""
        return max(1, self.min_decode_workers) + self.min_prefill_workers

    def min_workers(self, role: Role) -> int:
        return self.min_prefill_workers if role is Role.PREFILL else self.min_decode_workers

    def most_workers(self, role: Role) -> int:
        return self.max_prefill_workers if role is Role.PREFILL else self.max_decode_workers

    def within(self, role: Role, num_workers: int) -> int:
        """`num_workers`, or the bound of the pool of `role` that it exceeds."""
        return max(self.min_workers(role), min(self.most_workers(role), num_workers))

    def budget(self, gpus_per_worker: float) -> int | None:
        """Workers that both pools may have together; None: no bound beside their own."""
        bounds = [] if self.max_workers is None else [self.max_workers]
        if self.max_gpus is not None and gpus_per_worker > 0:
            bounds.append(math.floor(self.max_gpus / gpus_per_worker + 1e-9))
        return min(bounds) if bounds else None
