"""Network namespaces: workers on hosts of their own, as far as the network can tell, and cables between them.

Owns the namespaces (one for each worker, all on one bridge with the router's side) and partitions: both ends
of a cut pair send to a hardware address that nobody has, so packets are lost in silence, as with a broken
switch, and connections stay open. Needs root and the `ip` command; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable

ROUTER = "router"
_NOBODY = "02:00:00:00:00:99"


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    name = f"bt{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True)
    if made.returncode:
        return f"network devices cannot be made: {made.stderr.strip()}"
    _ip("link", "del", name)
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Cables:
    """A bridge in this namespace and one namespace for each of `names`, connected to it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._mark = secrets.token_hex(3)
        self._bridge = f"bt{self._mark}"
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        self._namespaces: dict[str, str] = {}
        self.addresses = {ROUTER: f"{subnet}.1"}
        self._devices = {ROUTER: self._bridge}
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{subnet}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(names):
                self._connect(name, f"{subnet}.{number + 2}", number)
        except BaseException:
            self.close()
            raise

    def _connect(self, name: str, address: str, number: int) -> None:
        space, outer, inner = f"bt{self._mark}{number}", f"bo{self._mark}{number}", f"bi{self._mark}{number}"
        _ip("netns", "add", space)
        self._namespaces[name] = space
        self.addresses[name] = address
        self._devices[name] = inner
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
        _ip("link", "set", outer, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", inner)
        _ip("-n", space, "link", "set", inner, "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def inside(self, name: str) -> list[str]:
        """The words before a command that shall run on that host."""
        return ["ip", "netns", "exec", self._namespaces[name]]

    def cut(self, one: str, other: str) -> None:
        """From now on nothing that one of them sends reaches the other."""
        for here, there in ((one, other), (other, one)):
            self._neighbour("replace", here, there, "lladdr", _NOBODY, "nud", "permanent")

    def mend(self, one: str, other: str) -> None:
        """They reach each other again; without effect if they did."""
        for here, there in ((one, other), (other, one)):
            # asked for anew at the next packet
            self._neighbour("replace", here, there, "lladdr", _NOBODY, "nud", "permanent")
            self._neighbour("del", here, there)

    def _neighbour(self, action: str, here: str, there: str, *more: str) -> None:
        space = ["-n", self._namespaces[here]] if here in self._namespaces else []
        _ip(*space, "neigh", action, self.addresses[there], "dev", self._devices[here], *more)

    def close(self) -> None:
        for space in self._namespaces.values():
            _ip("netns", "del", space)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
