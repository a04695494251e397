"""`baton stop`: end running services of this user, and sweep up after those whose `baton serve` was killed.

Owns finding them by their run folders. Ends only processes of such a run, never by name. Main thread.
"""

from __future__ import annotations

from pathlib import Path

import psutil
from rich.console import Console

from cluster.processes import end_processes, processes_of_run, wait_until_gone
from cluster.run_directory import ServeNote, read_note, remove_run_directory, run_directories

STOP_TIMEOUT_S = 60.0
_SWEEP_GRACE_S = 5.0
_CLOCK_SLACK_S = 1.0


def stop(port: int | None, console: Console) -> None:
    """Stop the services on `port`, or all of this user's."""
    num_stopped = 0
    for run_dir in run_directories():
        note = read_note(run_dir)
        if port is not None and (note is None or not note.url.endswith(f":{port}")):
            continue
        if note is None and processes_of_run(run_dir) and port is None:
            console.print(f"{run_dir} is just starting; left alone")
            continue
        _stop_run(run_dir, note)
        console.print(f"stopped {note.url}" if note is not None else f"removed {run_dir}")
        num_stopped += 1
    if not num_stopped:
        console.print("nothing to stop")


def _stop_run(run_dir: Path, note: ServeNote | None) -> None:
    serving = _serving_process(note)
    if serving is not None:
        serving.terminate()
        wait_until_gone([serving], STOP_TIMEOUT_S)
        root = serving.pid if serving.is_running() else None
        end_processes(processes_of_run(run_dir, root), _SWEEP_GRACE_S)
    else:
        end_processes(processes_of_run(run_dir), _SWEEP_GRACE_S)
    remove_run_directory(run_dir)


def _serving_process(note: ServeNote | None) -> psutil.Process | None:
    """The `baton serve` of the note, unless it is gone and its process id was given to another program."""
    if note is None:
        return None
    try:
        process = psutil.Process(note.pid)
        is_same = abs(process.create_time() - note.started_at) < _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None
