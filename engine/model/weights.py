"""Weights: which tensors a ModelConfig calls for, and their loading from a checkpoint.

Owns the names and shapes of the supported architectures, and the rules for tied heads and left-over tensors.
How a linear layer holds and multiplies its weight is decided in `linear.py`. Used at start, on the loading
thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from core.errors import InvalidConfig
from engine.model.checkpoint import Checkpoint, check_tensors
from engine.model.config import ModelConfig

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"

Weights = Mapping[str, torch.Tensor]
"""Canonical name to tensor: fp32, except matrices that were asked for as they are stored."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Memory that a worker's weights take: of its own, mapped together with other workers of the host, and on
    its GPU. The checkpoint itself is mapped, too, and counts nowhere: the system may drop it.
    """

    private: int = 0
    shared: int = 0
    device: int = 0


def load_weights(path: Path, config: ModelConfig, *, keeps_half: bool = False) -> Weights:
    """All tensors of the model in fp32; with `keeps_half` matrices that are stored in 16 bits stay so.

    Those that are not converted stay mapped views of their file.
    Raises InvalidConfig listing missing, unexpected and misshapen tensors; nothing is filled in or skipped in
    silence.
    """
    checkpoint = Checkpoint(path)
    expected = expected_tensors(config)
    ignored = {name for name in checkpoint.names if name.endswith("rotary_emb.inv_freq")}
    if config.is_head_tied and HEAD in checkpoint.names:
        _log.warning("%s: the head is tied to the embedding; the extra %s is not used", config.name, HEAD)
        ignored.add(HEAD)
    if not config.is_head_tied and HEAD not in checkpoint.names:
        raise InvalidConfig(
            f"checkpoint {path} has no {HEAD}, and config.json does not tie the head to the embedding "
            "(tie_word_embeddings)",
            key=HEAD,
        )
    check_tensors(checkpoint, expected, ignored)
    return {
        name: checkpoint.tensor(name, keeps_half=keeps_half and len(shape) == 2)
        for name, shape in expected.items()
    }


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of each tensor that the model uses; a linear weight is `[out, in]`."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.is_head_tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in _layer_tensors(config).items()})
    return shapes


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.has_qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes


def num_matrix_elements(config: ModelConfig) -> int:
    """Elements of all matrices that a step multiplies with, the head included and the embedding not."""
    shapes = expected_tensors(config)
    head = shapes.pop(EMBEDDING) if config.is_head_tied else shapes.pop(HEAD)
    shapes.pop(EMBEDDING, None)
    return math.prod(head) + sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
