"""The parts of a system on Ray as processes: which pid is a worker, the registry or the router.

Owns the reading of process titles, which Ray sets to `ray::<class or replica>`. For tests that kill or weigh
one of them.
"""

from __future__ import annotations

import time

import psutil

from tests.e2e.harness import System


def titled(system: System, words: str) -> list[psutil.Process]:
    """Processes of the system whose title contains `words`, oldest first."""
    found = []
    for process in system.processes():
        try:
            if words in " ".join(process.cmdline()):
                found.append((process.create_time(), process))
        except psutil.NoSuchProcess:
            continue
    return [process for _, process in sorted(found, key=lambda pair: pair[0])]


def workers(system: System, role: str) -> list[psutil.Process]:
    """The replicas of `prefill` or `decode`."""
    return [
        process
        for process in titled(system, "ray::ServeReplica")
        if f":{role}" in " ".join(process.cmdline())
    ]


def registry(system: System) -> psutil.Process:
    (process,) = titled(system, "ray::Registry")
    return process


def busiest(processes: list[psutil.Process], seconds: float = 0.4) -> psutil.Process:
    """The one that used most CPU time meanwhile."""

    def used(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = {process.pid: used(process) for process in processes}
    time.sleep(seconds)
    return max(processes, key=lambda process: used(process) - before[process.pid])
