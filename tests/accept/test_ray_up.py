"""`ray up` with the file for hosts on the premises, on hosts that are reached by SSH, and Baton on top of it.

The start commands are run as they are written. What the set-up commands would download cannot be had without
a network: the environment of this checkout takes its place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from core.peer_security import new_cluster_token
from tests.e2e import ssh_hosts
from tests.e2e.harness import ROOT
from tests.e2e.scrape import wait_until
from tests.e2e.ssh_hosts import SshHosts
from tests.integration.deploy.manifests import cluster_file

_BIN = Path(sys.executable).parent
_MODEL = "smollm2-135m-instruct"
_UP_S, _SERVE_S = 300.0, 300.0
_MONITOR = "/tmp/ray/session_latest/logs/monitor.*"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    reason = ssh_hosts.why_not()
    if reason:
        pytest.skip(reason)
    hosts = SshHosts(["head", "worker"], tmp_path)
    yield hosts
    hosts.close()


@pytest.mark.timeout(900)
def test_a_cluster_comes_up_serves_over_both_hosts_and_goes_down(hosts: SshHosts, tmp_path: Path) -> None:
    operator = Operator(hosts, tmp_path)
    (hosts.home("head") / "baton").mkdir()
    (hosts.home("worker") / "baton").mkdir()
    (hosts.home("head") / "baton" / "node.env").write_text(
        "BATON_POOL=prefill BATON_WORKERS=1 BATON_ZONE=rack-1"
    )
    (hosts.home("worker") / "baton" / "node.env").write_text(
        "BATON_POOL=decode BATON_WORKERS=1 BATON_ZONE=rack-1"
    )
    operator.ray("up", "-y", "--no-config-cache")
    try:
        wait_until(operator.why_not_two_nodes, _UP_S, every_s=3.0)
        with operator.serving() as url:
            headers = {"authorization": f"Bearer {operator.api_key}"}
            body = {"model": _MODEL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120.0).json()
            (prompt,) = answer["usage"]["baton"]["prompts"]
            assert prompt["plan"] == "remote"
            state = httpx.get(f"{url}/dashboard/state", headers=headers, timeout=30.0).json()
            nodes = {worker["role"]: worker["node"] for worker in state["workers"]}
            assert nodes == {"prefill": "head", "decode": "worker"}
            assert httpx.get(f"{url}/dashboard/state", timeout=30.0).status_code == 401
    finally:
        operator.ray("down", "-y")


class Operator:
    """Whoever runs `ray up`: a home with tokens and keys, and the cluster's file for these hosts."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self._folder = folder
        self._head = hosts.address("head")
        home = folder / "home-operator"
        (home / ".baton").mkdir(parents=True)
        (home / ".ray").mkdir()
        for path in (home / ".baton" / "token", home / ".ray" / "auth_token"):
            path.write_text(new_cluster_token().secret)
            path.chmod(0o600)
        self._environment = {**os.environ, "HOME": str(home), "PATH": f"{_BIN}:{os.environ['PATH']}"}
        # the second autoscaler of Ray 2.60 does not start hosts of the provider `local`: see the file
        self._environment |= {"RAY_UP_enable_autoscaler_v2": "0"}
        self._environment |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        keys = [
            str(_BIN / "baton"),
            "keys",
            "add",
            "ops",
            "--operator",
            "--file",
            str(home / ".baton" / "keys.json"),
        ]
        self.api_key = subprocess.run(keys, capture_output=True, text=True, check=True).stdout.strip()
        self._file = folder / "cluster.yaml"
        self._file.write_text(yaml.safe_dump(self._cluster(hosts)))

    def _cluster(self, hosts: SshHosts) -> dict[str, Any]:
        found = cluster_file("on-premise")
        settings = self._folder / "baton.yaml"
        settings.write_text(yaml.safe_dump(_settings()))
        found |= {"cluster_name": f"baton-{self._head}", "max_workers": 1}
        found["provider"] |= {"head_ip": self._head, "worker_ips": [hosts.address("worker")]}
        found["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
        found["file_mounts"]["~/baton/baton.yaml"] = str(settings)
        del found["file_mounts"]["~/baton/source"]
        found["setup_commands"] = [
            "chmod 600 ~/baton/token ~/.ray/auth_token",
            f"ln -sfn {_BIN.parent} ~/baton/venv",
            "~/baton/venv/bin/baton fetch",
        ]
        return found

    def ray(self, command: str, *more: str) -> str:
        done = subprocess.run(
            [str(_BIN / "ray"), command, str(self._file), *more],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_UP_S,
            check=False,
        )
        assert done.returncode == 0, f"ray {command}: {done.stdout[-4000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def why_not_two_nodes(self) -> str:
        """Both pools are offered once both hosts have joined."""
        said = self.ray("exec", f"RAY_AUTH_MODE=token ~/baton/venv/bin/ray status; tail -n 20 {_MONITOR}")
        return "" if "baton_prefill" in said and "baton_decode" in said else said[-6000:]

    def serving(self) -> Serving:
        command = "~/baton/venv/bin/baton serve --config ~/baton/baton.yaml --address auto"
        return Serving(
            [str(_BIN / "ray"), "exec", str(self._file), command], self._environment, self._head, self._folder
        )


class Serving:
    """`baton serve --address` on the head, for as long as the `with` lasts."""

    def __init__(self, command: list[str], environment: dict[str, str], head: str, folder: Path) -> None:
        self._command, self._environment, self._head = command, environment, head
        self._log = folder / "serve.log"

    def __enter__(self) -> str:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(self._why_not_up, _SERVE_S, every_s=1.0)
        except BaseException:
            self.__exit__()
            raise
        return f"http://{self._head}:8000"

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)

    def _why_not_up(self) -> str:
        said = self._log.read_text(errors="replace")
        assert self._process.poll() is None, said[-4000:]
        return "" if "Ctrl-C stops it" in said else f"said: {said[-1000:]}"


def _settings() -> dict[str, Any]:
    """Those of `deploy/ray/baton.yaml`, for a machine without GPUs."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "baton.yaml").read_text())
    found["engine"] = {"kv_cache_bytes": 256 << 20}
    found["cluster"] |= {
        "num_routers": 1,
        "num_prefill_workers": 1,
        "num_decode_workers": 1,
        "worker_num_cpus": 0,
        "worker_num_gpus": 0,
        "drain_timeout_s": 3,
    }
    found["router"]["plan"] = "remote"
    return found
