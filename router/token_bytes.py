"""TokenBytes: what each token contributes to a text, as UTF-8 bytes.

Owns the meaning of the tokenizer's decoder, per token and free of context, so that text can be put together
token by token: the joined bytes of an answer, read as UTF-8 with U+FFFD for what is not UTF-8, are the whole
answer. The leading space of SentencePiece-like vocabularies belongs to the token; only the very start of a
prompt loses it (`starts_with_dummy_space`). Filled lazily; used on the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from core.errors import InvalidConfig

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of each token id. `special_ids` are those that `skip_special_tokens` leaves out of a text."""

    def __init__(self, tokenizer: HFTokenizer, decoder: Mapping[str, Any] | None) -> None:
        """`decoder` is that of tokenizer.json. Raises InvalidConfig, naming it, if it cannot be applied by
        token.
        """
        steps = _flatten(decoder)
        self._tokenizer = tokenizer
        self._convert = _converter(steps)
        self.starts_with_dummy_space = any(_strips_first_space(step) for step in steps)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The literal bytes of a token, special or not; empty for an id without a token (padding of the
        vocabulary).
        """
        found = self._known.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._known[token_id] = b"" if token is None else self._convert(token)
        return found

    def label(self, token_id: int) -> str:
        """The token as a client may print it; one that is no whole UTF-8 is `bytes:\\xf0\\x9f…`, as OpenAI
        writes it.
        """
        data = self.of(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of a whole prompt, special tokens written out."""
        text = b"".join(map(self.of, token_ids)).decode("utf-8", "replace")
        return text[1:] if self.starts_with_dummy_space and text.startswith(" ") else text


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise InvalidConfig("tokenizer.json has no decoder", key="decoder")
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("start"))
    return step["type"] == "Metaspace" and bool(step.get("prepend_scheme", "always") != "never")


def _converter(steps: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """One function from a token's vocabulary entry to bytes, made of the decoder's steps."""
    conversions: list[Callable[[str], str]] = []
    has_byte_tokens = is_byte_level = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                conversions.append(_replacer(old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                conversions.append(_replacer(mark, " "))
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "stop": 0}:
                pass
            case _:
                raise InvalidConfig(
                    f"tokenizer.json: decoder {step.get('type')} is not supported as it is used there",
                    key="decoder",
                )
    byte_of = _byte_alphabet()

    def convert(token: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for conversion in conversions:
            token = conversion(token)
        if is_byte_level and all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
        return token.encode("utf-8", "replace")

    return convert


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level vocabularies: printable Latin-1 stands for itself, the rest from U+0100
    on.

    Source: the byte-level BPE of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
