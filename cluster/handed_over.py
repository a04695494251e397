"""The application as Serve builds it from a declarative configuration, in a task of its own.

Only an application that is deployed so may have an autoscaling policy over all its deployments. Owns how
configuration and token get there: through the store of Ray's control service, under a random name, since what
stands in the configuration itself is logged and shown. Whoever can read that store can run code anyway.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.app import ROUTER, build_application
from cluster.autoscaler.decision_log import plain
from cluster.config import BatonConfig
from core.errors import InvalidConfig
from core.peer_security import ClusterToken

_SPACE = b"baton"


def hand_over(config: BatonConfig, token: ClusterToken | None) -> str:
    """Lay both down; returns the name under which `application` finds them."""
    name = secrets.token_hex(8)
    _internal_kv_put(name.encode(), pickle.dumps((config, token)), namespace=_SPACE)
    return name


def take_back(name: str) -> None:
    """Nobody builds from it any more."""
    _internal_kv_del(name.encode(), namespace=_SPACE)


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """What Serve calls. Raises InvalidConfig if nothing is laid down under `arguments["name"]`."""
    name = str(arguments.get("name", ""))
    found = _internal_kv_get(name.encode(), namespace=_SPACE)
    if found is None:
        raise InvalidConfig(f"nothing was handed over under the name {name!r}", key="name")
    config, token = pickle.loads(found)
    return build_application(config, token)


def declared(config: BatonConfig, name: str, app_name: str) -> dict[str, Any]:
    """Serve's configuration of the application that was handed over as `name`."""
    return {
        "name": app_name,
        "route_prefix": "/",
        "import_path": "cluster.handed_over:application",
        "args": {"name": name},
        "autoscaling_policy": scaling_policy(config),
    }


def scaling_policy(config: BatonConfig) -> dict[str, Any]:
    """The autoscaler, as Serve is told of it."""
    return {
        "policy_function": "cluster.autoscaler.policy:ScalingPolicy",
        "policy_kwargs": {
            "settings": plain(config.autoscaling),
            "gpus_per_worker": config.cluster.worker_num_gpus,
            "router": ROUTER,
        },
    }
