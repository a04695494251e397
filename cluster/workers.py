"""A worker of either role: engine + policy. Owns choosing the class by role and nothing else."""

from __future__ import annotations

from typing import Protocol

import decode_worker.service
import prefill_worker.service
from cluster.config import BatonConfig
from core.clock import Clock
from core.ids import Role, TenantId, WorkerRef
from core.peer_security import PeerSecurity
from decode_worker.worker import DecodeWorker
from engine.kv.shares import KVShares
from engine.runner import ModelRunner
from engine.step import StepLimits
from kv_transfer.transport import Connect
from prefill_worker.worker import PrefillWorker
from router.tenants import cache_salt_of
from router.tenants_config import ANY_TENANT, TenantsConfig

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
    runner.cache.allocator.use_shares(_shares(config.router.tenants))
    if ref.role is Role.PREFILL:
        return PrefillWorker(runner, config.prefill, ref, clock, connect)
    return DecodeWorker(runner, config.decode, ref, clock, connect=connect)


def _shares(tenants: TenantsConfig) -> KVShares:
    """By cache salt, which is what workers know tenants by."""
    return KVShares(
        {
            cache_salt_of(tenants, TenantId(limits.name)): limits.kv_share
            for limits in tenants.limits
            if limits.kv_share is not None and limits.name != ANY_TENANT
        }
    )


async def serve_worker(worker: AnyWorker, host: str, security: PeerSecurity) -> tuple[GrpcServer, int]:
    """Listen on a free port of `host` for those whom `security` admits; returns the server and the port."""
    if isinstance(worker, PrefillWorker):
        return await prefill_worker.service.serve(worker, host, security)
    return await decode_worker.service.serve(worker, host, security)
