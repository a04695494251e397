"""Loads in a few words, for tests of single rules."""

from __future__ import annotations

from typing import Any

from cluster.autoscaler.load import Load, PoolCount, RouterLoad, WorkerLoad
from core.ids import Role

QUIET = RouterLoad(0, 0, 0, 0.0, 0.0)


def worker(worker_id: str, role: Role, home: Role | None = None, **facts: Any) -> WorkerLoad:
    """One that does nothing, unless told otherwise; it reads 1,000 tokens a second and has 10,000 of KV."""
    settings: dict[str, Any] = {
        "is_draining": False,
        "is_stand_in": False,
        "is_pinned": False,
        "num_waiting": 0,
        "num_running": 0,
        "num_waiting_tokens": 0,
        "num_running_tokens": 0,
        "num_kv_tokens": 10_000,
        "num_held_tokens": 0,
        "max_num_seqs": 50,
        "prefill_tokens_per_s": 1000.0 if role is Role.PREFILL else None,
        "step_base_s": 0.02 if role is Role.DECODE else None,
        "step_stream_s": 0.002 if role is Role.DECODE else None,
    }
    return WorkerLoad(worker_id, home or role, role, **(settings | facts))


def load_of(*workers: WorkerLoad, router: RouterLoad | None = QUIET) -> Load:
    """Every replica that was asked for runs, and reports."""
    counts = {home: sum(item.home is home for item in workers) for home in Role}
    return Load(
        PoolCount(counts[Role.PREFILL], counts[Role.PREFILL]),
        PoolCount(counts[Role.DECODE], counts[Role.DECODE]),
        workers,
        router,
    )


def pair(router: RouterLoad | None = QUIET, **decode: Any) -> Load:
    """One of each."""
    return load_of(worker("p", Role.PREFILL), worker("d", Role.DECODE, **decode), router=router)
