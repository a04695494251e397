"""WorkerShell: the Ray Serve replica in which a worker runs.

Owns what only exists because of Serve: a name taken from the replica, the health check, drain in the
destructor. All three run on the replica's main loop; the work is done by `worker_host`.
"""

from __future__ import annotations

import ray
from ray import serve

from cluster.autoscaler.stats import Stats
from cluster.config import BatonConfig
from cluster.logs import configure_logging
from cluster.registry import RegistryClient, RegistryHerald
from cluster.security import peer_security
from cluster.zone import zone_of
from core.ids import Role, WorkerId
from core.peer_security import ClusterToken

_LOOPBACK = "127.0.0.1"


class WorkerShell:
    """One worker process of the pool `role`."""

    def __init__(self, config: BatonConfig, role: Role, token: ClusterToken | None) -> None:
        # Imported here: the process that deploys and the router's have no use for torch.
        from cluster.worker_host import WorkerHost

        configure_logging(config.logging)
        replica = serve.get_replica_context().replica_id
        self._drain_timeout_s = config.cluster.drain_timeout_s
        self._host = WorkerHost(
            config,
            role,
            WorkerId(f"{role.value}-{replica.unique_id}"),
            host=_LOOPBACK if config.cluster.is_own else ray.util.get_node_ip_address(),
            herald=RegistryHerald(RegistryClient()),
            security=peer_security(config.security, token),
            zone=zone_of(ray.get_runtime_context().get_node_labels()),
        )

    def check_health(self) -> None:
        self._host.check_health()

    def record_autoscaling_stats(self) -> Stats:
        """Serve asks each second and takes it to the autoscaler."""
        return self._host.stats()

    async def __del__(self) -> None:
        """Serve calls it when the replica stops, within graceful_shutdown_timeout_s."""
        host = self.__dict__.pop("_host", None)
        if host is not None:
            await host.stop(self._drain_timeout_s)
