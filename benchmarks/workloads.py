"""Workloads A to D: which prompts are sent when, the same for every server that is compared.

- A: one stream, 128 prompt tokens, 128 tokens out.
- B: 16 requests at once, prompts of 64 to 512 tokens (3,991 in all), outputs of 16 to 256 (2,037 in all).
- C: 32 requests, 8 at a time: a shared prefix of 1,024 tokens and 32 of their own, 32 tokens out.
- D: eight running streams (128 prompt tokens); once each has sent 16 tokens a prompt of 1,500 arrives.

Owns lengths and texts. Prompts are English prose, cut so that the model's tokenizer gives exactly the wanted
number of tokens, each beginning with a random word of its own: no cached prefix helps from one run to the
next, and within C only the shared one does. Pure apart from reading the tokenizer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.streaming import Ask

CORPUS = Path(__file__).resolve().parents[1] / "LICENSE"
SHAPE_SEED = 1234
NUM_RUNNING = 8
NUM_TOKENS_BEFORE = 16
_TAG_LETTERS = 8


class Workload(StrEnum):
    """The letters are those of the module's text."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"


@dataclass(frozen=True, slots=True)
class Shape:
    """One request's lengths."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent as soon as one of `concurrency` places is free."""

    asks: tuple[Ask, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Interruption:
    """Workload D: `long` arrives while all of `running` stream."""

    running: tuple[Ask, ...]
    long: Ask


class Prompts:
    """Texts of an exact number of tokens."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer` is the model's tokenizer.json."""
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        words = CORPUS.read_text(encoding="utf-8").split()
        self._words = [*words, *words]  # a start anywhere leaves a whole corpus to read

    def ask(self, num_prompt_tokens: int, max_tokens: int, chance: random.Random, prefix: str = "") -> Ask:
        """The prompt is `prefix`, a random word and prose, `num_prompt_tokens` in all."""
        text = self.text(num_prompt_tokens, chance, prefix)
        return Ask(text, num_prompt_tokens, max_tokens)

    def text(self, num_tokens: int, chance: random.Random, prefix: str = "") -> str:
        """Raises ValueError when the tokenizer allows no text of that length."""
        tag = "".join(chance.choice("abcdefghij") for _ in range(_TAG_LETTERS))
        start = chance.randrange(len(self._words) // 2)
        prose = " ".join([tag, *self._words[start : start + len(self._words) // 2]])
        whole = prefix + prose
        offsets = self._tokenizer.encode(whole, add_special_tokens=False).offsets
        if len(offsets) < num_tokens:
            raise ValueError(f"the corpus has no {num_tokens} tokens")
        for num_kept in range(num_tokens, max(num_tokens - 16, 0), -1):
            # a cut inside a word may be tokenized differently: then cut earlier and fill up
            text = whole[: offsets[num_kept - 1][1]]
            while (count := self._count(text)) < num_tokens:
                text += " a"
            if count == num_tokens and len(text) > len(prefix) + len(tag):
                return text
        raise ValueError(f"no text of {num_tokens} tokens found")

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def shapes_of_b() -> list[Shape]:
    """The lengths of workload B, the same in every run."""
    chance = random.Random(SHAPE_SEED)
    return [Shape(chance.randint(64, 512), chance.randint(16, 256)) for _ in range(16)]


def make_workload(workload: Workload, prompts: Prompts, run: int) -> Batch | Interruption:
    """The texts of run number `run`: the same for each server, others in each run."""
    chance = random.Random(f"{workload.value} {run}")
    match workload:
        case Workload.A:
            return Batch((prompts.ask(128, 128, chance),), 1)
        case Workload.B:
            asks = [
                prompts.ask(shape.num_prompt_tokens, shape.num_output_tokens, chance)
                for shape in shapes_of_b()
            ]
            return Batch(tuple(asks), len(asks))
        case Workload.C:
            prefix = prompts.text(1024, chance) + "\n"
            return Batch(tuple(prompts.ask(1024 + 32, 32, chance, prefix) for _ in range(32)), 8)
        case Workload.D:
            running = tuple(prompts.ask(128, 256, chance) for _ in range(NUM_RUNNING))
            return Interruption(running, prompts.ask(1500, 16, chance))


def warm_up(prompts: Prompts) -> list[Batch]:
    """The shapes of the workloads once, so that no server pays for a first use in a measurement. The first
    batch is a single request whose text shows that servers agree.
    """
    chance = random.Random("warm-up")
    return [
        Batch((prompts.ask(64, 24, chance),), 1),
        Batch(tuple(prompts.ask(200, 24, chance) for _ in range(8)), 8),
        Batch(tuple(prompts.ask(64, 8, chance) for _ in range(16)), 16),
        Batch((prompts.ask(1500, 4, chance),), 1),
    ]
