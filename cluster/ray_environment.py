"""The environment variables under which Ray and Ray Serve run for Baton.

Ray reads them when it is imported and its processes inherit them, so they are set before the first `import
ray`. Owns which ones and why; pure. `docs/decisions.md` has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# an open stream survives a reload of HAProxy this long; longer than any request's deadline
HARD_STOP_AFTER_S = 7200

_AUTH_MODE = "RAY_AUTH_MODE"


@dataclass(frozen=True, slots=True)
class IngressPorts:
    """Ports that Serve opens beside the public one. Two clusters on one machine must not share any: all of
    them are bound with SO_REUSEPORT, so a clash would mix their traffic silently.
    """

    metrics: int
    stats: int
    fallback_http: int
    fallback_grpc: int

    COUNT = 4


def auth_environment(is_own: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """Whoever reaches Ray's ports can run code: it asks for its token (~/.ray/auth_token), always.

    Chosen here, for by itself Ray asks only where a token happens to lie. A cluster that is joined was
    started by others: `environment` may say how.
    """
    if not is_own and environment.get(_AUTH_MODE):
        return {}
    return {_AUTH_MODE: "token"}


def token_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """For a client of a cluster that others have started: shows the token if one is at hand and `environment`
    does not say how.
    """
    if environment.get(_AUTH_MODE):
        return {}
    has_token = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
    is_there = (Path.home() / ".ray" / "auth_token").exists()
    return {_AUTH_MODE: "token"} if has_token or is_there else {}


def serve_environment(run_dir: Path, ports: IngressPorts) -> dict[str, str]:
    """Variables for a cluster that this process starts. `run_dir` is short: it becomes part of Unix socket
    paths.
    """
    haproxy = run_dir / "h"
    return {
        # streams reach the client through HAProxy, straight from the router replica
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        # the defaults lie in one folder under /tmp that all users would share
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_AFTER_S),
        # Serve adds an X-Request-Id to the router's (cluster/request_id_header.py takes it away)
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.request_id_header:serve_middlewares",
        # ports of stopped router replicas may be used again soon: nothing else listens in our range
        "RAY_SERVE_PORT_QUARANTINE_S": "30",
        # a stopping router replica need not wait for load balancers outside this machine
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        # a killed HAProxy is back within seconds (default: three failures, ten seconds apart); a slow answer
        # may take its time, as replacing a proxy that only starves for CPU would cut all its streams
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "20",
        # the router's handlers send on the connection's own loop; no queue between two threads for each token
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ray would kill router, proxies and workers when *other* programs fill this machine's memory
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
