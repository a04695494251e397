"""From any Hugging Face `config.json` to a ModelShape: GQA, MLA, mixtures, sliding windows.

Owns the names that architectures give the same thing, and errors that name the key which is missing. It
counts; whether the engine can run the model is `engine.model.config`'s affair. Pure apart from reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.planner.model_shape import Experts, ModelShape
from core.errors import InvalidConfig
from engine.model.checkpoint_json import read_json

# the same thing under the names that it has in different architectures
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
# two matrices in the feed-forward part, not three; others are gated
_UNGATED = frozenset(
    {
        "gpt2",
        "gpt_neox",
        "gptj",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "starcoder2",
        "gpt_bigcode",
        "nemotron",
    }
)
_WEIGHT_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float8_e4m3fn": 8.0}
_METHOD_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25}
# architectures whose configurations leave out that the head is the input table
_TIED = frozenset(
    {
        "gpt2",
        "gpt_bigcode",
        "gemma",
        "gemma2",
        "gemma3_text",
        "bloom",
        "cohere",
        "cohere2",
        "falcon",
        "mpt",
        "opt",
    }
)


def read_model_shape(path: Path, weight_bits: float | None = None) -> ModelShape:
    """Of a folder or a `config.json`. Raises InvalidConfig naming the file or the key."""
    file = path / "config.json" if path.is_dir() else path
    raw = read_json(file)
    return model_shape(raw, file.resolve().parent.name if path.is_dir() else file.stem, weight_bits)


def model_shape(raw: Mapping[str, Any], name: str, weight_bits: float | None = None) -> ModelShape:
    """`weight_bits`: given instead of what the configuration says. Raises InvalidConfig naming the key that
    is missing, wrong or not understood.
    """
    notes: list[str] = []
    if isinstance(raw.get("text_config"), Mapping):
        notes.append("the text model alone: towers for images or sound are not counted")
        outer = ("torch_dtype", "dtype", "quantization_config")
        raw = {**{key: raw[key] for key in outer if key in raw}, **raw["text_config"]}
    reader = _Reader(raw)
    layers = reader.number(*_LAYERS)
    hidden = reader.number(*_HIDDEN)
    kinds = _layer_kinds(raw, layers)
    is_mla = raw.get("kv_lora_rank") is not None
    attention, kv_values, attention_values = _mla(reader, hidden) if is_mla else _heads(reader, hidden)
    experts, feed_forward = _feed_forward(reader, hidden, layers, notes)
    vocabulary = reader.number("vocab_size") * hidden
    is_tied = bool(raw.get("tie_word_embeddings", raw.get("model_type") in _TIED))
    norms = (2 * layers + 1) * hidden
    return ModelShape(
        name=name,
        kind=_kind(is_mla, experts, reader),
        num_layers=layers,
        windows=kinds,
        kv_values=kv_values,
        kv_parts=1 if is_mla else _num_kv_heads(reader, reader.number(*_HEADS)),
        attention_values=attention_values,
        dense=layers * attention + feed_forward + vocabulary + norms,
        embedding=0 if is_tied else vocabulary,
        experts=experts,
        max_context=reader.optional(*_CONTEXT),
        weight_bits=_weight_bits(raw, notes) if weight_bits is None else weight_bits,
        notes=tuple(notes),
    )


class _Reader:
    """Positive whole numbers under any of several names."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def optional(self, *names: str) -> int | None:
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InvalidConfig(
                    f"config.json: {name} is {value!r}, but must be a whole number above 0", key=name
                )
            return value
        return None

    def number(self, *names: str) -> int:
        value = self.optional(*names)
        if value is None:
            others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
            raise InvalidConfig(f"config.json has no {names[0]}{others}", key=names[0])
        return value


def _heads(reader: _Reader, hidden: int) -> tuple[int, int, int]:
    """(parameters, KV values per token, widths per pair) of one layer of multi-head or grouped attention."""
    heads = reader.number(*_HEADS)
    width = reader.optional("head_dim", "kv_channels", "attention_head_size") or hidden // heads
    kv_heads = _num_kv_heads(reader, heads)
    if heads % kv_heads:
        raise InvalidConfig(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            key="num_key_value_heads",
        )
    parameters = hidden * width * (2 * heads + 2 * kv_heads)
    return parameters, 2 * kv_heads * width, 2 * heads * width


def _num_kv_heads(reader: _Reader, heads: int) -> int:
    raw = reader.raw
    if (
        raw.get("model_type") == "falcon"
        and raw.get("multi_query")
        and not raw.get("new_decoder_architecture")
    ):
        return 1
    if raw.get("model_type") == "gpt_bigcode" and raw.get("multi_query", True):
        return 1
    return reader.optional(*_KV_HEADS) or heads


def _mla(reader: _Reader, hidden: int) -> tuple[int, int, int]:
    """The same of latent attention (DeepSeek-V2, arXiv 2405.04434): latent and rope key are kept.

    The widths per pair are those of reading a prompt, where keys and values are expanded.
    """
    heads = reader.number(*_HEADS)
    latent, rope = reader.number("kv_lora_rank"), reader.number("qk_rope_head_dim")
    nope, value = reader.number("qk_nope_head_dim"), reader.number("v_head_dim")
    query_latent = reader.optional("q_lora_rank")
    query = heads * (nope + rope)
    queries = hidden * query if query_latent is None else query_latent * (hidden + query)
    keys = hidden * (latent + rope) + latent * heads * (nope + value)
    output = heads * value * hidden
    return queries + keys + output, latent + rope, heads * (nope + rope + value)


