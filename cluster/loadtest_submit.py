"""Running a load test as a job of a Ray cluster: its log is shown while it runs, and its report comes back.

Owns the submission and following the log. The settings, the trace and the tokenizer travel as the job's
working folder; the report comes back in the log, the only way that also works from outside the cluster. Main
thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.loadtest.client import NoAnswer
from cluster.loadtest.parcel import Torn, Unwrapper
from cluster.loadtest.report import LoadReport
from cluster.loadtest.settings import LoadTestSettings
from cluster.ray_environment import token_environment
from core.errors import InvalidConfig

_SETTINGS_FILE = "settings.json"
_MODULE = "cluster.loadtest_job"
_END_POLL_S = 0.2
_TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


def submit_load_test(
    settings: LoadTestSettings,
    address: str,
    variables: dict[str, str],
    python: str | None,
    tell: Callable[[str], None],
) -> LoadReport:
    """Submit, tell each line of the log, and return the report. An interrupt stops the job.

    `address`: of Ray's dashboard, or whatever else Ray's job client takes. `variables` are set in the job;
    who may read the cluster's jobs can read them. `python`: the interpreter there; None: see `entrypoint`.
    Raises NoAnswer if no report came back.
    """
    os.environ.update(token_environment(os.environ))
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="baton-loadtest-") as folder:
        pack(settings, Path(folder))
        try:
            client = JobSubmissionClient(address)
            job_id = client.submit_job(
                entrypoint=entrypoint(address, python),
                runtime_env={"working_dir": folder, "env_vars": variables},
                metadata={"what": "baton loadtest"},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise NoAnswer(f"the job could not be submitted to {address}: {error}") from error
    tell(f"job {job_id} at {address}")
    unwrapper = Unwrapper()
    try:
        status = asyncio.run(_follow(client, job_id, unwrapper, tell))
    except KeyboardInterrupt:
        client.stop_job(job_id)
        raise
    try:
        report = unwrapper.report()
    except Torn as error:
        raise NoAnswer(f"job {job_id}: {error}") from error
    if report is None:
        raise NoAnswer(f"job {job_id} ended without a report ({status})")
    return report


def pack(settings: LoadTestSettings, folder: Path) -> None:
    """Write the settings and the files that they name into `folder`, where they are named by file alone."""
    workload, target = settings.workload, settings.target
    if workload.trace is not None:
        workload = replace(workload, trace=_copied(workload.trace, folder))
    if target.tokenizer is not None:
        target = replace(target, tokenizer=_copied(target.tokenizer, folder))
    packed = asdict(replace(settings, workload=workload, target=target))
    (folder / _SETTINGS_FILE).write_text(json.dumps(packed, default=str), encoding="utf-8")


def _copied(path: Path, folder: Path) -> Path:
    try:
        shutil.copy(path, folder / path.name)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error}", key=str(path)) from error
    return Path(path.name)


async def _follow(client: Any, job_id: str, unwrapper: Unwrapper, tell: Callable[[str], None]) -> str:
    """The job's last status, after its log has ended."""
    async for text in client.tail_job_logs(job_id):
        for line in unwrapper.feed(text):
            tell(line)
    status = client.get_job_status(job_id)
    while not status.is_terminal():
        await asyncio.sleep(_END_POLL_S)
        status = client.get_job_status(job_id)
    return str(status.value).lower()


def entrypoint(address: str, python: str | None) -> str:
    """The job's shell command. Without `python`: this interpreter where the cluster seems to be on this
    machine and it is there, else `python`. An address here may be a tunnel's.
    """
    command = "python"
    if python is not None:
        command = shlex.quote(python)
    elif urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1"):
        command = f'"$(command -v {shlex.quote(sys.executable)} || echo python)"'
    return f"{command} -m {_MODULE} {_SETTINGS_FILE}"
