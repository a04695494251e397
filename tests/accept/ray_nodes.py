"""RayNodes: a Ray cluster of several raylets on this machine, each with resources of its own.

Owns their start and end, with files and ports apart from every other cluster here, and the start of a service
that joins them. Used from the test's thread; ends only what it started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)

from cluster.ports import free_ports
from cluster.ray_environment import IngressPorts, serve_environment
from cluster.run_directory import create_run_directory
from tests.e2e.harness import MARK, Profile, System, describe
from tests.e2e.scrape import wait_until

_RAY = str(Path(sys.executable).with_name("ray"))
_STORE_BYTES = 80 * 2**20
_START_S = 180.0
_MAX_STARTS = 3


class RayNodes:
    """A head without room for workers; `add` gives it nodes."""

    def __init__(self, folder: Path, max_nodes: int = 0) -> None:
        """`max_nodes`: of one CPU each, that Ray's autoscaler may start and end by itself."""
        self.mark = uuid.uuid4().hex
        self.run_dir = create_run_directory()
        ports = free_ports("127.0.0.1", 3)
        self.address = f"127.0.0.1:{ports[0]}"
        self.environment = {
            **os.environ,
            **serve_environment(self.run_dir, IngressPorts(*free_ports("127.0.0.1", IngressPorts.COUNT))),
            MARK: self.mark,
            "RAY_AUTH_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._log = (folder / f"ray-{ports[0]}.log").open("wb")
        options = ["--head", f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}"]
        options += [f"--dashboard-agent-listen-port={ports[2]}", "--include-dashboard=false"]
        options += [f"--temp-dir={self.run_dir / 'r'}"]
        if max_nodes:
            path = folder / f"nodes-{ports[0]}.json"
            path.write_text(json.dumps(_elastic(self.address, max_nodes)))
            options.append(f"--autoscaling-config={path}")
            self.environment |= {
                "RAY_FAKE_CLUSTER": "1",
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                # the older one knows nodes by their address, and these share one
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            }
        self._start(options, num_cpus=0)

    def add(self, num_cpus: int = 1) -> subprocess.Popen[bytes]:
        """One more node; returns its process, which ends when the node does."""
        agent, grpc = free_ports("127.0.0.1", 2)
        options = [f"--address={self.address}", f"--dashboard-agent-listen-port={agent}"]
        return self._start([*options, f"--dashboard-agent-grpc-port={grpc}"], num_cpus)

    def _start(self, options: list[str], num_cpus: int) -> subprocess.Popen[bytes]:
        command = [_RAY, "start", "--block", "--disable-usage-stats", f"--num-cpus={num_cpus}"]
        # ports of the system's choice: several raylets share this host
        command += [f"--object-store-memory={_STORE_BYTES}", "--min-worker-port=0", "--max-worker-port=0"]
        command += options
        for _ in range(_MAX_STARTS):
            num_before = self._num_started()
            node = subprocess.Popen(
                command,
                env=self.environment,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            wait_until(lambda: self._why_wait(node, num_before), _START_S)  # noqa: B023 - at once
            if node.poll() is None:
                self._nodes.append(node)
                return node
            # Ray gives a node up that has not started within half a minute
        raise AssertionError(f"no node\n{Path(self._log.name).read_text()[-3000:]}")

    def _why_wait(self, node: subprocess.Popen[bytes], num_before: int) -> str:
        is_decided = node.poll() is not None or self._num_started() > num_before
        return "" if is_decided else "the node is starting"

    def _num_started(self) -> int:
        return Path(self._log.name).read_text().count("Ray runtime started")

    def num_raylets(self) -> int:
        """Nodes that are up, the head among them."""
        return sum(_name(process) == "raylet" for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """All of this cluster, by the mark that each inherited."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def workers(self, role: str) -> dict[str, int]:
        """How many replicas of `role` each node has, by Ray's id of the node."""
        processes = {process.pid: process for process in self.processes()}
        found: dict[str, int] = {}
        for process in processes.values():
            try:
                title, parent = " ".join(process.cmdline()), processes.get(process.ppid())
                if "ray::ServeReplica" not in title or f":{role}" not in title or parent is None:
                    continue
                node_id = _node_id(parent)
            except psutil.NoSuchProcess:
                continue
            found[node_id] = found.get(node_id, 0) + 1
        return found

    @contextmanager
    def service(self, profile: Profile, folder: Path) -> Iterator[System]:
        """A service on this cluster."""
        joined = {
            "cluster.ray_address": self.address,
            "cluster.worker_num_cpus": 1.0,
            **profile.settings,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "disabled")
            with System(dataclasses.replace(profile, settings=joined), folder, 400.0) as system:
                yield system

    def stop(self) -> None:
        """End every process of it."""
        for node in reversed(self._nodes):
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(10.0)
        psutil.wait_procs(self.processes(), timeout=10.0)
        for process in self.processes():
            process.kill()
        for node in self._nodes:
            node.wait(5.0)
        left = psutil.wait_procs(self.processes(), timeout=5.0)[1]
        self._log.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        assert not left, [describe(process) for process in left]


def _elastic(address: str, max_nodes: int) -> dict[str, Any]:
    """Ray's configuration for nodes that are processes of this host."""
    node: dict[str, Any] = {"node_config": {}, "min_workers": 0}
    return {
        "cluster_name": "elastic",
        "provider": {
            # by its module: under its own name Ray looks for defaults in a file that its wheel lacks
            "type": "external",
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": address,
            "launch_multiple": True,
            "disable_node_updaters": True,  # by ssh, that is
            "head_node_id": FAKE_HEAD_NODE_ID,
        },
        "max_workers": max_nodes,
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {**node, "resources": {"CPU": 0}, "max_workers": 0},
            "worker": {
                **node,
                "resources": {"CPU": 1, "object_store_memory": _STORE_BYTES},
                "max_workers": max_nodes,
            },
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def _name(process: psutil.Process) -> str:
    """Nothing, if it has just ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _node_id(raylet: psutil.Process) -> str:
    named = [word for word in raylet.cmdline() if word.startswith("--node_id=")]
    return named[0].partition("=")[2] if named else ""
