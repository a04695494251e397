"""A runner over a model with random weights that are made on the device and nowhere saved.

Owns the shapes and the one place that knows how an engine is put together without a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.gpu.layers import TritonLayers
from engine.gpu.linear import DeviceLinears, check_products
from engine.gpu.weights import PlacedWeights
from engine.loaded_model import LoadedModel
from engine.model.config import ModelConfig
from engine.model.rope_config import RopeConfig
from engine.model.transformer import Transformer
from engine.model.weights import EMBEDDING, WeightBytes, expected_tensors
from engine.runner import ModelRunner
from engine.step import StepLimits

LLAMA_3_8B = ModelConfig(
    name="8B shape",
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    max_context=8448,
    is_head_tied=False,
)
TOY = ModelConfig(
    name="toy shape",
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_context=64,
    is_head_tied=False,
)
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class RandomModel:
    """`weight_bytes` are those that a step reads: all but the embedding, of which it takes single rows."""

    runner: ModelRunner
    config: ModelConfig
    dtype: torch.dtype
    weight_bytes: int

    @property
    def name(self) -> str:
        return f"{self.config.name}, {str(self.dtype).removeprefix('torch.')}"

    def prefill_flop(self, num_tokens: int) -> float:
        """Of a whole prompt without the head: two per token and parameter, and causal attention."""
        config = self.config
        num_parameters = sum(
            shape[0] * shape[1]
            for name, shape in expected_tensors(config).items()
            if len(shape) == 2 and name.startswith("layers.")
        )
        attention = 2 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2
        return 2.0 * num_parameters * num_tokens + attention


def make_model(
    config: ModelConfig, device: torch.device, limits: StepLimits, num_kv_blocks: int, block_size: int
) -> RandomModel:
    """In bf16 on the path of a GPU, interpreted where there is none."""
    engine = EngineConfig(
        model=config.name,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="bfloat16",
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_cache=False,
        cpu_kernels="triton",
    )
    weights = _weights(config, _DTYPE, device)
    weight_bytes = sum(tensor.nbytes for key, tensor in weights.items() if key != EMBEDDING)
    runner = ModelRunner(_loaded(config, engine, weights, weight_bytes, device), engine, limits)
    runner.warm_up()
    runner.cache.pool.tensor.uniform_(-1.0, 1.0)  # values that scores can be made of
    return RandomModel(runner, config, _DTYPE, weight_bytes)


def _loaded(
    config: ModelConfig,
    engine: EngineConfig,
    weights: Mapping[str, torch.Tensor],
    weight_bytes: int,
    device: torch.device,
) -> LoadedModel:
    """What `engine.gpu.model.load_triton` and `engine.loaded_model.load_model` do, without a checkpoint."""
    check_products(device, _DTYPE)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    placed = PlacedWeights(weights, device, _DTYPE)
    with torch.inference_mode():
        linears = DeviceLinears(placed)
        layers = TritonLayers(config, placed, linears)
        transformer = Transformer(config, placed, linears, config.max_context, [layers])
    return LoadedModel(
        folder=Path(engine.model),
        config=config,
        transformer=transformer,
        max_context=config.max_context,
        device=device,
        dtype=engine.dtype,
        is_triton=True,
        weight_bytes=WeightBytes(device=weight_bytes),
    )


def _weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Such that values stay near one, and what attention adds is as large as what it is added to."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in expected_tensors(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        spread = 1.0 if name == EMBEDDING else 1.5 * shape[-1] ** -0.5
        weights[name] = (
            tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, spread, generator=generator)
        )
    return weights
