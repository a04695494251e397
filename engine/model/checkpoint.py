"""Checkpoint: the tensors of a folder by name, mapped and not read until used.

Owns finding the safetensors files (one file, or shards with an index) and the canonical names (without the
`model.` prefix that some exporters leave out). Knows nothing of architectures. Used at start, on the loading
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from core.errors import InvalidConfig
from engine.model.checkpoint_json import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PREFIX = "model."
_HALF = frozenset({"F16", "BF16"})
_FLOATING = _HALF | {"F32", "F64"}


class Checkpoint:
    """Named tensors of a folder. Names are canonical: `layers.0.mlp.up_proj.weight`, `lm_head.weight`."""

    def __init__(self, path: Path) -> None:
        """Open the files of `path`. Raises InvalidConfig naming a missing, broken or contradictory file."""
        self.path = path
        self._origins: dict[str, tuple[Any, str]] = {}
        for file in _files(path):
            handle = _open(file)
            for stored in handle.keys():  # noqa: SIM118  (a safetensors handle is not iterable)
                name = stored.removeprefix(_PREFIX)
                if name in self._origins:
                    raise InvalidConfig(f"{file}: tensor {stored} occurs twice in the checkpoint", key=stored)
                self._origins[name] = (handle, stored)
        _check_index(path, self._origins)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._origins)

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored = self._origins[name]
        return tuple(handle.get_slice(stored).get_shape())

    def tensor(self, name: str, *, keeps_half: bool = False) -> torch.Tensor:
        """The tensor in fp32, whatever its stored precision; with `keeps_half` a 16-bit one stays so.

        A tensor that is not converted stays a view of the mapped file.

        Raises InvalidConfig for a stored type that is not floating point (a quantized checkpoint).
        """
        handle, stored = self._origins[name]
        dtype = handle.get_slice(stored).get_dtype()
        if dtype not in _FLOATING:
            raise InvalidConfig(f"tensor {stored} is stored as {dtype}, which is not supported", key=stored)
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor if keeps_half and dtype in _HALF else tensor.to(torch.float32)


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]
) -> None:
    """Compare what a model needs with what the checkpoint has.

    Raises InvalidConfig that lists missing tensors, tensors of another shape, and tensors that nothing would
    use (other than `ignored`): each of them means that the model computed would not be the model meant.
    """
    names = checkpoint.names
    wrong_shapes = [
        f"{name} {list(checkpoint.shape(name))} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in names and checkpoint.shape(name) != shape
    ]
    problems = [
        _listing("missing", sorted(expected.keys() - names)),
        _listing("unexpected", sorted(names - expected.keys() - set(ignored))),
        _listing("of a wrong shape", wrong_shapes),
    ]
    found = "; ".join(problem for problem in problems if problem)
    if found:
        raise InvalidConfig(
            f"checkpoint {checkpoint.path} does not fit its config.json: {found}", key="model"
        )


def _listing(what: str, names: list[str], limit: int = 12) -> str:
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensors {what}: {', '.join(names[:limit])}{more}"


def _files(path: Path) -> list[Path]:
    if (path / INDEX_FILE).exists():
        shards = sorted(set(_weight_map(path).values()))
        absent = [shard for shard in shards if not (path / shard).is_file()]
        if absent:
            raise InvalidConfig(
                f"{INDEX_FILE} names files that are missing: {', '.join(absent)}", key=absent[0]
            )
        return [path / shard for shard in shards]
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    raise InvalidConfig(
        f"no {SINGLE_FILE} or {INDEX_FILE} in {path} (only the safetensors format is supported)", key="model"
    )


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidConfig(f"{INDEX_FILE} has no weight_map of file names", key="weight_map")
    if any(Path(shard).name != shard for shard in weight_map.values()):
        raise InvalidConfig(f"{INDEX_FILE} names files outside its folder", key="weight_map")
    return weight_map


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise InvalidConfig(f"{file} is not a readable safetensors file: {error}", key=file.name) from error


def _check_index(path: Path, origins: Mapping[str, object]) -> None:
    """A tensor that only the index knows means a shard of another download."""
    if (path / INDEX_FILE).exists():
        promised = {name.removeprefix(_PREFIX) for name in _weight_map(path)}
        lost = sorted(promised - origins.keys())
        if lost:
            raise InvalidConfig(
                f"{INDEX_FILE} promises what no shard holds: {_listing('missing', lost)}", key=lost[0]
            )
