"""The two processes without which a local Ray cluster answers nobody: the GCS and the raylet.

Owns whether they have ended. A signal to the whole process group or control group reaches them beside us, and
calls into Ray then hang for a minute before Ray ends the calling process. Used by one thread at a time.
"""

from __future__ import annotations

import psutil

_NAMES = ("gcs_server", "raylet")


class RayDaemons:
    """Those that this process has started, once `look` has seen them."""

    def __init__(self) -> None:
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        """Get to know those that are new. A child that has ended counts as well, until somebody waits for
        it.
        """
        for child in psutil.Process().children():
            try:
                if child.name() in _NAMES:
                    self._seen.add(child)
            except psutil.NoSuchProcess:
                continue

    def has_any_ended(self) -> bool:
        """Whether one of those ever seen is gone: Ray starts none of them again."""
        self.look()
        return any(_has_ended(process) for process in self._seen)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
