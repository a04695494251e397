"""Plant: a service to be scaled, in numbers: prompts are read by prefill workers, answers stream from decode.

Owns arrivals, queues, KV and the time that replicas and changes of role take; steps of a tenth of a second.
Knows nothing of rules; what it tells is what workers and routers would report.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.decide import decide
from cluster.autoscaler.decision import Decision, State
from cluster.autoscaler.load import Load, PoolCount, RouterLoad, WorkerLoad
from core.ids import Role

STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one shape, so many each second."""

    per_s: float
    num_prompt: int = 400
    num_output: int = 50


@dataclass(eq=False, slots=True)
class _Worker:
    worker_id: str
    home: Role
    role: Role
    ready_at: float
    streams: list[_Request] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Request:
    num_prompt: int
    num_left: float
    num_output: int
    num_to_read: float


class Plant:
    """`rate` tokens of prompt a second and worker; `itl_s = base + streams × each` in decode."""

    def __init__(self, config: AutoscalingConfig, num_prefill: int = 1, num_decode: int = 1, seed: int = 1):
        self.config = config
        self.now = 1000.0
        self.rate, self.base_s, self.stream_s = 1000.0, 0.02, 0.002
        self.num_kv_tokens, self.num_places = 20_000, 64
        self.startup_s = config.startup_s
        self.traffic = Traffic(0.0)
        self.state = State()
        self.decisions: list[tuple[float, Load, Decision]] = []
        self.changes: dict[Role, list[int]] = {role: [] for role in Role}
        self.num_preempted = 0
        self.num_served = 0
        self._chance = random.Random(seed)
        self._count = 0
        self._queue: deque[_Request] = deque()
        self._arrived: deque[float] = deque()
        self._target = {Role.PREFILL: num_prefill, Role.DECODE: num_decode}
        self._workers = [
            self._worker(role, self.now) for role, num in self._target.items() for _ in range(num)
        ]
        self._flips: list[tuple[float, str, Role]] = []

    def _worker(self, home: Role, ready_at: float) -> _Worker:
        self._count += 1
        return _Worker(f"{home.value}-{self._count}", home, home, ready_at)

    # ------------------------------------------------------------ time

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let it be; a decision each `period_s`."""
        end, next_at = self.now + seconds, self.now
        while self.now < end and not until():
            if self.now >= next_at - 1e-9:
                self._decide()
                next_at += self.config.period_s
            self._step()
            self.now += STEP_S

    def targets(self) -> tuple[int, int]:
        return self._target[Role.PREFILL], self._target[Role.DECODE]

    def num_working(self, role: Role) -> int:
        return len(self._working(role))

    def num_reversals(self, role: Role) -> int:
        """How often growing turned to shrinking or the other way round."""
        signs = [change > 0 for change in self.changes[role] if change]
        return sum(one is not two for one, two in pairwise(signs))

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def _decide(self) -> None:
        load = self.load()
        decision, self.state = decide(load, self.config, self.state, self.now)
        self.decisions.append((self.now, load, decision))
        for role in Role:
            wanted = decision.pool(role).num_replicas
            if wanted != self._target[role]:
                self.changes[role].append(wanted - self._target[role])
            self._set_target(role, wanted)
        for flip in decision.flips:
            self._flips.append((self.now + self.config.flip_s, flip.worker_id, flip.role))

    def _set_target(self, role: Role, wanted: int) -> None:
        home = [worker for worker in self._workers if worker.home is role]
        for _ in range(wanted - len(home)):
            self._workers.append(self._worker(role, self.now + self.startup_s))
        # those that still start go first; what streams moves to the others
        home.sort(key=lambda worker: (-worker.ready_at, worker.worker_id))
        for worker in home[: max(0, len(home) - wanted)]:
            self._workers.remove(worker)
            self._queue.extendleft(worker.streams)
        self._target[role] = wanted

    # ------------------------------------------------------------ what happens

    def _working(self, role: Role) -> list[_Worker]:
        return [worker for worker in self._workers if worker.role is role and worker.ready_at <= self.now]

    def _step(self) -> None:
        for at, worker_id, role in list(self._flips):
            if at <= self.now:
                self._flips.remove((at, worker_id, role))
                for worker in self._workers:
                    if worker.worker_id == worker_id and worker.role is not role:
                        worker.role = role
                        self._queue.extendleft(worker.streams)
                        worker.streams = []
        for _ in range(self._poisson(self.traffic.per_s * STEP_S)):
            shape = self.traffic
            self._queue.append(
                _Request(shape.num_prompt, shape.num_output, shape.num_output, shape.num_prompt)
            )
            self._arrived.append(self.now)
        while self._arrived and self._arrived[0] < self.now - self.config.window_s:
            self._arrived.popleft()
        self._read()
        for worker in self._working(Role.DECODE):
            self._stream(worker)

    def _read(self) -> None:
        decode = self._working(Role.DECODE)
        budget = self.rate * STEP_S * len(self._working(Role.PREFILL))
        while self._queue and budget > 0 and decode:
            request = self._queue[0]
            roomy = [
                worker
                for worker in decode
                if len(worker.streams) < self.num_places
                and self._held(worker) + request.num_prompt < self.num_kv_tokens
            ]
            if not roomy:
                return
            spent = min(budget, request.num_to_read)
            budget -= spent
            request.num_to_read -= spent
            if request.num_to_read <= 0:
                self._queue.popleft()
                min(roomy, key=lambda worker: len(worker.streams)).streams.append(request)

    def _stream(self, worker: _Worker) -> None:
        itl_s = self.base_s + self.stream_s * len(worker.streams)
        for request in worker.streams:
            request.num_left -= STEP_S / itl_s
        ended = [request for request in worker.streams if request.num_left <= 0]
        self.num_served += len(ended)
        worker.streams = [request for request in worker.streams if request.num_left > 0]
        while self._held(worker) > self.num_kv_tokens:
            self._queue.append(worker.streams.pop())
            self.num_preempted += 1

    @staticmethod
    def _held(worker: _Worker) -> int:
        return sum(
            request.num_prompt + request.num_output - max(0, round(request.num_left))
            for request in worker.streams
        )

    def _poisson(self, mean: float) -> int:
        count, left = 0, self._chance.expovariate(1.0) if mean > 0 else 1.0
        while left < mean:
            count += 1
            left += self._chance.expovariate(1.0)
        return count

    # ------------------------------------------------------------ what it tells

    def load(self) -> Load:
        workers = [worker for worker in self._workers if worker.ready_at <= self.now]
        per_s = len(self._arrived) / self.config.window_s
        streams = [len(worker.streams) for worker in self._working(Role.DECODE)]
        itl_s = self.base_s + self.stream_s * max(streams, default=0)
        num_to_read = sum(request.num_to_read for request in self._queue)
        router = RouterLoad(
            num_open=len(self._queue) + sum(streams),
            num_waiting=len(self._queue),
            num_waiting_tokens=round(num_to_read),
            arrivals_per_s=per_s,
            tokens_per_s=per_s * self.traffic.num_prompt,
            num_arrived=len(self._arrived),
            num_output_tokens=float(self.traffic.num_output) if self._arrived else None,
            itl_s=itl_s if any(streams) else None,
        )
        counts = {
            role: PoolCount(self._target[role], sum(worker.home is role for worker in workers))
            for role in Role
        }
        return Load(
            counts[Role.PREFILL],
            counts[Role.DECODE],
            tuple(self._reported(worker) for worker in workers),
            router,
        )

    def _reported(self, worker: _Worker) -> WorkerLoad:
        is_decode = worker.role is Role.DECODE
        return WorkerLoad(
            worker.worker_id,
            worker.home,
            worker.role,
            is_draining=False,
            is_stand_in=False,
            is_pinned=False,
            num_waiting=0,
            num_running=len(worker.streams),
            num_waiting_tokens=0,
            num_running_tokens=0,
            num_kv_tokens=self.num_kv_tokens,
            num_held_tokens=self._held(worker),
            max_num_seqs=self.num_places,
            prefill_tokens_per_s=None if is_decode else self.rate,
            step_s=self.base_s,
            step_base_s=self.base_s if is_decode else None,
            step_stream_s=self.stream_s if is_decode else None,
        )
