"""Block names: chained, keyed, apart for each salt, layout and adapter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import extend_hashes, hash_blocks, root_hash

TOKENS = st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=100)
NAMES = st.text(max_size=8)


@given(TOKENS, st.integers(1, 17), st.integers(0, 100))
def test_extending_known_hashes_equals_hashing_at_once(tokens: list[int], block_size: int, cut: int) -> None:
    root = root_hash("salt", "layout")
    whole = hash_blocks(root, tokens, block_size)
    assert len(whole) == len(tokens) // block_size
    known = hash_blocks(root, tokens[:cut], block_size)
    assert extend_hashes(root, known, tokens, block_size) == whole


@given(TOKENS.filter(lambda tokens: len(tokens) >= 8), st.integers(0, 7))
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens: list[int], where: int) -> None:
    root = root_hash("salt", "layout")
    changed = list(tokens)
    changed[where] = (changed[where] + 1) % 2**31
    before, after = hash_blocks(root, tokens, 4), hash_blocks(root, changed, 4)
    first = where // 4
    assert before[:first] == after[:first]
    assert all(a != b for a, b in zip(before[first:], after[first:], strict=True))


@given(NAMES, NAMES, NAMES, NAMES, NAMES, NAMES)
def test_two_roots_are_equal_only_for_equal_fields(a: str, b: str, c: str, d: str, e: str, f: str) -> None:
    assert (root_hash(a, b, c) == root_hash(d, e, f)) == ((a, b, c) == (d, e, f))


def test_fields_that_concatenate_alike_have_different_roots() -> None:
    assert root_hash("a", "b:c") != root_hash("a:b", "c")
    assert root_hash("ab", "", "c") != root_hash("a", "b", "c")


def test_names_do_not_depend_on_the_process() -> None:
    assert hash_blocks(root_hash("", "layout"), range(8), 4)[1].hex() == "34c92b736758da9143564981aa248e07"
