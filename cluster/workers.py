"""A worker of either role: engine + policy. Owns choosing the class by role and nothing else."""

from __future__ import annotations

from typing import Protocol

import decode_worker.service
import prefill_worker.service
from cluster.config import BatonConfig
from core.clock import Clock
from core.ids import Role, WorkerRef
from core.peer_security import PeerSecurity
from decode_worker.worker import DecodeWorker
from engine.runner import ModelRunner
from engine.step import StepLimits
from kv_transfer.transport import Connect
from prefill_worker.worker import PrefillWorker

AnyWorker = PrefillWorker | DecodeWorker


class GrpcServer(Protocol):
    async def stop(self, grace: float | None) -> None: ...


def load_runner(config: BatonConfig, role: Role) -> ModelRunner:
    """The engine of a worker of `role`, loaded and warmed up. Takes seconds."""
    runner = ModelRunner.load(config.engine_of(role), limits=step_limits(config, role))
    runner.warm_up()
    return runner


def step_limits(config: BatonConfig, role: Role) -> StepLimits:
    """The largest step that the scheduler of `role` makes."""
    if role is Role.PREFILL:
        return StepLimits(config.prefill.token_budget, config.prefill.max_num_seqs, is_decoding=False)
    return StepLimits(config.decode.token_budget, config.decode.max_num_seqs)


def build_worker(
    runner: ModelRunner, config: BatonConfig, ref: WorkerRef, clock: Clock, connect: Connect
) -> AnyWorker:
    """Put the worker of `ref.role` around the engine; starting it is the caller's."""
    if ref.role is Role.PREFILL:
        return PrefillWorker(runner, config.prefill, ref, clock, connect)
    return DecodeWorker(runner, config.decode, ref, clock)


async def serve_worker(worker: AnyWorker, host: str, security: PeerSecurity) -> tuple[GrpcServer, int]:
    """Listen on a free port of `host` for those whom `security` admits; returns the server and the port."""
    if isinstance(worker, PrefillWorker):
        return await prefill_worker.service.serve(worker, host, security)
    return await decode_worker.service.serve(worker, host, security)
