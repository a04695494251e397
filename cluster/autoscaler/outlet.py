"""Outlet: what decisions cause outside Serve's control loop: log lines, orders to workers, news for routers.

Owns a thread and a bounded queue to it, so that neither a slow disk nor a registry that is away holds up the
control loop. Runs in the process of Serve's controller.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decision import Flip, State
from cluster.autoscaler.decision_log import DecisionEvent, DecisionLog
from cluster.autoscaler.news import news_of
from cluster.registry import NAME, NAMESPACE
from core.errors import ServingError
from core.ids import Role, WorkerId
from core.role_change import RoleCause

_MAX_WAITING = 256
_CALL_TIMEOUT_S = 2.0

_log = logging.getLogger("ray.serve")


class Outlet:
    """`tell` may be called from any one thread; it never waits and never raises."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self._queue: queue.Queue[tuple[DecisionEvent, State] | None] = queue.Queue(_MAX_WAITING)
        self._file = None if config.log_file is None else DecisionLog(config.log_file, config)
        self._last: tuple[object, ...] | None = None
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="autoscaler outlet", daemon=True)
        self._thread.start()

    def tell(self, event: DecisionEvent, state: State) -> None:
        try:
            self._queue.put_nowait((event, state))
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join(_CALL_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, state = item
            for work in (self._say, self._write, self._order, self._publish):
                try:
                    work(event, state)
                except Exception:  # noqa: BLE001 - logged; the next decision is another chance
                    _log.exception("autoscaler: %s failed", work.__name__.strip("_"))
        if self._file is not None:
            self._file.close()

    def _say(self, event: DecisionEvent, state: State) -> None:
        """A line in Serve's log for each change."""
        pools = {role: event.decision.pool(role) for role in Role}
        facts = (
            tuple((pool.num_replicas, pool.rule) for pool in pools.values()),
            event.applied_prefill,
            event.applied_decode,
            event.decision.flips,
        )
        if facts == self._last and not self._num_lost:
            return
        self._last = facts
        applied = {Role.PREFILL: event.applied_prefill, Role.DECODE: event.applied_decode}
        for role, pool in pools.items():
            _log.info(
                "autoscaler: %s wants %d replicas, applied %d (%s: need %s, %s)",
                role.value,
                pool.num_replicas,
                applied[role],
                pool.rule.value,
                "unknown" if pool.need.num_workers is None else f"{pool.need.num_workers:.2f}",
                pool.need.cause.value,
            )
        if self._num_lost:
            _log.warning("autoscaler: %d decisions are missing in the log", self._num_lost)
            self._num_lost = 0

    def _write(self, event: DecisionEvent, state: State) -> None:
        if self._file is not None:
            self._file.write(event, state)

    def _order(self, event: DecisionEvent, state: State) -> None:
        for flip in event.decision.flips:
            self._flip(flip)

    def _flip(self, flip: Flip) -> None:
        registry: Any = ray.get_actor(NAME, NAMESPACE)
        call: Any = registry.order_role.remote(WorkerId(flip.worker_id), flip.role, RoleCause.AUTOSCALER)
        try:
            answer: object = ray.get(call, timeout=_CALL_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            _log.warning("autoscaler: %s was not told its role: %s", flip.worker_id, type(error).__name__)
            return
        if isinstance(answer, ServingError):
            _log.warning("autoscaler: %s keeps its role: %s", flip.worker_id, answer.message)

    def _publish(self, event: DecisionEvent, state: State) -> None:
        registry: Any = ray.get_actor(NAME, NAMESPACE)
        registry.note_scaling.remote(news_of(event))
