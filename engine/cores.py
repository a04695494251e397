"""Cores: how many threads a step may use, shared fairly by the workers of one host.

Two workers that both take all cores make each other wait at every barrier of every operator: a decode step
beside a prefill then takes many times as long as on half of the cores. So each worker says in a small mapped
file whether it computes at present, and takes its part of the cores: at its next step, or, with operators
that can (`Division`), at once. A step that only decodes leaves more than its half to one that reads prompts:
it begins later (`Pace`). Owns that file, which is removed with its worker; a killed worker's is removed by
whoever finds it. Used on the step thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
import tempfile
import time
import weakref
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.pace import Pace
from engine.step_costs import StepWork

_SIZE = 16  # two words: which step runs, if any, and when the last one ended (CLOCK_MONOTONIC, nanoseconds)
_IS_STEPPING, _ENDED_AT = 0, 1
_DECODES, _READS = 1, 2  # what the first word says of a step
_LINGER_NS = 20_000_000  # the gap between two steps of a busy worker is shorter
_LOOK_PERIOD_NS = 200_000_000  # how often the folder is read for workers that came or went


@dataclass(frozen=True, slots=True)
class Division:
    """The cores that are divided, and the words in which the other workers say whether they compute.

    `addresses` of those words, in the order of the workers' names, of which `rank` come before this one's;
    valid until the worker's next step.
    """

    num_cores: int
    rank: int
    addresses: ctypes.Array[ctypes.c_void_p]


class CoreShare:
    """One worker's part of `num_cores`; workers that use the same `folder` share them.

    Raises OSError if the folder cannot be used, or is not this user's alone.
    """

    def __init__(self, num_cores: int, folder: Path | None = None, stretch: float = 1.0) -> None:
        """`stretch`: see Pace."""
        self._num_cores = num_cores
        self._pace = Pace(stretch)
        self._folder = folder or Path(tempfile.gettempdir()) / f"baton-cores-{os.getuid()}"
        self._others: dict[str, memoryview] = {}
        self._looked_at = -_LOOK_PERIOD_NS
        self._doing = _READS
        self.was_beside: bool | None = False
        """Whether another worker computed while the last step ran; None: for a part of it only."""
        self._join()
        self._division = self._divide()

    @contextmanager
    def step(self, work: StepWork) -> Iterator[int]:
        """While the body runs this worker counts as computing; gives the number of threads to use."""
        self._doing = _READS if work.num_prefill_tokens else _DECODES
        self._own[_IS_STEPPING] = self._doing
        began_at = time.monotonic_ns()
        num_threads = self._num_threads(began_at)
        was_busy = bool(self._busy(began_at))
        try:
            yield num_threads
        finally:
            ended_at = time.monotonic_ns()
            self._own[_ENDED_AT] = ended_at
            self._own[_IS_STEPPING] = 0
            self.was_beside = self._was_beside(was_busy, began_at, ended_at)
            self._pace.observe(work, began_at / 1e9, ended_at / 1e9, self.was_beside)

    def pause_s(self) -> float:
        """How long the next step should wait, since another worker of the host reads prompts."""
        if all(words[_IS_STEPPING] != _READS for words in self._others.values()):
            return 0.0
        return self._pace.pause_s(time.monotonic_ns() / 1e9)

    @property
    def division(self) -> Division:
        """How the cores are divided in the step that runs."""
        return self._division

    def close(self) -> None:
        """Leave. Safe to call twice; also happens when this object or the process ends."""
        self._close()

    def _join(self) -> None:
        _own(self._folder)
        descriptor, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=self._folder)
        self._path = Path(name)
        self._close = weakref.finalize(self, _remove, self._path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held until the process ends, however it does
        os.ftruncate(descriptor, _SIZE)
        self._own = memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")

    def _num_threads(self, now: int) -> int:
        if now - self._looked_at >= _LOOK_PERIOD_NS:
            self._looked_at = now
            # no descriptor left, a folder that was cleaned away: no step fails for want of a look
            with contextlib.suppress(OSError):
                self._look()
        busy = self._busy(now)
        if not busy:
            return self._num_cores
        part, rest = divmod(self._num_cores, len(busy) + 1)
        rank = sum(name < self._path.name for name in busy)
        return max(1, part + (rank < rest))

    def _was_beside(self, was_busy: bool, began_at: int, ended_at: int) -> bool | None:
        if was_busy:
            return True if self._busy(ended_at) else None
        has_come = any(words[_IS_STEPPING] or words[_ENDED_AT] > began_at for words in self._others.values())
        return None if has_come else False

    def _busy(self, now: int) -> list[str]:
        """The others that compute, or will again at once."""
        return [
            name
            for name, words in self._others.items()
            if words[_IS_STEPPING] or now - words[_ENDED_AT] < _LINGER_NS
        ]

    def _look(self) -> None:
        """Find who came, and clear away what the dead have left. Somebody may have cleared our own away."""
        if self._close.alive and not self._path.exists():
            self._close()
            self._join()
            self._own[_IS_STEPPING] = self._doing
        found = {}
        for entry in os.scandir(self._folder):
            if entry.name == self._path.name:
                continue
            with contextlib.suppress(OSError, ValueError):  # it left meanwhile, or has not quite come
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    if _is_abandoned(descriptor):
                        os.unlink(entry.path)
                        continue
                    found[entry.name] = self._others.get(entry.name) or _words(descriptor)
                finally:
                    os.close(descriptor)
        self._others = found
        self._division = self._divide()

    def _divide(self) -> Division:
        names = sorted(self._others)
        addresses = [np.frombuffer(self._others[name], np.uint64).ctypes.data for name in names]
        array = (ctypes.c_void_p * len(names))(*addresses)
        return Division(self._num_cores, bisect(names, self._path.name), array)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or less by the quota of its control group (v2)."""
    num_cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            num_cores = min(num_cores, max(1, math.ceil(int(quota) / int(period))))
    return num_cores


def _own(folder: Path) -> None:
    """The folder exists, and nobody else can write to it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not folder.is_dir():
        raise PermissionError(f"{folder} is not this user's alone")


def _words(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ)).cast("Q")


def _is_abandoned(descriptor: int) -> bool:
    """Whether its owner has ended: only a living one holds the lock. One that is just being made is empty."""
    if os.fstat(descriptor).st_size < _SIZE:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path, descriptor: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    os.close(descriptor)
