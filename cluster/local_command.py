"""`baton serve --local`: the whole system in this process, HTTP by uvicorn.

Owns the order of start and stop without Ray. The main thread runs the asyncio loop; readiness and the sample
are asked for over HTTP from another thread, as a client would.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import psutil
import uvicorn
from rich.console import Console

from cluster.access import with_start_key
from cluster.config import BatonConfig
from cluster.local_http import PlainHTTP
from cluster.log_config import LogLevel
from cluster.logs import configure_logging
from cluster.model_folder import prepare_model
from cluster.ports import choose_port
from cluster.run_directory import ServeNote, create_run_directory, remove_run_directory, write_note
from cluster.sample import wait_until_ready
from cluster.serve_command import base_url, show_service
from cluster.steps import Steps
from cluster.stopper import Stopper, StopRequested
from core.errors import InvalidConfig

_LAST_EVENTS_S = 5.0

if TYPE_CHECKING:
    from cluster.local import LocalSystem


def serve_local(config: BatonConfig, console: Console) -> int:
    """Start, stay until SIGINT or SIGTERM, stop. Returns the exit status."""
    if config.autoscaling.is_enabled:
        message = "autoscaling.is_enabled has no meaning with --local: one process keeps the workers it has"
        raise InvalidConfig(message, key="autoscaling.is_enabled")
    config, api_key = with_start_key(config)
    configure_logging(config.logging, LogLevel.WARNING)
    stopper = Stopper()
    stopper.install()
    run_dir = create_run_directory()
    try:
        with stopper.raising():
            port = choose_port(config.cluster.host, config.cluster.port)
            url = base_url(config.cluster.host, port)
            write_note(run_dir, ServeNote(os.getpid(), psutil.Process().create_time(), url))
            steps = Steps(console)
            config = prepare_model(config, steps)
            with steps.step("loading the engines"):
                from cluster.local import LocalSystem  # torch takes seconds to import

                system = LocalSystem(config)
        asyncio.run(_serve(system, config, port, lambda: _greet(config, url, console, api_key)))
    except StopRequested:
        console.print("stopped before the start was complete")
    finally:
        remove_run_directory(run_dir)
    return 0


class _Server(uvicorn.Server):
    """Ends requests that are open `drain_timeout_s` after the first signal; a second signal cuts them."""

    def __init__(
        self, config: uvicorn.Config, drain_timeout_s: float, end_requests: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._drain_timeout_s = drain_timeout_s
        self._end_requests = end_requests
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._loop.call_later, self._drain_timeout_s, self._end_requests)


async def _serve(system: LocalSystem, config: BatonConfig, port: int, greet: Callable[[], None]) -> None:
    """Until a signal; uvicorn takes both signals over."""
    cluster = config.cluster
    server = _Server(
        uvicorn.Config(
            system.app,
            http=PlainHTTP,
            host=cluster.host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=math.ceil(cluster.drain_timeout_s + _LAST_EVENTS_S),
        ),
        cluster.drain_timeout_s,
        system.app.state.close,
    )
    await system.start()
    try:
        serving = asyncio.create_task(server.serve())
        greeting = asyncio.create_task(asyncio.to_thread(greet))
        await asyncio.wait((serving, greeting), return_when=asyncio.FIRST_COMPLETED)
        if greeting.done():
            greeting.result()
        await serving
    finally:
        await system.stop()


def _greet(config: BatonConfig, url: str, console: Console, api_key: str | None) -> None:
    with Steps(console).step("waiting until it can answer") as tell:
        model = wait_until_ready(url, config.cluster.start_timeout_s, tell, api_key)
    show_service(console, url, model, api_key)
