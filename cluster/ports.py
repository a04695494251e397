"""TCP ports of this machine: is one free, which one is.

HAProxy and Ray Serve's proxy bind with SO_REUSEPORT, so two clusters on one port would share its traffic
without an error. Owns the check that keeps them apart.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from core.errors import InvalidConfig

_SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _END = 20_000, 32_768  # above the ports of Ray's workers
_LEAST_ROOM = 1_000
_NUM_TRIES = 200
# not one that somebody seeds: two processes would draw the same ports
_CHANCE = random.SystemRandom()


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
    """`count` different ports that nobody listens on now, neither at `host` nor at all addresses. None of
    those that the system gives to outgoing connections, where there are others: until it is bound, which may
    be many seconds later, any connection could take it.
    """
    ports: list[int] = []
    first, end = _FIRST, min(_first_of_system(), _END)
    for _ in range(_NUM_TRIES if end - first >= _LEAST_ROOM else 0):
        port = _CHANCE.randrange(first, end)
        if port not in ports and is_port_free(host, port) and is_port_free(_everywhere(host), port):
            ports.append(port)
        if len(ports) == count:
            return ports
    return _ports_of_system(host, count)


def _first_of_system() -> int:
    try:
        return int(_SYSTEM_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST  # not known: anywhere above


def _ports_of_system(host: str, count: int) -> list[int]:
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


def _everywhere(host: str) -> str:
    return "::" if _family(host) == socket.AF_INET6 else "0.0.0.0"


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
