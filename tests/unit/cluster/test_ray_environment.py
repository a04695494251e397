from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from cluster.ray_environment import IngressPorts, auth_environment, serve_environment
from cluster.run_directory import MAX_ROOT_LENGTH

PORTS = IngressPorts(metrics=1001, stats=1002, fallback_http=1003, fallback_grpc=1004)
SOCKET_PATH_LIMIT = 107


def ray_source(path: str) -> str:
    """Text of an installed Ray module; Ray itself is not imported here."""
    return Path(str(importlib.metadata.distribution("ray").locate_file(path))).read_text()


@pytest.mark.parametrize("name", sorted(serve_environment(Path("/tmp/x"), PORTS)))
def test_every_variable_is_one_that_the_installed_ray_reads(name: str) -> None:
    if name.startswith("RAY_SERVE_"):
        assert f'"{name}"' in ray_source("ray/serve/_private/constants.py")
    elif name == "RAY_USAGE_STATS_ENABLED":
        assert f'"{name}"' in ray_source("ray/_common/usage/usage_constants.py")
    else:
        assert name == "RAY_memory_monitor_refresh_ms"  # read by Ray's core, which is not Python


def test_ray_is_told_to_ask_for_its_token_unless_who_started_it_chose_otherwise() -> None:
    assert '"RAY_AUTH_MODE"' in ray_source("ray/_private/authentication/authentication_token_setup.py")
    assert auth_environment(True, {}) == {"RAY_AUTH_MODE": "token"}
    assert auth_environment(True, {"RAY_AUTH_MODE": "disabled"}) == {"RAY_AUTH_MODE": "token"}
    assert auth_environment(False, {}) == {"RAY_AUTH_MODE": "token"}
    assert auth_environment(False, {"RAY_AUTH_MODE": "disabled"}) == {}


def test_every_port_that_serve_would_share_with_another_cluster_is_ours() -> None:
    environment = serve_environment(Path("/tmp/x"), PORTS)
    chosen = {name: value for name, value in environment.items() if name.endswith("_PORT")}
    assert sorted(chosen.values()) == ["1001", "1002", "1003", "1004"]
    source = ray_source("ray/serve/_private/constants.py")
    shared = [
        "RAY_SERVE_HAPROXY_METRICS_PORT",
        "RAY_SERVE_HAPROXY_STATS_PORT",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
    ]
    assert sorted(chosen) == sorted(shared)
    assert all(name in source for name in shared)


def test_the_longest_socket_path_fits() -> None:
    run_dir = Path("/" + "r" * (MAX_ROOT_LENGTH - 1)) / "ffffff"
    node_id, pid_suffix = "0" * 56, ".9999999.tmp"  # what Ray and HAProxy add
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(serve_environment(run_dir, PORTS)[name])
        assert len(str(path.parent / node_id / path.name)) + len(pid_suffix) <= SOCKET_PATH_LIMIT
    plasma = run_dir / "r" / "session_2026-12-31_23-59-59_999999_9999999" / "sockets" / "plasma_store"
    assert len(str(plasma)) <= SOCKET_PATH_LIMIT
