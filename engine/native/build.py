"""Building the operator library: once per source and compiler, into the cache folder.

Owns where the library lies and that it is only ever seen whole: it is linked beside its place and renamed
into it, under a file lock. Knows nothing of the operators. Used at start, from any thread or process.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from engine.model.bundled import cache_folder

_SOURCES = ("ops.cpp", "kernels.h", "linear.h", "attention.h", "team.h")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno")
_TIMEOUT_S = 600.0

_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):  # an answer to "is it there?", not an error of a request
    """Why this machine has no native operators; the message says what to do about it."""


def build_library(folder: Path | None = None) -> Path:
    """The shared library, compiled first if need be (about half a minute).

    `folder` is where it is kept; the cache folder unless given. Raises NativeUnavailable where the processor
    is of another kind, or there is no compiler, or it fails.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NativeUnavailable(f"they are written for x86-64, this machine is {platform.machine()}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (install g++, or set CXX)")
    folder = folder or cache_folder() / "native"
    target = folder / f"ops-{_key(compiler)}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # dropped by the kernel if the process dies
            if not target.exists():
                _compile(compiler, target)
    except OSError as error:
        raise NativeUnavailable(f"{folder} cannot be written: {error}") from error
    return target


def _compile(compiler: str, target: Path) -> None:
    _log.info("compiling the CPU operators with %s into %s", compiler, target)
    making = target.with_suffix(".making")
    source = Path(__file__).with_name("ops.cpp")
    done = _run([compiler, *_FLAGS, str(source), "-o", str(making)])
    if done.returncode != 0:
        making.unlink(missing_ok=True)
        raise NativeUnavailable(f"{compiler} failed:\n{done.stderr.strip()[-2000:]}")
    making.replace(target)


def _key(compiler: str) -> str:
    """Names what the library is made of, so that a change of either makes a new one."""
    version = _run([compiler, "--version"])
    if version.returncode != 0:
        raise NativeUnavailable(f"{compiler} --version failed: {version.stderr.strip()[-500:]}")
    digest = hashlib.sha256("\0".join([version.stdout, *_FLAGS]).encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
