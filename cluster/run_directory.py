"""The folder of one running `baton serve`: sockets, Ray's session and the note by which `baton stop` finds
it.

Owns its place, its content and its removal. Plain files; any thread.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from core.errors import InvalidConfig

_NOTE = "serve.json"

# HAProxy adds 76 to 86 characters for its socket below a run's folder (7 characters), and a path ends at 107
MAX_ROOT_LENGTH = 18


@dataclass(frozen=True, slots=True)
class ServeNote:
    """What `baton stop` needs to know. `started_at` guards against a process id that was given away again."""

    pid: int
    started_at: float
    url: str


def runs_root() -> Path:
    """This user's folder for runs, private to them, in $TMPDIR unless that is too long for socket paths."""
    root = Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"
    if len(str(root)) > MAX_ROOT_LENGTH:
        root = Path("/tmp") / root.name
    root.mkdir(mode=0o700, exist_ok=True)
    owner = root.lstat()
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise InvalidConfig(f"{root} must be a folder that only this user can enter", key=str(root))
    return root


def create_run_directory() -> Path:
    """A new empty folder under `runs_root()`."""
    path = runs_root() / secrets.token_hex(3)
    path.mkdir(mode=0o700)
    (path / "h").mkdir()
    (path / "r").mkdir()
    return path


def write_note(run_dir: Path, note: ServeNote) -> None:
    """Atomically: a reader sees a whole note or none."""
    partial = run_dir / f"{_NOTE}.tmp"
    partial.write_text(json.dumps(asdict(note)), encoding="utf-8")
    partial.replace(run_dir / _NOTE)


def read_note(run_dir: Path) -> ServeNote | None:
    """The run's note, None while it has none yet or when it cannot be read."""
    try:
        return ServeNote(**json.loads((run_dir / _NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def run_directories() -> list[Path]:
    return sorted(path for path in runs_root().iterdir() if path.is_dir())


def remove_run_directory(run_dir: Path) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)
