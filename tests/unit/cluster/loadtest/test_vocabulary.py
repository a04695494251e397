"""Words of one token are found by counting alone."""

from __future__ import annotations

import pytest

from cluster.loadtest.vocabulary import CANDIDATES, FIRST_WORD, NoVocabulary, Vocabulary, calibrate


class Counter:
    """A tokenizer that splits some words in two and puts `overhead` tokens around everything."""

    def __init__(self, split: frozenset[str], overhead: int = 0, surplus: int = 0) -> None:
        self.split = split
        self.num_calls = 0
        self._overhead = overhead
        self._surplus = surplus

    async def __call__(self, text: str) -> int:
        self.num_calls += 1
        words = text.split()
        extra = self._surplus if len(words) == 201 else 0
        return self._overhead + sum(2 if word in self.split else 1 for word in words) + extra


async def test_only_words_of_one_token_are_taken() -> None:
    split = frozenset(CANDIDATES[17:19])
    count = Counter(split, overhead=30)
    found = await calibrate(count)
    assert found.overhead == 31, f"{FIRST_WORD} and what stands around it"
    assert not split & set(found.words)
    assert len(found.words) > len(CANDIDATES) - 10
    assert count.num_calls < 25


async def test_candidates_are_many_and_different() -> None:
    assert len(set(CANDIDATES)) == len(CANDIDATES) > 300


async def test_a_tokenizer_that_splits_everything_or_does_not_add_up_is_refused() -> None:
    with pytest.raises(NoVocabulary, match="only 0 of"):
        await calibrate(Counter(frozenset(CANDIDATES)))
    with pytest.raises(NoVocabulary, match="another order"):
        await calibrate(Counter(frozenset(), surplus=1))


def test_what_stands_around_a_prompt_is_part_of_its_length() -> None:
    vocabulary = Vocabulary(("a",), 31)
    assert [vocabulary.num_words(count) for count in (100, 31, 5)] == [69, 0, 0]
