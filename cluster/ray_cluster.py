"""A local Ray cluster with Serve in it: started, watched until the application runs, taken down without a
trace.

Owns the order of start and stop and the processes in between. Knows nothing of models or requests. Called on
the main thread of `baton serve`; Ray's start and end run on one of their own. Ray is imported only after its
environment is set.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from cluster.config import BatonConfig, ClusterConfig
from cluster.ports import free_ports
from cluster.processes import end_processes, processes_of_run
from cluster.ray_daemons import RayDaemons
from cluster.ray_environment import IngressPorts, auth_environment, serve_environment
from core.peer_security import ClusterToken

APP_NAME = "baton"
OBJECT_STORE_BYTES = 80 * 2**20  # nothing of ours goes through it; Ray's minimum is 75 MiB
_LOGICAL_CPUS = (
    64  # our actors ask for none by default: placing them is not a question of cores on one machine
)
_END_GRACE_S = 0.5  # all that was to be saved is; what Ray has started has SIGTERM blocked
_CALL_TIMEOUT_S = 5.0
_LOOK_PERIOD_S = 0.1
# without Ray's daemons a call that is under way may still come to its own end
_LAST_CALL_S = 1.0

_OWN_ERROR = re.compile(r"^core\.errors\.\w+: (.+)$", re.MULTILINE)

_log = logging.getLogger(__name__)


class StartFailed(Exception):
    """The application did not come up; the message says why."""


class RayCluster:
    """One cluster, in the folder `run_dir`. Use as: start, deploy, …, stop; `stop` also after a failure
    in between.
    """

    def __init__(self, run_dir: Path, cluster: ClusterConfig, port: int) -> None:
        """Serve's ingress listens on `port` of the configured host."""
        self._run_dir = run_dir
        self._address = cluster.ray_address
        self._host = cluster.host
        self._port = port
        self._roles = cluster.roles
        self._dashboard_port = cluster.ray_dashboard_port
        self._registry: Any = None
        self._handed_over: str | None = None
        # Ray's processes die with the thread that starts them, and break if a signal's exception comes in
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._starting: Future[None] | None = None
        self._leaving: Future[None] | None = None
        self._daemons = RayDaemons()

    def start(self) -> None:
        """Start Ray or join it; start the Serve controller, its proxies and the registry.

        A signal's exception ends the wait, not the start: `stop` waits for it.
        """
        self._starting = self._thread.submit(self._start)
        while not self._starting.done():
            self._daemons.look()
            wait((self._starting,), _LOOK_PERIOD_S)
        self._starting.result()

    def _start(self) -> None:
        ports = IngressPorts(*free_ports(self._host, IngressPorts.COUNT))
        os.environ.update(serve_environment(self._run_dir, ports))
        os.environ.update(auth_environment(self._address == "local", os.environ))
        import ray
        from ray import serve

        from cluster.registry import NAMESPACE, start_registry

        own: dict[str, Any] = {
            "num_cpus": _LOGICAL_CPUS,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": self._dashboard_port is not None,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": self._dashboard_port,
            "_temp_dir": str(self._run_dir / "r"),
        }
        logging.getLogger("ray._private.worker").addFilter(_is_no_news)
        with _signals_kept_from_children():
            ray.init(
                address=self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **(own if self._address == "local" else {}),
            )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": self._host, "port": self._port, "request_timeout_s": None})
        self._registry = start_registry(self._roles)

    def deploy(self, application: Any) -> None:
        """Hand the application to Serve; `is_running` tells when it is up."""
        from ray import serve

        target = serve.RunTarget(application, name=APP_NAME, route_prefix="/")
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def declare(self, config: BatonConfig, token: ClusterToken | None) -> None:
        """The same for an application that scales itself: Serve knows such a policy only of one that it
        builds from a declaration.
        """
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from cluster.handed_over import declared, hand_over

        self._handed_over = hand_over(config, token)
        application = declared(config, self._handed_over, APP_NAME)
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def is_running(self) -> bool:
        """Whether each replica is up. Raises StartFailed with Serve's reason when it has given up."""
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        application = serve.status().applications.get(APP_NAME)
        if application is None:
            return False
        if application.status is ApplicationStatus.DEPLOY_FAILED:
            reasons = [status.message for status in application.deployments.values() if status.message]
            raise StartFailed(_own_words("\n".join(reasons or [application.message])))
        return application.status is ApplicationStatus.RUNNING

    def summary(self) -> str:
        """Deployment by deployment, how far it is."""
        from ray import serve

        application = serve.status().applications.get(APP_NAME)
        if application is None:
            return "not known to Serve yet"
        parts = []
        for name, status in sorted(application.deployments.items()):
            counts: Mapping[Any, int] = status.replica_states  # keyed by words, whatever its annotation says
            parts.append(f"{name} {counts.get('RUNNING', 0)} of {sum(counts.values())}")
        return ", ".join(parts)

    def stop(self, drain_timeout_s: float) -> None:
        """Let open streams end for `drain_timeout_s`, then end every process of the run.

        A signal to the whole group ends Ray too: then there is nothing to drain, and nothing waits for it.
        """
        if self._starting is None:
            return
        ours = processes_of_run(self._run_dir, os.getpid())
        if self._is_done(self._starting):
            self._leaving = self._thread.submit(self._leave, drain_timeout_s)
            self._is_done(self._leaving)
        ours |= processes_of_run(self._run_dir, os.getpid())
        for process in end_processes(ours, _END_GRACE_S):
            _log.info("process %d had to be killed", process.pid)
        self._thread.shutdown(wait=not self.is_stuck)

    @property
    def is_stuck(self) -> bool:
        """Whether a call into Ray hangs that nobody answers any more: who waits for it, as Python does at its
        end, waits for a minute.
        """
        return any(call is not None and not call.done() for call in (self._starting, self._leaving))

    def _is_done(self, call: Future[None]) -> bool:
        """Wait for a call into Ray, but not for one that a cluster would have to answer that is gone."""
        while not call.done() and not self._daemons.has_any_ended():
            wait((call,), _LOOK_PERIOD_S)
        wait((call,), _LAST_CALL_S)
        return call.done()

    def _leave(self, drain_timeout_s: float) -> None:
        """Deleting the application is what drains it. Serve's own shutdown is left out: there is nothing left
        that it would spare, and it ends with Ray reporting the controller's death as an error.
        """
        import ray
        from ray import serve

        try:
            if ray.is_initialized():
                self._tell_end(drain_timeout_s)
                serve.delete(APP_NAME)
                self._take_back()
        except ray.exceptions.RayError as error:
            _log.warning("Ray ended before the application did (%s)", type(error).__name__)
        except Exception:  # noqa: BLE001 - logged, and the processes are ended whatever it was
            _log.exception("Ray Serve did not stop the application; ending its processes")
        finally:
            if self._address == "local":
                Thread(target=self._end_daemons, name="ray-end", daemon=True).start()
            ray.shutdown()

    def _end_daemons(self) -> None:
        """SIGKILL, once we have left: they have SIGTERM blocked, and Ray would wait a second for each."""
        import ray

        while ray.is_initialized():
            time.sleep(_LOOK_PERIOD_S)
        me = os.getpid()
        for process in processes_of_run(self._run_dir, me):
            with suppress(psutil.NoSuchProcess):
                if process.ppid() == me:
                    process.kill()

    def _tell_end(self, drain_timeout_s: float) -> None:
        """The routers read it in the registry. If that is away, what is open at the end is cut instead of
        ended.
        """
        import ray

        if self._registry is None:
            return
        try:
            ray.get(self._registry.end_in.remote(drain_timeout_s), timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            _log.warning("the routers do not hear of the end: %s", type(error).__name__)

    def _take_back(self) -> None:
        """Nobody builds the application any more: a cluster that was joined keeps no token of ours."""
        if self._handed_over is not None:
            from cluster.handed_over import take_back

            take_back(self._handed_over)
            self._handed_over = None

    def end(self) -> None:
        """End every process of the run at once; open streams break."""
        end_processes(processes_of_run(self._run_dir, os.getpid()), grace_s=1.0)


def _is_no_news(record: logging.LogRecord) -> bool:
    """Drops the one warning that is meant so: the signal handlers stay ours."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _own_words(report: str) -> str:
    """What our own errors said, out of the tracebacks in which Serve reports a failed constructor; else all
    of it.
    """
    said = dict.fromkeys(_OWN_ERROR.findall(report))
    return "\n".join(said) if said else report


@contextmanager
def _signals_kept_from_children() -> Iterator[None]:
    """Ctrl-C goes to the whole process group, and so may SIGTERM. Processes started inside have both blocked,
    so that only this one acts on them: Ray's GCS goes deaf at SIGTERM while its process stays.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
