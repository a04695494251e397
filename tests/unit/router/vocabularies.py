"""Small real tokenizers, made for the tests: one byte-level, one SentencePiece-like with byte fallback.

Both can write any text; neither needs a model folder.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from router.tokenizer import Tokenizer

SPECIALS = ("<|end|>", "<|start|>", "<|stop|>")
CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|stop|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
_TEXT = (
    "The quick brown fox jumps over the lazy dog. Here is the English alphabet: ABCDEFGHIJKLMNOP. "
    "stop stopping the end and then the ending of it all, café au lait, über, 日本語, naïve 😀 emoji 🫠."
)


def byte_level(config: dict[str, Any] | None = None) -> Tokenizer:
    """A trained byte-level BPE of about 400 entries; ids 0, 1, 2 are special."""
    tokenizer = HFTokenizer.from_str(_byte_level_json())
    return Tokenizer(tokenizer, _decoder(tokenizer), {"eos_token": "<|stop|>", **(config or {})})


def sentence_piece(config: dict[str, Any] | None = None) -> Tokenizer:
    """Llama-2-like: ▁ for spaces, a leading dummy space, byte fallback, BOS added by the post-processor."""
    words = ["▁Hello", "▁world", "▁", "H", "e", "l", "o", "▁the", "▁a", "b", "c", "!", "é", "▁caf"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = HFTokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(
        tokenizer, _decoder(tokenizer), {"bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    )


def wide_spaces() -> Tokenizer:
    """Byte-level, single characters, and tokens of 2, 4, … 64 spaces."""
    pieces = list(dict.fromkeys([*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]))
    spaces = ["Ġ" * 2**power for power in range(7)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *spaces]))}
    tokenizer = HFTokenizer(models.BPE(vocab=vocabulary, merges=[(half, half) for half in spaces[:-1]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Tokenizer(tokenizer, _decoder(tokenizer), {"eos_token": "<|stop|>"})


@functools.cache
def _byte_level_json() -> str:
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    text: str = tokenizer.to_str()
    return text


def _decoder(tokenizer: HFTokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.to_str())["decoder"]
    return found