def _feed_forward(reader: _Reader, hidden: int, layers: int, notes: list[str]) -> tuple[Experts | None, int]:
    """The routed experts, and the parameters of all layers that each step reads (dense, shared, router)."""
    raw = reader.raw
    matrices = 2 if raw.get("model_type") in _UNGATED else 3
    num_experts = reader.optional(*_EXPERTS)
    if num_experts is None or num_experts == 1:
        inner = reader.optional(*_INNER)
        if inner is None:
            inner = 4 * hidden
            notes.append(f"no intermediate_size: taken as 4 x {hidden}")
        return None, layers * matrices * hidden * inner
    inner = reader.optional("moe_intermediate_size", "expert_ffn_hidden_size") or reader.number(*_INNER)
    moe_layers = _num_moe_layers(reader, layers)
    # Llama 4 has one without saying so
    num_shared = 1 if raw.get("model_type") == "llama4_text" else int(raw.get("n_shared_experts") or 0)
    shared = reader.optional("shared_expert_intermediate_size") or inner * num_shared
    dense_inner = reader.optional("intermediate_size_mlp", *_INNER) or inner
    dense = (layers - moe_layers) * matrices * hidden * dense_inner
    always = dense + moe_layers * (matrices * hidden * shared + hidden * num_experts)
    per_token = reader.number(*_PER_TOKEN)
    if per_token > num_experts:
        raise InvalidConfig(
            f"config.json: {per_token} experts per token, but only {num_experts} experts", key=_PER_TOKEN[0]
        )
    return Experts(moe_layers, num_experts, per_token, matrices * hidden * inner), always


def _num_moe_layers(reader: _Reader, layers: int) -> int:
    raw = reader.raw
    first_dense = int(raw.get("first_k_dense_replace") or 0)
    step = reader.optional("decoder_sparse_step", "moe_layer_freq") or 1
    only_dense = frozenset(raw.get("mlp_only_layers") or ())
    if (interleave := reader.optional("interleave_moe_layer_step")) is not None:
        return layers // interleave
    if "decoder_sparse_step" in raw:
        return sum((layer + 1) % step == 0 and layer not in only_dense for layer in range(layers))
    return sum(layer % step == 0 and layer not in only_dense for layer in range(first_dense, layers))


def _layer_kinds(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """How many tokens each layer's KV spans at most. Raises InvalidConfig for layers without such KV."""
    window = raw.get("sliding_window")
    if raw.get("use_sliding_window") is False:
        window = None
    kinds = raw.get("layer_types")
    if kinds is None:
        pattern = raw.get("sliding_window_pattern")
        if window and isinstance(pattern, int) and pattern > 0:
            return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(layers))
        return (window,) * layers
    if len(kinds) != layers:
        raise InvalidConfig(
            f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers {layers}",
            key="layer_types",
        )
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention", "chunked_attention"})
    if unknown:
        raise InvalidConfig(
            f"config.json: layer_types {', '.join(unknown)} keep no KV per token; only full and sliding "
            "attention can be sized",
            key="layer_types",
        )
    local = window or raw.get("attention_chunk_size")
    return tuple(None if kind == "full_attention" else local for kind in kinds)


def _weight_bits(raw: Mapping[str, Any], notes: list[str]) -> float:
    quantization = raw.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(quantization.get("quant_method", ""))
        bits = _quantized_bits(quantization) or _METHOD_BITS.get(method)
        if not isinstance(bits, int | float):
            raise InvalidConfig(
                f"config.json: the bits per weight of quantization_config ({method or 'no method'}) are not "
                "known; give --weights",
                key="quantization_config",
            )
        notes.append(f"weights are quantized ({method}, {bits:g} bits), all of them counted so")
        return float(bits)
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    if name not in _WEIGHT_BITS:
        raise InvalidConfig(
            f"config.json: torch_dtype {name!r} is not known; give --weights", key="torch_dtype"
        )
    # training's float32 is served in 16 bits by everybody; the engine's own choice is engine.dtype
    return min(_WEIGHT_BITS[name], 16.0)


def _quantized_bits(quantization: Mapping[str, Any]) -> Any:
    """As GPTQ and AWQ, bitsandbytes, or compressed-tensors write it; None where nothing is said. Of several
    groups the widest.
    """
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if quantization.get(key) is True:
            return bits
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        widths = [item.get("num_bits") for item in weights if isinstance(item, Mapping)]
        return max((width for width in widths if isinstance(width, int)), default=None)
    return quantization.get("bits") or quantization.get("w_bit")


def _kind(is_mla: bool, experts: Experts | None, reader: _Reader) -> str:
    heads = reader.number(*_HEADS)
    kv_heads = _num_kv_heads(reader, heads)
    attention = "MLA" if is_mla else "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
    return attention if experts is None else f"{attention}, mixture of {experts.num_experts} experts"
