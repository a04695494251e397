"""`baton config`: the settings that hold, as they are, as Serve's file, or what `ray start` needs.

Owns the three forms; nothing is started. Main thread.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster.config import BatonConfig, config_from_settings, load_settings
from core.errors import InvalidConfig

_APP = "baton"
# of a node on which nothing else runs; `baton serve` takes free ones
_RUN_DIRECTORY = Path("/tmp/baton")  # short, as Unix sockets want it
_PORTS = (8404, 8405, 8406, 9406)
_HIDDEN = "(hidden)"


def config(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with one section per package.")
    ] = None,
    is_serve: Annotated[
        bool, typer.Option("--serve", help="As a configuration file of Ray Serve, for `serve deploy`.")
    ] = False,
    is_environment: Annotated[
        bool, typer.Option("--environment", help="As shell lines: what `ray start` needs on each node.")
    ] = False,
) -> None:
    """Print the settings that `baton serve` would use with these arguments."""
    if is_serve and is_environment:
        raise InvalidConfig("--serve and --environment are two different things", key="--serve")
    if is_environment:
        typer.echo("\n".join(environment_lines()))
        return
    settings = load_settings(file, os.environ, context.args)
    whole = config_from_settings(settings)
    told = serve_file(whole, settings) if is_serve else plain(whole)
    typer.echo(yaml.safe_dump(told, sort_keys=False), nl=False)


def serve_file(config: BatonConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """What Serve is to run. `settings` as they were given: Serve hands them to the application on the head,
    which reads them again.

    Raises InvalidConfig where keys stand in the settings: the file is shown in Ray's dashboard and logs.
    """
    if config.router.tenants.keys:
        raise InvalidConfig(
            "router.tenants.keys would stand in Serve's configuration, which Ray shows; use keys_file",
            key="router.tenants.keys",
        )
    cluster = config.cluster
    application: dict[str, Any] = {
        "name": _APP,
        "route_prefix": "/",
        "import_path": "cluster.declared_app:application",
        "args": plain(settings),
    }
    if config.autoscaling.is_enabled:
        from cluster.handed_over import scaling_policy

        application["autoscaling_policy"] = scaling_policy(config)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": cluster.host, "port": cluster.port, "request_timeout_s": None},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
    }


def environment_lines() -> list[str]:
    """`export NAME=value` for each variable: HAProxy ingress, its ports, authentication by token."""
    from cluster.ray_environment import IngressPorts, auth_environment, serve_environment

    found = serve_environment(_RUN_DIRECTORY, IngressPorts(*_PORTS))
    found |= auth_environment(is_own=True, environment={})
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(found.items())]


def plain(value: Any) -> Any:
    """As YAML knows it; keys of tenants are hidden where they are part of a whole configuration."""
    if isinstance(value, BatonConfig):
        told = plain(asdict(value))
        tenants = told["router"]["tenants"]
        tenants["keys"] = [_HIDDEN for _ in tenants["keys"]]
        return told
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
