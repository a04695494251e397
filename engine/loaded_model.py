"""LoadedModel: weights in memory, ready to compute; no pool, no state.

Owns the way from the configured name to a Transformer on its device. Made once at start; immutable, so the
workers of one process can share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.errors import InvalidConfig
from engine.config import EngineConfig
from engine.kv.pool import TORCH_DTYPES
from engine.model.config import ModelConfig
from engine.model.progress import Progress
from engine.model.source import resolve_model
from engine.model.transformer import Transformer
from engine.model.weights import WeightBytes, num_matrix_elements
from engine.native.choice import choose_ops
from engine.native.model import load_native
from engine.native.operators import NativeOps


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`max_context` is the model's, or less if the configuration caps it.

    `ops` are the native operators that `transformer` is made of, which then need an attention backend of
    theirs; None for plain torch. With `is_triton` it is made of Triton kernels, with weights in `dtype`.
    """

    folder: Path
    config: ModelConfig
    transformer: Transformer
    max_context: int
    device: torch.device
    ops: NativeOps | None = None
    dtype: str = "float32"
    is_triton: bool = False
    weight_bytes: WeightBytes = field(default_factory=WeightBytes)


def load_model(config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Find, check and load the model that `config` names.

    Raises InvalidConfig for a model that cannot be had or computed, a context beyond the model's, or an
    absent device.
    """
    folder = resolve_model(config.model, progress)
    model_config = ModelConfig.from_folder(folder)
    if config.max_context > model_config.max_context:
        raise InvalidConfig(
            f"max_context {config.max_context} is more than the {model_config.max_context} that "
            f"{model_config.name} was made for",
            key="engine.max_context",
        )
    max_context = config.max_context or model_config.max_context
    device = _device(config.device)
    if progress is not None:
        progress(f"loading {model_config.name}", 0.0)
    num_bytes = _allocated(device)
    ops = choose_ops(config, model_config)
    if config.uses_triton:
        from engine.gpu.model import load_triton  # loads triton, which a CPU need not have

        dtype = TORCH_DTYPES[config.dtype]
        transformer = load_triton(folder, model_config, max_context, device, dtype)
        weight_bytes = WeightBytes(device=_allocated(device) - num_bytes)
    elif ops is None:
        transformer = Transformer.load(folder, model_config, max_context, device)
        weight_bytes = WeightBytes(private=num_matrix_elements(model_config) * torch.float32.itemsize)
    else:
        transformer, weight_bytes = load_native(
            folder, model_config, max_context, ops, config.share_packed_weights
        )
    if progress is not None:
        progress(f"loading {model_config.name}", 1.0)
    return LoadedModel(
        folder,
        model_config,
        transformer,
        max_context,
        device,
        ops,
        config.dtype,
        config.uses_triton,
        weight_bytes,
    )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device cuda was asked for, but torch sees none", key="engine.device")
    return torch.device(name)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
