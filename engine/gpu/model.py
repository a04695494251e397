"""Loading a checkpoint into a Transformer of Triton kernels. Owns the process' rules for matrix products and
the refusal of what the kernels cannot compute. Used at start.
"""

from __future__ import annotations

from pathlib import Path

import torch

from core.errors import InvalidConfig
from engine.gpu.layers import TritonLayers
from engine.gpu.linear import DeviceLinears, check_products
from engine.gpu.weights import PlacedWeights
from engine.kernels.jit import is_interpreted
from engine.kernels.paged_softmax import attend
from engine.model.config import ModelConfig
from engine.model.transformer import Transformer
from engine.model.weights import load_weights

_MAX_HEAD_DIM = 256


def load_triton(
    path: Path, config: ModelConfig, num_positions: int, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """Read the checkpoint in `path`; matrices, norms of the layers, activations and KV are in `dtype`.

    Raises InvalidConfig when it does not fit `config`, for a head size beyond the kernels', and for a CPU
    whose kernels are not loaded for the interpreter.
    """
    if device.type == "cpu" and not is_interpreted(attend):
        raise InvalidConfig(
            "on a CPU Triton's kernels run in its interpreter only: set TRITON_INTERPRET=1 before the start",
            key="engine.cpu_kernels",
        )
    if config.head_dim > _MAX_HEAD_DIM:
        raise InvalidConfig(
            f"the model's head size {config.head_dim} is more than the kernels' {_MAX_HEAD_DIM}",
            key="engine.device",
        )
    check_products(device, dtype)
    if device.type == "cuda":
        # sums of split products stay fp32; both are torch's settings for the whole process
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    weights = PlacedWeights(load_weights(path, config, keeps_half=True), device, dtype)
    with torch.inference_mode():
        linears = DeviceLinears(weights)
        layers = TritonLayers(config, weights, linears)
        return Transformer(config, weights, linears, num_positions, [layers])
