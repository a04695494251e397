"""The reference: toy checkpoints and what Hugging Face transformers computes for them.

Owns the factory of small random checkpoints and the reference logits and greedy tokens, in fp32 on the CPU.
It is the only place that imports transformers, and it does so lazily, so that tests which need no reference
do not pay for it. It does not own tolerances: what counts as equal is said by each test.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

ABSENT: Final = object()
"""As a value in ``edit_config``: remove the key."""

ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

ROPE_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def make_toy_checkpoint(
    folder: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    rope: str = "default",
    rope_spelling: str = "rope_parameters",
    dtype: torch.dtype = torch.float32,
    bias_std: float = 1.0,
    tokenizer_from: Path | None = None,
    **overrides: Any,
) -> Path:
    """Write a small random checkpoint in Hugging Face format and return its folder.

    Shape unless overridden: 2 layers, hidden 64, 4 heads, 2 KV heads, head_dim 16, FFN 128, vocabulary 512.
    Weights come from ``initializer_range`` 0.2, so that the logits of different tokens lie well apart and
    greedy decoding is exact; biases from N(0, ``bias_std``) and norm weights from U(0.5, 1.5), so that
    dropping one of them cannot go unseen.

    ``rope_spelling`` is ``rope_parameters`` (the newer block), ``rope_type`` or ``type`` (both inside
    ``rope_scaling``). ``tokenizer_from`` copies the tokenizer files of another folder; the vocabulary is then
    49,152 unless overridden. ``overrides`` are keys of the model's configuration.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, ARCHITECTURES[arch])
    fields: dict[str, Any] = {
        "vocab_size": 512 if tokenizer_from is None else 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": rope, "rope_theta": 10000.0, **ROPE_KINDS[rope]},
    }
    if arch == "mistral":
        fields["sliding_window"] = None
    fields.update(overrides)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, bias_std)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder)
    if rope_spelling != "rope_parameters":
        parameters = dict(fields["rope_parameters"])
        theta = parameters.pop("rope_theta", 10000.0)
        kind = parameters.pop("rope_type", "default")
        scaling = None if kind == "default" else {rope_spelling: kind, **parameters}
        edit_config(folder, rope_parameters=ABSENT, rope_theta=theta, rope_scaling=scaling)
    if tokenizer_from is not None:
        copy_tokenizer(tokenizer_from, folder)
    return folder


def edit_config(folder: Path, file: str = "config.json", **changes: Any) -> None:
    """Change keys of a JSON file of the checkpoint; the value ``ABSENT`` removes the key."""
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    content = {key: value for key, value in content.items() if value is not ABSENT}
    path.write_text(json.dumps(content, indent=2))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files that ``source`` has into ``folder``."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


@functools.lru_cache(maxsize=4)
def _load(folder: str, stamp: tuple[int, ...]) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # Eager attention in fp32: the plainest arithmetic that transformers has.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def load_oracle(folder: Path) -> Any:
    """The transformers model of the folder in fp32, kept between calls until one of its files changes."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
    return _load(str(folder), tuple(path.stat().st_mtime_ns for path in files))


@torch.inference_mode()
def oracle_logits(folder: Path, ids: Sequence[int], num_last: int = 0) -> torch.Tensor:
    """Reference logits after each token of ``ids`` (or its last ``num_last``): fp32 ``[n, vocab_size]``."""
    model = load_oracle(folder)
    result = model(torch.tensor([list(ids)]), logits_to_keep=num_last, use_cache=False)
    logits: torch.Tensor = result.logits[0]
    return logits.float()


@torch.inference_mode()
def oracle_greedy(folder: Path, ids: Sequence[int], num_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """The next ``num_tokens`` greedy tokens (fewer if one of ``eos`` comes, which is then the last)."""
    import transformers

    model = load_oracle(folder)
    cache = transformers.DynamicCache(config=model.config)
    tokens: list[int] = []
    step = list(ids)
    while len(tokens) < num_tokens:
        logits = model(torch.tensor([step]), cache=cache, use_cache=True).logits
        step = [int(logits[0, -1].argmax())]
        tokens += step
        if step[0] in eos:
            break
    return tokens
