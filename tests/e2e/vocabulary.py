"""Vocabulary: between token strings in responses and token ids.

Owns the byte-level spelling of a byte-pair vocabulary. The pieces that tests compare as ids come back from
the server as text or bytes; each id has its own bytes, so nothing is lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.answers import Answer

_BYTES_FORM = re.compile(r"^bytes:((?:\\x[0-9a-f]{2})+)$")


@dataclass(frozen=True)
class Vocabulary:
    """`bytes_of[id]` are a token's bytes; `id_of` the other way round; special tokens spell their names."""

    bytes_of: dict[int, bytes]
    id_of: dict[bytes, int]

    @classmethod
    def from_folder(cls, folder: Path) -> Vocabulary:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        alphabet = {character: byte for byte, character in byte_alphabet().items()}
        bytes_of = {
            token_id: bytes(alphabet[character] for character in text)
            for text, token_id in tokenizer["model"]["vocab"].items()
            if all(character in alphabet for character in text)
        }
        for added in tokenizer["added_tokens"]:
            bytes_of[added["id"]] = added["content"].encode()
        return cls(bytes_of, {data: token_id for token_id, data in bytes_of.items()})

    def id_of_text(self, token: str) -> int:
        """The id of a token as responses spell it: text, or `bytes:\\xf0\\x9f` for a piece of a character."""
        match = _BYTES_FORM.match(token)
        data = bytes.fromhex(match.group(1).replace("\\x", "")) if match else token.encode()
        assert data in self.id_of, f"no token is spelled {token!r}"
        return self.id_of[data]

    def ids_of(self, answer: Answer) -> list[int]:
        """The output ids of an answer that was asked for with logprobs."""
        if answer.token_bytes:
            return [
                self.id_of_text(token) if data is None else self.id_of[data]
                for token, data in zip(answer.tokens, answer.token_bytes, strict=True)
            ]
        return [self.id_of_text(token) for token in answer.tokens]

    def text(self, *token_ids: int) -> str:
        return b"".join(self.bytes_of[token_id] for token_id in token_ids).decode("utf-8", "replace")


def byte_alphabet() -> dict[int, str]:
    """Byte → the printable character that stands for it in a byte-level vocabulary (the GPT-2 scheme).

    Printable Latin-1 bytes stand for themselves, the others for code points from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
