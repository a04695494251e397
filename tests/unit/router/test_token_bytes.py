"""Text put together token by token is the text of the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as HFTokenizer

from core.errors import InvalidConfig
from router.detokenizer import Detokenizer
from router.token_bytes import TokenBytes
from router.tokenizer import Tokenizer
from tests.unit.router import vocabularies

_BYTE_LEVEL = vocabularies.byte_level()
_SENTENCE_PIECE = vocabularies.sentence_piece()


def _pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer()
    return [*(detokenizer.feed(tokenizer.bytes.of(token_id)) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, _BYTE_LEVEL.vocab_size - 1), max_size=40))
def test_joined_pieces_equal_the_librarys_decoding_of_the_whole(token_ids: list[int]) -> None:
    whole = _BYTE_LEVEL._tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "".join(_pieces(_BYTE_LEVEL, token_ids)) == whole


@given(st.text(max_size=60))
def test_any_text_comes_back_whole_and_no_piece_holds_half_a_character(text: str) -> None:
    for tokenizer in (_BYTE_LEVEL, _SENTENCE_PIECE):
        pieces = _pieces(tokenizer, tokenizer.encode_rendered(text))
        joined = "".join(pieces)
        if tokenizer is _SENTENCE_PIECE:
            # its vocabulary writes spaces as ▁ and puts one before the text
            assert joined.removeprefix(" ") == text.replace("▁", " ").removeprefix("" if text else " ")
        else:
            assert joined == text


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    detokenizer = Detokenizer()
    data = "🦙".encode()
    assert [detokenizer.feed(data[index : index + 1]) for index in range(4)] == ["", "", "", "🦙"]
    assert detokenizer.flush() == ""


def test_a_character_that_never_becomes_whole_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.feed("日".encode()[:2]) == ""
    assert detokenizer.flush() == "�"


def test_a_leading_space_belongs_to_the_token_and_only_a_prompts_start_loses_it() -> None:
    ids = _SENTENCE_PIECE.encode_rendered("Hello world")
    assert _SENTENCE_PIECE.bytes.text(ids) == "Hello world"
    assert "".join(_pieces(_SENTENCE_PIECE, ids)) == " Hello world"


def test_byte_tokens_are_bytes() -> None:
    ids = _SENTENCE_PIECE.encode_rendered("猫")
    assert len(ids) == 4
    assert _SENTENCE_PIECE.bytes.text(ids) == "猫"


def test_an_id_without_a_token_has_no_text() -> None:
    assert _BYTE_LEVEL.bytes.of(_BYTE_LEVEL.vocab_size + 5) == b""


def test_the_label_of_half_a_character_shows_its_bytes() -> None:
    token_id = _BYTE_LEVEL._tokenizer.token_to_id("ð")
    assert _BYTE_LEVEL.bytes.label(token_id) == "bytes:\\xf0"
    assert _BYTE_LEVEL.bytes.label(1) == "<|start|>"


def test_added_tokens_with_spaces_are_written_as_they_are() -> None:
    tokenizer = vocabularies.byte_level()
    inner = HFTokenizer.from_str(tokenizer._tokenizer.to_str())
    inner.add_tokens([AddedToken("two words", normalized=False)])
    token_bytes = TokenBytes(inner, json.loads(inner.to_str())["decoder"])
    token_id = inner.token_to_id("two words")
    assert token_bytes.of(token_id) == b"two words"
    assert token_id not in token_bytes.special_ids


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC()])
def test_a_decoder_that_needs_its_neighbours_is_refused_by_name(decoder: object) -> None:
    inner = HFTokenizer(models.BPE())
    inner.decoder = decoder
    with pytest.raises(InvalidConfig, match=type(decoder).__name__):
        TokenBytes(inner, json.loads(inner.to_str())["decoder"])


def test_a_missing_decoder_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no decoder"):
        TokenBytes(HFTokenizer(models.BPE()), None)
