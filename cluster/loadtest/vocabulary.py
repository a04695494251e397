"""Vocabulary: words that the server's tokenizer reads as one token each, so that any length can be written.

Owns the candidates and how they are tried. What counts is an argument: the server's own `usage`, which needs
no tokenizer here and counts a chat template too, or a tokenizer's file. Runs on the load test's event loop.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

FIRST_WORD = "The"
MIN_WORDS = 32
_MIN_GROUP = 4

_WORDS = """
    about above across act after again air all almost along also always and animal another answer any
    are area around art ask away back base be because become been before began begin behind being best
    better between big bird black blue board boat body book both box boy bring build but by call came
    can car care carry cause center certain change check city class clear close cold color come common
    complete could country course cover cross cry cut dark day deep did different direct do does done
    door down draw drive dry during each early earth east eat end enough even ever every example eye
    face fact fall family far farm fast father feel feet few field figure fill final find fine fire
    first fish five fly follow food foot for force form found four free friend from front full game gave
    general get girl give go gold good got govern great green ground group grow had half hand hard has
    have he head hear heart heat heavy help her here high him his hold home horse hot hour house how
    hundred idea if in inch island it just keep kind king knew know land language large last late laugh
    lead learn leave left less let letter life light like line list little live long look love low
    machine made main make man many map mark may me mean measure men might mile mind minute miss money
    moon more morning most mother mountain move much music must my name near need never new next night
    no north note nothing notice noun now number object of off often old on once one only open or order
    other our out over own page paper part pass pattern people perhaps person picture piece place plan
    plant play point port power press problem produce product pull put question quick rain ran reach
    read ready real red rest right river road rock room round
"""
CANDIDATES = tuple(_WORDS.split())

Count = Callable[[str], Awaitable[int]]


class NoVocabulary(Exception):
    """The prompts' lengths cannot be controlled; says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`words` are one token each after a blank. `overhead`: the tokens of a prompt of `FIRST_WORD` alone."""

    words: tuple[str, ...]
    overhead: int

    def num_words(self, num_tokens: int) -> int:
        """Words that follow `FIRST_WORD` in a prompt of `num_tokens`, 0 where even that is too long."""
        return max(0, num_tokens - self.overhead)


async def calibrate(count: Count) -> Vocabulary:
    """Raises NoVocabulary when too few candidates are one token, or when lengths do not add up."""
    overhead = await count(FIRST_WORD)
    words = await _singles(CANDIDATES, count, overhead)
    if len(words) < MIN_WORDS:
        raise NoVocabulary(f"only {len(words)} of {len(CANDIDATES)} common words are one token each here")
    shuffled = random.Random(0).choices(words, k=200)
    found = await count(" ".join([FIRST_WORD, *shuffled]))
    if found != overhead + len(shuffled):
        raise NoVocabulary(
            f"{len(shuffled)} single-token words in another order are {found - overhead} tokens"
        )
    return Vocabulary(tuple(words), overhead)


async def _singles(words: Sequence[str], count: Count, overhead: int) -> list[str]:
    """Each word is a token or more, so a group of as many tokens as words has only single ones."""
    if await count(" ".join([FIRST_WORD, *words])) - overhead == len(words):
        return list(words)
    if len(words) <= _MIN_GROUP:
        return []
    half = len(words) // 2
    return [*await _singles(words[:half], count, overhead), *await _singles(words[half:], count, overhead)]
