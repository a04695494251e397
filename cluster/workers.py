"""A worker of either role: engine + policy. Owns choosing the class by role and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import BatonConfig
from cluster.role_series import RoleSeries
from core.awake import Awake
from core.clock import Clock
from core.ids import Role, TenantId, WorkerRef
from decode_worker.worker import DecodeWorker
from engine.kv.shares import KVShares
from engine.runner import ModelRunner
from engine.step import StepLimits
from engine.step_thread import NewSteps, StepThread
from kv_transfer.feed import Feed
from kv_transfer.transport import Connect
from prefill_worker.worker import PrefillWorker
from router.tenants import cache_salt_of
from router.tenants_config import ANY_TENANT, TenantsConfig

AnyWorker = PrefillWorker | DecodeWorker


def load_runner(config: BatonConfig, role: Role) -> ModelRunner:
    """The engine of a worker whose home is `role`, loaded and warmed up. Takes seconds."""
    runner = ModelRunner.load(config.engine_of(role), limits=step_limits(config))
    runner.warm_up()
    return runner


def step_limits(config: BatonConfig) -> StepLimits:
    """The largest step that either role's scheduler makes: each worker may have to run both."""
    prefill, decode = config.prefill, config.decode
    return StepLimits(
        max(prefill.token_budget, decode.token_budget), max(prefill.max_num_seqs, decode.max_num_seqs)
    )


def share_pool(runner: ModelRunner, config: BatonConfig) -> None:
    """Divide the pool between tenants, as configured; before the first worker runs on it."""
    runner.cache.allocator.use_shares(_shares(config.router.tenants))


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a worker of one role leaves to the next one of the same process: feed, counters, when the process
    was stopped, and how it makes its step thread.
    """

    feed: Feed
    series: RoleSeries
    awake: Awake
    new_steps: NewSteps = StepThread


def build_worker(
    runner: ModelRunner, config: BatonConfig, ref: WorkerRef, clock: Clock, connect: Connect, lasting: Lasting
) -> AnyWorker:
    """The worker of `ref.role` around the engine; starting it is the caller's."""
    feed, series, steps, awake = lasting.feed, lasting.series, lasting.new_steps, lasting.awake
    if ref.role is Role.PREFILL:
        return PrefillWorker(runner, config.prefill, ref, clock, connect, steps, feed, series.prefill, awake)
    return DecodeWorker(runner, config.decode, ref, clock, steps, connect, feed, series.decode, awake)


def _shares(tenants: TenantsConfig) -> KVShares:
    """By cache salt, which is what workers know tenants by."""
    return KVShares(
        {
            cache_salt_of(tenants, TenantId(limits.name)): limits.kv_share
            for limits in tenants.limits
            if limits.kv_share is not None and limits.name != ANY_TENANT
        }
    )
