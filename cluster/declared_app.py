"""The application as Serve builds it from a configuration file: `serve deploy`, KubeRay's RayService.

Owns what `baton serve` does before it deploys and nobody does here: the model on this machine, the registry,
the cluster's token, which comes from the environment or a file on the node where Serve builds applications
(the head). Runs in a task of Serve's, or in the importing process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from rich.console import Console

from cluster.app import build_application
from cluster.config import BatonConfig, config_from_settings
from cluster.model_folder import prepare_model
from cluster.registry import start_registry
from cluster.security import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, start_token
from cluster.steps import Steps
from core.errors import InvalidConfig
from core.peer_security import ClusterToken


def application(settings: Mapping[str, Any]) -> serve.Application:
    """What Serve calls with the file's `args`: settings as in Baton's own file.

    Raises InvalidConfig naming a setting, or the token if it is not there: one that is drawn here would be
    another one after each upgrade, and old and new workers would not know each other.
    """
    config = config_from_settings(settings)
    token = _token(config)
    config = prepare_model(config, Steps(Console(stderr=True)))
    start_registry(config.cluster.roles, is_detached=True)
    return build_application(config, token)


def _token(config: BatonConfig) -> ClusterToken | None:
    security = config.security
    is_given = security.token_file or os.environ.get(TOKEN_VARIABLE) or os.environ.get(TOKEN_FILE_VARIABLE)
    if security.is_token_required and not is_given:
        raise InvalidConfig(
            "an application that Serve builds from a file needs a token that stays: set "
            f"{TOKEN_FILE_VARIABLE} or {TOKEN_VARIABLE} on the head, or security.token_file on each node",
            key="security",
        )
    return start_token(security, os.environ)
