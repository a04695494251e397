"""Detokenizer: bytes of tokens in, whole characters out, without looking back.

Owns at most three bytes of an unfinished UTF-8 character. Linear in the length of the answer. One per sample;
used on the event loop.
"""

from __future__ import annotations

import codecs

_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The pieces returned by `feed` and `flush`, joined, equal the whole bytes decoded with U+FFFD for
    invalid ones.
    """

    def __init__(self) -> None:
        self._decoder = _decoder(errors="replace")

    def feed(self, data: bytes) -> str:
        """The characters that are whole after `data`; a character split over tokens is held back."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD if a character never became whole."""
        return self._decoder.decode(b"", final=True)
