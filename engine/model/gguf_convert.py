"""Converting a GGUF file of the Llama family into a checkpoint folder in Hugging Face format.

Owns tensor names, the dequantization to fp32 and the order of rows. Knows nothing of where the folder lies.
Used once per cache folder; numpy only.

Beside the fp32 weights, the 4-bit blocks are kept as they are in `blocks.q4_1.safetensors`, for an engine
that multiplies them directly. For a weight `W [rows, columns]` named as in `model.safetensors` it holds, with
32 columns per block:

- Q4_1: `W.q` uint8 `[rows, columns/32, 16]`, whose byte j holds column j of the block in its low and column
  j + 16 in its high four bits; `W.scale` and `W.min` float16 `[rows, columns/32]`; value = q * scale + min.
- Q8_0: `W.q` int8 `[rows, columns/32, 32]` and `W.scale` float16 `[rows, columns/32]`; value = q * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from core.errors import InvalidConfig
from engine.model.checkpoint import SINGLE_FILE
from engine.model.checkpoint_json import write_json
from engine.model.gguf_tokenizer import write_tokenizer
from engine.model.names import BLOCKS_FILE
from engine.model.progress import Progress

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS_SHARE = 0.7  # of the whole time; the rest is writing


def convert_gguf(file: Path, folder: Path, progress: Progress) -> None:
    """Write a complete checkpoint made from `file` into the existing, empty `folder`.

    Raises InvalidConfig for an architecture, a tensor or a tokenizer it does not know.
    """
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise InvalidConfig(
            f"GGUF architecture {fields['general.architecture']} is not supported", key="model"
        )
    write_tokenizer(fields, folder, fields["llama.context_length"])
    _write_configs(
        fields, folder, is_head_tied=all(tensor.name != "output.weight" for tensor in reader.tensors)
    )
    weights: dict[str, NDArray[Any]] = {}
    blocks: dict[str, NDArray[Any]] = {}
    for index, tensor in enumerate(reader.tensors):
        name = _canonical_name(tensor.name)
        order = _row_order(tensor.name, fields, rows=int(tensor.shape[-1]))
        data = tensor.data if order is None else tensor.data[order]
        weights[name] = dequantize(data, tensor.tensor_type).astype(np.float32, copy=False)
        blocks.update(_blocks(name, tensor, data))
        progress("reading the bundled weights", _TENSORS_SHARE * (index + 1) / len(reader.tensors))
    metadata = {"format": "pt"}
    save_file(
        {name: np.ascontiguousarray(data) for name, data in weights.items()}, folder / SINGLE_FILE, metadata
    )
    progress("writing the checkpoint", 0.95)
    save_file(blocks, folder / BLOCKS_FILE, {"layout": "see Q4_1 and Q8_0 of the GGUF format"})
    progress("writing the checkpoint", 1.0)


def _write_configs(fields: Mapping[str, Any], folder: Path, *, is_head_tied: bool) -> None:
    hidden, num_heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **ids,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": fields.get("llama.attention.key_length", hidden // num_heads),
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": is_head_tied,
        "torch_dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ids)


def _shortest(value: float) -> float:
    """GGUF stores fp32, so 1e-5 comes back as 9.999999747e-6; meant is the shortest decimal of that fp32."""
    return float(str(np.float32(value)))


def _canonical_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise InvalidConfig(f"GGUF tensor {name} is not known", key="model")


def _row_order(name: str, fields: Mapping[str, Any], rows: int) -> NDArray[np.intp] | None:
    """The rows of q and k in Hugging Face's order.

    GGUF interleaves the two halves of each head, because its rotation pairs neighbours; Hugging Face pairs i
    with i + head_dim / 2. Rows are whole quantization blocks, so the raw data can be reordered likewise.
    """
    if name.endswith("attn_q.weight"):
        num_heads = fields["llama.attention.head_count"]
    elif name.endswith("attn_k.weight"):
        num_heads = fields["llama.attention.head_count_kv"]
    else:
        return None
    return np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _blocks(name: str, tensor: ReaderTensor, data: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The quantized parts of a tensor as laid out in this module's docstring; empty for fp32."""
    kind, rows = tensor.tensor_type, data.shape[0]
    if kind == GGMLQuantizationType.Q4_1:
        raw = data.reshape(rows, -1, 20)
        halves = np.ascontiguousarray(raw[..., :4]).view(np.float16)
        return {
            f"{name}.q": np.ascontiguousarray(raw[..., 4:]),
            f"{name}.scale": np.ascontiguousarray(halves[..., 0]),
            f"{name}.min": np.ascontiguousarray(halves[..., 1]),
        }
    if kind == GGMLQuantizationType.Q8_0:
        raw = data.reshape(rows, -1, 34)
        return {
            f"{name}.q": np.ascontiguousarray(raw[..., 2:]).view(np.int8),
            f"{name}.scale": np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0].copy(),
        }
    if kind != GGMLQuantizationType.F32:
        raise InvalidConfig(f"GGUF tensor type {kind.name} of {tensor.name} is not supported", key="model")
    return {}
