"""Prompts: token ids of whole words, and the facts about SmolLM2's vocabulary that the tests lean on.

Owns prompt material only. Ids are taken from whole ASCII words, because a byte-piece id would leave half a
character at the end of the prompt and the text after it has no agreed form.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path

HELLO = 33662
END_OF_TEXT, IM_START, IM_END = 0, 1, 2

FACTS: dict[str, tuple[int, ...]] = {
    "The capital of France is": (504, 3575, 282, 4649, 314),
    " Paris": (7042,),
    " the": (260,),
    " a": (253,),
    " Yes": (9230,),
    " yes": (9805,),
    " no": (787,),
    "\n": (198,),
    " ": (216,),
    " ".join(["hello"] * 8): (28120, *[HELLO] * 7),
    "DEFGHIJ": (33203, 23960, 57, 58),
    "😀": (10813, 242, 218),
    "🫠": (10813, 121, 250),
    "🦙": (10813, 116, 243),
    "龜": (180, 139, 246),
    "日本語": (23274, 115, 40993, 179, 120, 248),
    "12345": (33, 34, 35, 36, 37),
    "a    b": (81, 333, 278),
    "a\r\nb": (81, 201, 198, 82),
    "def f(x):\n    return x\n": (1604, 275, 24, 104, 727, 472, 1003, 1792, 198),
    "a\n\n\nb": (81, 1116, 198, 82),
}
"""Text → ids, as the original tokenizer has them."""

LENGTHS: dict[str, int] = {
    "👨‍👩‍👧": 13,
    "3.14": 4,
    "Café déjà vu — 123": 13,
    "I'm I'll we've": 6,
    "x" * 50: 13,
}
"""Text → number of ids, where the ids themselves are not written down."""

HI_CHAT_TOKENS = 31
"""A chat of the single user message "hi": the template inserts its default system turn."""


@functools.lru_cache(maxsize=4)
def word_ids(tokenizer_folder: Path) -> tuple[int, ...]:
    """Ids whose text is a blank and a lower-case ASCII word of at least three letters."""
    vocabulary: dict[str, int] = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    return tuple(
        sorted(
            token_id
            for text, token_id in vocabulary.items()
            if len(text) > 3
            and text[0] == "Ġ"
            and text[1:].isascii()
            and text[1:].isalpha()
            and text[1:].islower()
        )
    )


def random_ids(tokenizer_folder: Path, length: int, seed: int) -> list[int]:
    """`length` word ids, the same for the same seed; two seeds share no prefix worth a block."""
    words = word_ids(tokenizer_folder)
    generator = random.Random(f"prompt {seed}")
    return [generator.choice(words) for _ in range(length)]


def prompts_of_lengths(tokenizer_folder: Path, lengths: Sequence[int], seed: int) -> list[list[int]]:
    return [random_ids(tokenizer_folder, length, seed * 100_003 + i) for i, length in enumerate(lengths)]


PROSE = (
    "Once upon a time",
    "The three states of matter are",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,",
    "Mix the flour with the eggs, then",
    "In 1969 the first human being",
)
"""Raw texts whose continuations are ordinary language."""

CHATS = (
    "hi",
    "Say: café 😀",
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about rivers.",
    "Count from one to ten.",
    "Translate 'good morning' into Spanish.",
    "Name three primary colours.",
)
"""User messages of a chat with the default system turn."""
