"""`baton serve`: from nothing to a service that answers, and back to nothing.

Owns the order of the start (model, cluster, application, readiness, sample), what is printed, and the
reaction to signals. Main thread only.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

import psutil
from rich.console import Console
from rich.markup import escape

from cluster.access import with_start_key
from cluster.config import BatonConfig
from cluster.model_folder import prepare_model
from cluster.ports import choose_port
from cluster.ray_cluster import RayCluster, StartFailed
from cluster.run_directory import ServeNote, create_run_directory, remove_run_directory, write_note
from cluster.sample import QUESTION, curl_line, stream_sample, wait_until_ready
from cluster.security import TOKEN_VARIABLE, peer_security, start_token
from cluster.steps import Steps
from cluster.stopper import Stopper, StopRequested
from core.errors import ServingError
from core.peer_security import ClusterToken

_STATUS_PERIOD_S = 0.5


def serve(config: BatonConfig, console: Console) -> int:
    """Start everything, stay until a signal, stop everything. Returns the exit status.

    After a failed start the run's folder stays, with Ray's logs in it, until `baton stop` clears it away.
    """
    config, api_key = with_start_key(config)
    token = start_token(config.security, os.environ)
    os.environ.pop(TOKEN_VARIABLE, None)  # what is started below has no business with it
    if config.cluster.is_own:
        peer_security(config.security, token)  # a missing file ends the start here instead of in each process
    stopper = Stopper()
    stopper.install()
    run_dir = create_run_directory()
    cluster: RayCluster | None = None
    has_failed = False
    try:
        with stopper.raising():
            port = choose_port(config.cluster.host, config.cluster.port)
            url = base_url(config.cluster.host, port)
            write_note(run_dir, ServeNote(os.getpid(), psutil.Process().create_time(), url))
            steps = Steps(console)
            config = prepare_model(config, steps)
            cluster = RayCluster(run_dir, config.cluster, port)
            _start(cluster, config, token, steps, stopper)
            model = _await_answer(config, url, steps, api_key)
            show_service(console, url, model, api_key)
        stopper.requested.wait()
    except StopRequested:
        console.print("stopped before the start was complete")
    except (StartFailed, ServingError) as error:
        if cluster is None:
            raise
        console.print(f"[red]the start failed:[/] {escape(str(error))}\nlogs: {run_dir}/r", soft_wrap=True)
        has_failed = True
    finally:
        _stop(cluster, config, console, stopper)
        if not has_failed:
            remove_run_directory(run_dir)
    status = 1 if has_failed else 0
    if cluster is not None and cluster.is_stuck:
        _leave_at_once(status)
    return status


def _leave_at_once(status: int) -> NoReturn:
    """Without what Python and Ray do at the end: they would wait for a call that nobody answers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def base_url(host: str, port: int) -> str:
    """The address to use on this machine for a service that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def show_service(console: Console, url: str, model: str, api_key: str | None = None) -> None:
    """Print how to talk to the service, and let it speak first."""
    console.print(f"\n[bold]Baton serves {escape(model)} at {url}[/]\n", highlight=False)
    console.print(curl_line(url, model, api_key is not None), highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n[dim]{QUESTION}[/]", highlight=False)
    for piece in stream_sample(url, model, api_key):
        console.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
    console.print("\n\n[dim]Ctrl-C stops it.[/]", highlight=False)


def _start(
    cluster: RayCluster, config: BatonConfig, token: ClusterToken | None, steps: Steps, stopper: Stopper
) -> None:
    with steps.step("starting Ray"):
        cluster.start()
    stopper.install()  # Ray's core has put a handler before ours that prints a stack
    from cluster.app import build_application

    with steps.step("starting router and workers") as tell:
        if config.autoscaling.is_enabled:
            cluster.declare(config, token)
        else:
            cluster.deploy(build_application(config, token))
        deadline = time.monotonic() + config.cluster.start_timeout_s
        while not cluster.is_running():
            if time.monotonic() > deadline:
                raise StartFailed(f"not up after {config.cluster.start_timeout_s:.0f} s: {cluster.summary()}")
            tell(cluster.summary())
            time.sleep(_STATUS_PERIOD_S)


def _await_answer(config: BatonConfig, url: str, steps: Steps, api_key: str | None) -> str:
    with steps.step("waiting until it can answer") as tell:
        try:
            return wait_until_ready(url, config.cluster.start_timeout_s, tell, api_key)
        except TimeoutError as error:
            raise StartFailed(f"the service does not become ready: {error}") from error


def _stop(cluster: RayCluster | None, config: BatonConfig, console: Console, stopper: Stopper) -> None:
    """A further signal meanwhile ends the processes without waiting for streams."""
    if cluster is None:
        return
    stopper.requested.clear()
    try:
        with stopper.raising(), Steps(console).step("stopping"):
            cluster.stop(config.cluster.drain_timeout_s)
    except StopRequested:
        cluster.end()
