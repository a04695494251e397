"""The Serve application: the router as ingress, one deployment (home pool) for each kind of worker.

Owns replica counts, Serve's health and shutdown settings and what a replica asks of Ray. Pure construction.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from cluster.config import BatonConfig, ClusterConfig
from cluster.router_shell import RouterShell
from cluster.worker_shell import WorkerShell
from core.ids import Role
from core.peer_security import ClusterToken

# a stopping replica first drains, then takes its server and threads down; Serve kills it after both
_TAKE_DOWN_S = 10.0
# Serve replaces a replica that is there but leaves three checks unanswered; a dead one is noticed at once
_HEALTH_TIMEOUT_S = 10.0
# each open stream is an ongoing request, and so are /health and /metrics
_MAX_ONGOING_REQUESTS = 100_000


def build_application(config: BatonConfig, token: ClusterToken | None) -> serve.Application:
    """The whole graph; Serve starts its deployments side by side. `token` goes to each replica."""
    cluster = config.cluster
    pools = [
        _deployment(WorkerShell, role.value, count, cluster, _worker_actor(cluster)).bind(config, role, token)
        for role, count in (
            (Role.PREFILL, cluster.num_prefill_workers),
            (Role.DECODE, cluster.num_decode_workers),
        )
        if count
    ]
    router = _deployment(RouterShell, "router", cluster.num_routers, cluster, {"num_cpus": 0})
    return router.bind(config, token, *pools)


def _deployment(
    shell: type, name: str, num_replicas: int, cluster: ClusterConfig, actor: dict[str, Any]
) -> serve.Deployment:
    decorate = serve.deployment(
        name=name,
        num_replicas=num_replicas,
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


def _worker_actor(cluster: ClusterConfig) -> dict[str, Any]:
    return {"num_cpus": cluster.worker_num_cpus, "num_gpus": cluster.worker_num_gpus}
