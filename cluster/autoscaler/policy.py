"""ScalingPolicy: the application's autoscaling policy, as Ray Serve calls it.

Owns which of Serve's contexts is whose. Lives in Serve's controller and is called there ten
times a second, for all deployments at once: it never blocks and never raises, since an exception would stop
the control loop of every application. Serve pickles this module by value; all else is imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from cluster.autoscaler.config import AutoscalingConfig
from cluster.autoscaler.contexts import fleet_of
from cluster.autoscaler.controller import Controller
from cluster.autoscaler.outlet import Outlet
from core.config import from_mapping
from core.ids import Role


class ScalingPolicy:
    """`settings` are those of section `autoscaling`, `router` the name of the routers' deployment; a pool's
    deployment is named after its role.
    """

    def __init__(self, settings: Mapping[str, Any], gpus_per_worker: float, router: str) -> None:
        config = from_mapping(AutoscalingConfig, settings, "autoscaling")
        self._controller = Controller(config, gpus_per_worker, Outlet(config).tell)
        self._router = router
        self._has_failed = False

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """The deployments that are to change or stay, by their id; those left out stay as they are."""
        try:
            answer = self._answer(contexts)
        except Exception:
            # what is raised here would end all scaling in Serve's controller; a fault that lasts is told once
            if not self._has_failed:
                logging.getLogger("ray.serve").exception("autoscaler: no decision")
            self._has_failed = True
            return {}, {}
        self._has_failed = False
        return answer, {}

    def _answer(self, contexts: Mapping[Any, Any]) -> dict[Any, int]:
        by_name = {context.deployment_name: (key, context) for key, context in contexts.items()}
        pools = {role: by_name[role.value] for role in Role if role.value in by_name}
        if len(pools) < len(Role) or self._router not in by_name:
            return {}
        now = time.monotonic()
        if not self._controller.is_due(now):
            self._controller.applied(
                {role: context.target_num_replicas for role, (_, context) in pools.items()}
            )
            return {}
        fleets = {role: fleet_of(context) for role, (_, context) in pools.items()}
        wanted = self._controller.answer(fleets, fleet_of(by_name[self._router][1]), now, time.time())
        self._has_failed = False
        return {key: wanted[role] for role, (key, _) in pools.items()}
