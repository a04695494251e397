"""The tokenizer files of a checkpoint, made from what a GGUF file says of its vocabulary.

Owns the translation of a byte-level BPE vocabulary with the `smollm` pre-tokenizer (digits split one by one,
then GPT-2's pattern) into `tokenizer.json` and its companions. Used once per cache folder, while converting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.errors import InvalidConfig
from engine.model.checkpoint_json import write_json

_CONTROL = 3  # GGUF's token type of special tokens


def write_tokenizer(fields: Mapping[str, Any], folder: Path, max_context: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` into `folder`.

    `fields` are the GGUF's key-value pairs. Raises InvalidConfig for another kind of vocabulary or
    pre-tokenizer.
    """
    kind, pre_tokenizer = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (kind, pre_tokenizer) != ("gpt2", "smollm"):
        raise InvalidConfig(
            f"GGUF tokenizer {kind} with pre-tokenizer {pre_tokenizer} is not supported", key="model"
        )
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    special_ids = [
        i for i, token_type in enumerate(fields["tokenizer.ggml.token_type"]) if token_type == _CONTROL
    ]
    tokenizer = _tokenizer(tokens, fields["tokenizer.ggml.merges"], special_ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    write_json(folder / "special_tokens_map.json", names)
    config = {
        **names,
        "add_bos_token": bool(fields["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": bool(fields["tokenizer.ggml.add_space_prefix"]),
        "added_tokens_decoder": {str(i): _special_entry(tokens[i]) for i in special_ids},
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)


def _tokenizer(tokens: Sequence[str], merges: Sequence[str], special_ids: Sequence[int]) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # GGUF names this chain "smollm". Without the digits step, numbers after blanks are cut differently.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special_ids])
    return tokenizer


def _special_entry(token: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": token, **flags}
