"""TCP ports of this machine: is one free, which one is.

HAProxy and Ray Serve's proxy bind with SO_REUSEPORT, so two clusters on one port would share its traffic
without an error. Owns the check that keeps them apart.
"""

from __future__ import annotations

import socket

from core.errors import InvalidConfig


def is_port_free(host: str, port: int) -> bool:
    """Whether nothing listens on `host:port`, also not with SO_REUSEPORT."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # lingering connections of an earlier run are no reason to refuse; a listener still is
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports that nobody listens on now. They are only reserved while this function runs."""
    probes: list[socket.socket] = []
    try:
        for _ in range(count):
            probe = socket.socket(_family(host), socket.SOCK_STREAM)
            probes.append(probe)
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def choose_port(host: str, port: int) -> int:
    """`port`, or a free one when it is 0. Raises InvalidConfig when it is taken."""
    if port == 0:
        return free_ports(host, 1)[0]
    if not is_port_free(host, port):
        raise InvalidConfig(
            f"port {port} on {host} is in use; choose another one (--port N, or --port 0 for a free one)",
            key="cluster.port",
        )
    return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
