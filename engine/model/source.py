"""From the name of a model to a checkpoint folder on this machine.

Owns the order in which a name is understood: the bundled model, a folder, a repository on the Hugging Face
hub. Used at start, from any thread; downloads and converts, so it may take minutes.
"""

from __future__ import annotations

import re
from pathlib import Path

from core.errors import InvalidConfig
from engine.model.bundled import prepare_bundled_model
from engine.model.names import BUNDLED_MODEL
from engine.model.progress import Progress

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.safetensors", "*.jinja")
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The folder of the model `name`, prepared or downloaded first if need be.

    Raises InvalidConfig when there is no such folder, or when the hub has no such repository or cannot be
    reached.
    """
    if name == BUNDLED_MODEL:
        return prepare_bundled_model(progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not _REPOSITORY.fullmatch(name):
        raise InvalidConfig(
            f"model {name!r} is neither a folder, nor {BUNDLED_MODEL}, nor a repository written owner/name",
            key="model",
        )
    return _download(name, progress)


def _download(name: str, progress: Progress | None) -> Path:
    # Imported here: it takes a while, and most starts do not need it.
    import huggingface_hub

    if progress is not None:
        progress(f"downloading {name}", 0.0)
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise InvalidConfig(
            f"model {name} is no folder here and the hub did not give it ({type(error).__name__}: {error})",
            key="model",
        ) from error
    if progress is not None:
        progress(f"downloading {name}", 1.0)
    return Path(folder)
