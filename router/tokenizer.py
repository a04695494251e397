"""Tokenizer: text to token ids, as the model folder's Hugging Face files say.

Owns reading `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`, added and special
tokens, and the rule that a prompt begins with one BOS at most. Does not own templates (`chat_template`) or
decoding (`token_bytes`). Encoding is a pure function that releases the interpreter lock, so long texts may be
encoded on another thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from core.errors import InvalidConfig, InvalidRequest
from router.model_files import read_json_object, token_text
from router.token_bytes import TokenBytes

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes prompts. `bytes` says what tokens look like, `named_tokens` is what templates call `bos_token`
    and so on.
    """

    def __init__(self, tokenizer: HFTokenizer, decoder: Mapping[str, Any] | None, config: Mapping[str, Any]):
        """`config` is tokenizer_config.json with special_tokens_map.json below it."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add_tokens(tokenizer, config)
        self.named_tokens = {
            name: text for name in _NAMED_TOKENS if (text := token_text(config.get(name))) is not None
        }
        _add_special_texts(tokenizer, config, self.named_tokens)
        self._tokenizer = tokenizer
        self.bytes = TokenBytes(tokenizer, decoder)
        bos = self.named_tokens.get("bos_token")
        self.bos_token_id: int | None = tokenizer.token_to_id(bos) if bos is not None else None
        adds_bos = config.get("add_bos_token")
        self._adds_bos = adds_bos if isinstance(adds_bos, bool) else None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the folder's files; only tokenizer.json is required. Raises InvalidConfig naming the file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidConfig(f"the model has no tokenizer.json in {folder}", key="tokenizer.json")
        try:
            text = path.read_text(encoding="utf-8")
            tokenizer = HFTokenizer.from_str(text)
            decoder = json.loads(text).get("decoder")
        # the library raises plain Exception for a file it cannot use
        except Exception as error:
            raise InvalidConfig(f"tokenizer.json cannot be used: {error}", key="tokenizer.json") from error
        config = read_json_object(folder / "special_tokens_map.json")
        config |= read_json_object(folder / "tokenizer_config.json")
        return cls(tokenizer, decoder, config)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain prompt, with the BOS that the tokenizer adds; never two, even if the text brings
        one.
        """
        ids = self._encode(text, add_special_tokens=True)
        bos = self.bos_token_id
        if bos is None:
            return ids
        has_own = text.startswith(self.named_tokens["bos_token"])
        num_bos = 2 if ids[:2] == [bos, bos] else int(ids[:1] == [bos])
        if num_bos == 2 and has_own:
            return ids[1:]
        if self._adds_bos is False and num_bos == 1 and not has_own:
            return ids[1:]
        if self._adds_bos is True and num_bos == 0:
            return [bos, *ids]
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a rendered template, which writes its own BOS if it wants one."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds lone surrogates, which are no characters") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _add_tokens(tokenizer: HFTokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, at the ids it gives them."""
    listed = config.get("added_tokens_decoder") or {}
    known = tokenizer.get_added_tokens_decoder()
    for token_id, entry in sorted(
        ((int(key), entry) for key, entry in listed.items()), key=lambda item: item[0]
    ):
        if token_id in known:
            continue
        flags = {
            name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")
        }
        normalized = bool(entry.get("normalized", not flags["special"]))
        token = AddedToken(entry["content"], normalized=normalized, **flags)
        add = tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens
        add([token])
        if tokenizer.token_to_id(entry["content"]) != token_id:
            raise InvalidConfig(
                f"tokenizer_config.json puts added token {entry['content']!r} at id {token_id}, "
                f"tokenizer.json leads to {tokenizer.token_to_id(entry['content'])}",
                key="added_tokens_decoder",
            )


def _add_special_texts(tokenizer: HFTokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Make the named and the additional special tokens special, as far as the vocabulary has them."""
    additional = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    values = additional.values() if isinstance(additional, dict) else additional
    texts = [*named.values(), *(text for value in values if (text := token_text(value)) is not None)]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in texts if text not in special and tokenizer.token_to_id(text) is not None]
    if missing:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
