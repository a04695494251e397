"""ClusterRoleDesk: a router's way to change roles: the registry decides, the worker is told over gRPC.

Owns telling the worker at once, instead of with its next announcement. Coroutines run on the router's loop.
"""

from __future__ import annotations

from cluster.registry import RegistryClient, RegistryRoles
from core.peer_security import PeerSecurity
from core.role_change import RoleChange, RoleOrder
from router.worker_clients import GrpcWorker


class ClusterRoleDesk(RegistryRoles):
    """Fulfils `router.role_watch.RoleDesk`; workers are shown what `security` holds."""

    def __init__(self, client: RegistryClient, security: PeerSecurity) -> None:
        super().__init__(client)
        self._security = security

    async def carry_out(self, order: RoleOrder) -> RoleChange:
        """Tell the worker, and wait until it serves the role. Raises ServingError."""
        worker = GrpcWorker(order.worker, self._security)
        try:
            return await worker.change_role(order)
        finally:
            await worker.close()
