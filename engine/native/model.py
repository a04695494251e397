"""Loading a checkpoint into a Transformer of native operators. Owns nothing else. Used at start."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_weights
from engine.native.layers import NativeLayers
from engine.native.linear import NativeLinears
from engine.native.operators import NativeOps

_log = logging.getLogger(__name__)


def load_native(path: Path, config: ModelConfig, num_positions: int, ops: NativeOps) -> Transformer:
    """Read the checkpoint in `path`. Raises InvalidConfig when it does not fit `config`."""
    weights = load_weights(path, config, keeps_half=True)
    with torch.inference_mode():
        linears = NativeLinears(ops, weights, path)
        layers = NativeLayers(ops, config, weights, linears)
        transformer = Transformer(config, weights, linears, num_positions, [layers])
    _log.info("%s: %.0f MB of packed weights for %s", config.name, linears.num_bytes / 1e6, ops.isa)
    return transformer
