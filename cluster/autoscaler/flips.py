"""Which workers change their role: those that one phase can spare go where the other one lacks some.

Owns the choice of the workers, what is remembered of their orders, and the pretence that a change under way
is done. How many is an argument. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cluster.autoscaler.decision import Flip, FlipOrder
from cluster.autoscaler.load import Load, WorkerLoad
from core.ids import Role

# an order that nobody has followed for so long is void
_VOID_AFTER_S = 20.0


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def remembered(orders: tuple[FlipOrder, ...], load: Load, now: float, hold_s: float) -> tuple[FlipOrder, ...]:
    """As the workers' reports have them now, without those that are no longer under way and older than
    `hold_s`.
    """
    workers = {worker.worker_id: worker for worker in load.workers}
    brought = [_brought(order, workers.get(order.flip.worker_id), now) for order in orders]
    return tuple(order for order in brought if now - order.at < hold_s or is_under_way(order, now))


def is_under_way(order: FlipOrder, now: float) -> bool:
    """A worker that says nothing is between two roles, or lost: the order's age tells."""
    return not order.is_done and now - order.at < _VOID_AFTER_S


def as_if_done(orders: tuple[FlipOrder, ...], load: Load) -> Load:
    """The load with every change of role carried out. Whoever is between two roles says nothing, and counts
    as one that has nothing to do.
    """
    roles = {order.flip.worker_id: order.flip.role for order in orders}
    workers = tuple(replace(worker, role=roles.get(worker.worker_id, worker.role)) for worker in load.workers)
    reported = {worker.worker_id for worker in workers}
    between = tuple(_idle(order) for order in orders if order.flip.worker_id not in reported)
    return replace(load, workers=workers + between)


def ordered(flips: tuple[Flip, ...], load: Load, now: float) -> tuple[FlipOrder, ...]:
    """Of workers that report."""
    homes = {worker.worker_id: worker.home for worker in load.workers}
    return tuple(FlipOrder(flip, homes[flip.worker_id], now) for flip in flips)


def choose(
    load: Load, to: Role, num: int, held: Collection[str] = (), is_home_only: bool = False
) -> tuple[Flip, ...]:
    """`num` workers at most that go to the role `to`, none that is `held`: first those at home there, then
    the least busy.
    """
    able = [
        worker
        for worker in load.of_role(other(to))
        if not worker.is_pinned and not worker.is_stand_in and worker.worker_id not in held
        if worker.home is to or not is_home_only
    ]
    able.sort(key=lambda worker: _reluctance(worker, to))
    return tuple(Flip(worker.worker_id, to) for worker in able[: max(0, num)])


def _reluctance(worker: WorkerLoad, to: Role) -> tuple[bool, int, int, str]:
    num_tokens = worker.num_waiting_tokens + worker.num_running_tokens
    return (worker.home is not to, worker.num_running + worker.num_waiting, num_tokens, worker.worker_id)


def _brought(order: FlipOrder, worker: WorkerLoad | None, now: float) -> FlipOrder:
    """With what the worker reports now, if it does."""
    if worker is None or order.is_done:
        return order
    if worker.role is order.flip.role:
        return replace(order, at=now, is_done=True)
    return replace(order, at=now) if worker.is_draining else order


def _idle(order: FlipOrder) -> WorkerLoad:
    return WorkerLoad(
        order.flip.worker_id,
        order.home,
        order.flip.role,
        is_draining=False,
        is_stand_in=False,
        is_pinned=False,
        num_waiting=0,
        num_running=0,
        num_waiting_tokens=0,
        num_running_tokens=0,
        num_kv_tokens=0,
        num_held_tokens=0,
        max_num_seqs=0,
    )
