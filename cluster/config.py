"""BatonConfig: every package's section in one value, read from file, environment and flags.

Owns the composition and the section `cluster`; each other section is declared, with its defaults, by the
package it configures. Frozen and picklable: the whole of it travels to each Ray replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.autoscaler.config import AutoscalingConfig
from cluster.log_config import LogConfig
from cluster.loopback import is_loopback
from cluster.role_config import RoleConfig
from cluster.security import SecurityConfig
from cluster.settings import settings_from_environment, settings_from_file, settings_from_flags
from core.config import from_mapping, merge
from core.ids import Role
from decode_worker.config import DecodeConfig
from engine.config import EngineConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

CONFIG_VARIABLE = "BATON_CONFIG"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where the service listens and how many processes it has.

    `ray_address` "local" starts a Ray cluster on this machine for as long as the service runs; anything else
    joins the cluster there. `port` 0 takes a free one. A worker replica asks Ray for `worker_num_cpus` and
    `worker_num_gpus` (0: placement is free), and for one of `prefill_resource` or `decode_resource` where
    that is set: a custom resource of which a node offers as many as workers shall run there.
    `start_timeout_s` bounds a start, `drain_timeout_s` how long running streams may go on when the service
    stops. `health_period_s`: how often Serve looks whether a replica lives, so about how long until it
    replaces a dead one. `roles`: when workers change their role.
    `ray_dashboard_port`: where Ray's dashboard and job server listen on this machine, for a cluster of its
    own; None leaves them out, they cost memory.
    """

    ray_address: str = "local"
    host: str = "127.0.0.1"
    port: int = 8000
    num_routers: int = 1
    num_prefill_workers: int = 1
    num_decode_workers: int = 1
    worker_num_cpus: float = 0.0
    worker_num_gpus: float = 0.0
    prefill_resource: str | None = None
    decode_resource: str | None = None
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 20.0
    health_period_s: float = 1.0
    ray_dashboard_port: int | None = None
    roles: RoleConfig = field(default_factory=RoleConfig)

    @property
    def is_own(self) -> bool:
        """Whether the cluster is started and stopped with the service, all of it on this machine."""
        return self.ray_address == "local"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError("port must be between 0 and 65535")
        if self.ray_dashboard_port is not None and not 1 <= self.ray_dashboard_port <= 65535:
            raise ValueError("ray_dashboard_port must be between 1 and 65535")
        if self.num_routers < 1:
            raise ValueError("num_routers must be at least 1")
        if self.num_prefill_workers < 0 or self.num_decode_workers < 0:
            raise ValueError("the number of workers must not be negative")
        if self.num_decode_workers == 0:
            raise ValueError("num_decode_workers must be at least 1: only decode workers finish an answer")
        if self.worker_num_cpus < 0 or self.worker_num_gpus < 0:
            raise ValueError("what a worker takes of a node must not be negative")
        for name in ("start_timeout_s", "drain_timeout_s", "health_period_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")


@dataclass(frozen=True, slots=True)
class BatonConfig:
    """All sections. `prefill_engine` and `decode_engine` are `engine` with what differs on one kind of
    worker.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    prefill_engine: EngineConfig = field(default_factory=EngineConfig)
    decode_engine: EngineConfig = field(default_factory=EngineConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    logging: LogConfig = field(default_factory=LogConfig)
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)

    def __post_init__(self) -> None:
        host = self.cluster.host
        if not self.router.tenants.are_keys_required and not is_loopback(host):
            raise ValueError(
                f"cluster.host is {host}, which other machines can reach: set router.tenants.keys_file "
                "(`baton keys add` writes it) or router.tenants.keys, or listen on 127.0.0.1"
            )

        if self.autoscaling.max_gpus is not None and self.cluster.worker_num_gpus <= 0:
            raise ValueError("autoscaling.max_gpus needs cluster.worker_num_gpus, what a worker takes")
        budget = self.autoscaling.budget(self.cluster.worker_num_gpus)
        if budget is not None and budget < self.autoscaling.num_least:
            raise ValueError(
                f"autoscaling.max_gpus is room for {budget} workers, and the pools need "
                f"{self.autoscaling.num_least} at least"
            )
        is_guarded = self.security.is_token_required or self.security.is_tls
        if not is_guarded and not self.cluster.is_own:
            raise ValueError(
                "security.is_token_required may be false only on one machine or with mutual TLS: the workers "
                "of a cluster that is joined listen where other machines can reach them"
            )

    def engine_of(self, role: Role) -> EngineConfig:
        return self.prefill_engine if role is Role.PREFILL else self.decode_engine


def config_from_settings(settings: Mapping[str, Any]) -> BatonConfig:
    """Build the whole from nested settings. Raises InvalidConfig naming an unknown key or a wrong value."""
    shared = settings.get("engine", {})
    composed = dict(settings)
    for section in ("prefill_engine", "decode_engine"):
        own = settings.get(section, {})
        if isinstance(shared, Mapping) and isinstance(own, Mapping):
            composed[section] = merge(shared, own)
    return from_mapping(BatonConfig, composed)


def load_config(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Iterable[str] = (),
    short_flags: Mapping[str, Any] | None = None,
) -> BatonConfig:
    """File, then environment, then `--section.key=value` flags, then the short ones; later wins.

    Without `file`, `$BATON_CONFIG` names it. Raises InvalidConfig naming what is wrong and where.
    """
    return config_from_settings(merge(load_settings(file, environment, flags), short_flags or {}))


def load_settings(
    file: Path | None, environment: Mapping[str, str], flags: Iterable[str] = ()
) -> dict[str, Any]:
    """What was given, without defaults, in the order of `load_config`."""
    named = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    settings = settings_from_file(named) if named is not None else {}
    settings = merge(settings, settings_from_environment(environment))
    return merge(settings, settings_from_flags(flags))
