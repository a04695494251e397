"""SshHosts: hosts that `ray up` can reach: each has an address, a name, a home, a /tmp of its own, and sshd.

Owns the namespaces (network as in `namespaces`, mounts, host name, processes: `ray stop` ends all of Ray that
it sees), keys, and that no process is left. The model cache is one for all hosts, as on a shared disk.
Needs root, `ip`, `sshd` (Debian package openssh-server) and `rsync`; `why_not` says what is missing.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from engine.model.bundled import cache_folder
from tests.e2e import namespaces
from tests.e2e.namespaces import ROUTER, Cables
from tests.e2e.scrape import wait_until

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_HOME = "/home"
_CONFIG = """
Port 22
HostKey {key}
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
PidFile none
UsePAM no
StrictModes no
SetEnv BATON_CACHE={cache}
"""


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if not Path(_SSHD).exists():
        return "no sshd (Debian package openssh-server)"
    for program in ("ssh", "ssh-keygen", "rsync", "unshare"):
        if shutil.which(program) is None:
            return f"no {program}"
    return namespaces.why_not()


def _with_home(passwd: str) -> str:
    """Root's home elsewhere: in its usual one may lie what the hosts run, too."""
    lines = (line.split(":") for line in passwd.splitlines())
    return "".join(
        ":".join([*line[:5], _HOME if line[0] == "root" else line[5], *line[6:]]) + "\n" for line in lines
    )


class SshHosts:
    """`names` become hosts. `key` opens them to root."""

    def __init__(self, names: Iterable[str], folder: Path) -> None:
        names = list(names)
        self.key = folder / "id_ed25519"
        self._folder = folder
        self._passwd = folder / "passwd"
        self._passwd.write_text(_with_home(Path("/etc/passwd").read_text()))
        self._servers: list[subprocess.Popen[bytes]] = []
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        self._cables = Cables(names)
        try:
            for name in names:
                self._start(name)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return self._cables.addresses[name]

    def home(self, name: str) -> Path:
        """What lies in the home of root there."""
        return self._folder / f"home-{name}"

    def close(self) -> None:
        """End every process of the hosts, then take the hosts away."""
        for pid in self._pids():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGKILL)
        for server in self._servers:
            server.wait(10.0)
        self._cables.close()

    def _start(self, name: str) -> None:
        home, inside = self.home(name), self._cables.inside(name)
        (home / ".ssh").mkdir(parents=True)
        shutil.copy(self.key.with_suffix(".pub"), home / ".ssh" / "authorized_keys")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "host_key")], check=True
        )
        (home / "sshd_config").write_text(_CONFIG.format(key=f"{_HOME}/host_key", cache=cache_folder()))
        # Ray finds the address of a host by the way to the world
        subprocess.run(
            [*inside, "ip", "route", "add", "default", "via", self._cables.addresses[ROUTER]], check=True
        )
        script = (
            f"mount --bind {self._passwd} /etc/passwd && mount --bind {home} {_HOME} && "
            "mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && "
            f"hostname {name} && exec {_SSHD} -D -e -f {_HOME}/sshd_config"
        )
        with (self._folder / f"sshd-{name}.log").open("wb") as log:
            self._servers.append(
                subprocess.Popen(
                    [
                        *inside,
                        "unshare",
                        "--mount",
                        "--uts",
                        "--pid",
                        "--fork",
                        "--mount-proc",
                        "sh",
                        "-c",
                        script,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={
                        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                        "HOME": _HOME,
                    },
                )
            )
        wait_until(lambda: self._why_not_reached(name), 10.0)

    def _why_not_reached(self, name: str) -> str:
        try:
            with socket.create_connection((self.address(name), 22), timeout=1.0):
                return ""
        except OSError as error:
            return str(error)

    def _pids(self) -> list[int]:
        found = []
        for name in self._cables.addresses:
            if name != ROUTER:
                space = self._cables.inside(name)[3]
                listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
                found += [int(pid) for pid in listed.stdout.split()]
        return found
