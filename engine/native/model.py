"""Loading a checkpoint into a Transformer of native operators. Owns nothing else. Used at start."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import torch

from engine.model.bundled import cache_folder
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import WeightBytes, load_weights
from engine.native.layers import NativeLayers
from engine.native.linear import NativeLinears
from engine.native.operators import NativeOps
from engine.native.packed_store import PrivateStore, open_store

_log = logging.getLogger(__name__)


def load_native(
    path: Path, config: ModelConfig, num_positions: int, ops: NativeOps, is_shared: bool = False
) -> tuple[Transformer, WeightBytes]:
    """Read the checkpoint in `path`; `is_shared`: its packed weights are those of all workers of the host.

    Raises InvalidConfig when it does not fit `config`.
    """
    weights = load_weights(path, config, keeps_half=True)
    kept = open_store(path, cache_folder() / "packed") if is_shared else nullcontext(PrivateStore())
    with kept as store, torch.inference_mode():
        linears = NativeLinears(ops, weights, path, store)
        layers = NativeLayers(ops, config, weights, linears)
        transformer = Transformer(config, weights, linears, num_positions, [layers])
    num_bytes = linears.num_bytes
    whose = "shared with the workers of this host" if store.is_shared else "of this worker alone"
    _log.info("%s: %.0f MB of packed weights for %s, %s", config.name, num_bytes / 1e6, ops.isa, whose)
    return transformer, WeightBytes(shared=num_bytes) if store.is_shared else WeightBytes(private=num_bytes)
