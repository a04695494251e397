"""Which workers change their role: those that one phase can spare go where the other one lacks some.

Owns the choice of the workers and the pretence that a change under way is done. How many is an argument.
Pure.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.autoscaler.decision import Flip, FlipUnderWay
from cluster.autoscaler.load import Load, WorkerLoad
from core.ids import Role

# an order that nobody has followed for so long is void
_VOID_AFTER_S = 20.0


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def under_way(flips: tuple[FlipUnderWay, ...], load: Load, now: float) -> tuple[FlipUnderWay, ...]:
    """Those that the worker has not yet reported."""
    roles = {worker.worker_id: worker.role for worker in load.workers}
    return tuple(
        pending
        for pending in flips
        if now - pending.ordered_at < _VOID_AFTER_S
        and roles.get(pending.flip.worker_id, pending.flip.role) is not pending.flip.role
    )


def as_if_done(flips: tuple[Flip, ...], load: Load) -> Load:
    """The load with every change of role carried out."""
    roles = {flip.worker_id: flip.role for flip in flips}
    workers = tuple(replace(worker, role=roles.get(worker.worker_id, worker.role)) for worker in load.workers)
    return replace(load, workers=workers)


def choose(load: Load, to: Role, num: int, is_home_only: bool = False) -> tuple[Flip, ...]:
    """`num` workers at most that go to the role `to`: first those at home there, then the least busy."""
    able = [
        worker
        for worker in load.of_role(other(to))
        if not worker.is_pinned and not worker.is_stand_in and (worker.home is to or not is_home_only)
    ]
    able.sort(key=lambda worker: _reluctance(worker, to))
    return tuple(Flip(worker.worker_id, to) for worker in able[: max(0, num)])


def _reluctance(worker: WorkerLoad, to: Role) -> tuple[bool, int, int, str]:
    num_tokens = worker.num_waiting_tokens + worker.num_running_tokens
    return (worker.home is not to, worker.num_running + worker.num_waiting, num_tokens, worker.worker_id)
