"""What workers and routers report to Serve's controller, as the numbers by name that Serve can carry.

Owns the names and both directions. A name that is missing is unknown. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.autoscaler.load import WorkerLoad
from core.ids import Role
from core.role_change import RoleCause
from core.worker_status import Announcement, WorkerStatus

Stats = dict[str, float]

_ROLES = (Role.PREFILL, Role.DECODE)
_COUNTS = ("num_waiting", "num_running", "num_waiting_tokens", "num_running_tokens", "max_num_seqs")


def worker_stats(status: WorkerStatus | None, line: Announcement) -> Stats:
    """Of a worker; nothing before its first status."""
    if status is None:
        return {}
    num_slots = line.layout.block_size
    stats = {name: float(getattr(status, name)) for name in _COUNTS} | {
        "role": float(_ROLES.index(line.ref.role)),
        "is_draining": float(status.is_draining),
        "is_stand_in": float(line.is_stand_in),
        "is_pinned": float(line.cause is RoleCause.OPERATOR),
        "num_kv_tokens": float(num_slots * status.num_blocks),
        "num_held_tokens": float(num_slots * (status.num_held_blocks + status.num_quarantined_blocks)),
    }
    measured = {
        "prefill_tokens_per_s": status.prefill_tokens_per_s,
        "step_s": status.step_s,
        "step_base_s": status.alone.decode_s or status.beside.decode_s,
        "step_stream_s": status.alone.stream_s or status.beside.stream_s,
    }
    return stats | {name: value for name, value in measured.items() if value > 0}


def worker_load(worker_id: str, home: Role, stats: Mapping[str, float]) -> WorkerLoad | None:
    """What was reported; None if that is not all that a worker has to say."""
    try:
        counts = {name: round(stats[name]) for name in (*_COUNTS, "num_kv_tokens", "num_held_tokens")}
        return WorkerLoad(
            worker_id,
            home,
            _ROLES[round(stats["role"])],
            is_draining=stats["is_draining"] > 0,
            is_stand_in=stats["is_stand_in"] > 0,
            is_pinned=stats["is_pinned"] > 0,
            prefill_tokens_per_s=stats.get("prefill_tokens_per_s"),
            step_s=stats.get("step_s"),
            step_base_s=stats.get("step_base_s"),
            step_stream_s=stats.get("step_stream_s"),
            **counts,
        )
    except (KeyError, IndexError):
        return None
