"""The Serve application: the router as ingress, one deployment (home pool) for each kind of worker.

Owns replica counts, Serve's health and shutdown settings and what a replica asks of Ray. Pure construction.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from cluster.autoscaler.config import AutoscalingConfig
from cluster.config import BatonConfig, ClusterConfig
from cluster.router_shell import RouterShell
from cluster.worker_shell import WorkerShell
from core.ids import Role
from core.peer_security import ClusterToken

ROUTER = "router"
# replicas are asked for their numbers once in a fifth of it
_LOOK_BACK_S = 5.0
_REPORT_PERIOD_S = 1.0
# a stopping replica first drains, then takes its server and threads down; Serve kills it after both
_TAKE_DOWN_S = 10.0
# Serve replaces a replica that is there but leaves three checks unanswered; a dead one is noticed at once
_HEALTH_TIMEOUT_S = 10.0
# each open stream is an ongoing request, and so are /health and /metrics
_MAX_ONGOING_REQUESTS = 100_000


def build_application(config: BatonConfig, token: ClusterToken | None) -> serve.Application:
    """The whole graph; Serve starts its deployments side by side. `token` goes to each replica."""
    cluster = config.cluster
    pools = []
    for role, count in (
        (Role.PREFILL, cluster.num_prefill_workers),
        (Role.DECODE, cluster.num_decode_workers),
    ):
        replicas = worker_replicas(config.autoscaling, role, count)
        if replicas:
            pool = _deployment(WorkerShell, role.value, replicas, cluster, _worker_actor(cluster, role))
            pools.append(pool.bind(config, role, token))
    routers: int | dict[str, Any] = cluster.num_routers
    if config.autoscaling.is_enabled:
        # bounds that leave no choice: only so does Serve ask them for their numbers, too
        routers = _between(cluster.num_routers, cluster.num_routers, cluster.num_routers)
    router = _deployment(RouterShell, ROUTER, routers, cluster, {"num_cpus": 0})
    return router.bind(config, token, *pools)


def worker_replicas(scaling: AutoscalingConfig, role: Role, count: int) -> int | dict[str, Any]:
    """What Serve is told of a pool's size: `count`, or the bounds between which the policy moves it."""
    if not scaling.is_enabled:
        return count
    return _between(scaling.min_workers(role), scaling.within(role, count), scaling.most_workers(role))


def _between(least: int, first: int, most: int) -> dict[str, Any]:
    """All patience and smoothing is the policy's: Serve applies what it is told, at once."""
    return {
        "min_replicas": least,
        "initial_replicas": first,
        "max_replicas": most,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "downscale_to_zero_delay_s": 0,
        "upscaling_factor": 1.0,
        "downscaling_factor": 1.0,
        "look_back_period_s": _LOOK_BACK_S,
        "metrics_interval_s": _REPORT_PERIOD_S,
    }


def _deployment(
    shell: type, name: str, replicas: int | dict[str, Any], cluster: ClusterConfig, actor: dict[str, Any]
) -> serve.Deployment:
    size: dict[str, Any] = {"num_replicas": replicas}
    if isinstance(replicas, dict):
        size = {"autoscaling_config": replicas}
    decorate = serve.deployment(
        name=name,
        **size,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=cluster.health_period_s,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=cluster.drain_timeout_s + _TAKE_DOWN_S,
        ray_actor_options=actor,
        logging_config={"enable_access_log": False},  # a line for each request, health check and scrape
    )
    deployment: serve.Deployment = decorate(shell)
    return deployment


def _worker_actor(cluster: ClusterConfig, role: Role) -> dict[str, Any]:
    resource = cluster.prefill_resource if role is Role.PREFILL else cluster.decode_resource
    own = {} if resource is None else {"resources": {resource: 1.0}}
    return {"num_cpus": cluster.worker_num_cpus, "num_gpus": cluster.worker_num_gpus, **own}
