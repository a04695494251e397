"""One BOS at most, special tokens as the folder's files say, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidConfig, InvalidRequest
from router.tokenizer import Tokenizer
from tests.unit.router import vocabularies


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_plain_prompt_gets_the_bos_that_the_tokenizer_adds() -> None:
    tokenizer = vocabularies.sentence_piece()
    ids = tokenizer.encode_prompt("Hello")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(1) == 1


def test_a_prompt_that_brings_its_own_bos_gets_no_second_one() -> None:
    tokenizer = vocabularies.sentence_piece()
    assert tokenizer.encode_prompt("<s>Hello")[:2].count(1) == 1


def test_a_rendered_template_gets_no_bos_but_its_own() -> None:
    tokenizer = vocabularies.sentence_piece()
    assert tokenizer.encode_rendered("<s>Hello").count(1) == 1
    assert tokenizer.encode_rendered("Hello").count(1) == 0


@pytest.mark.parametrize(("adds_bos", "count"), [(True, 1), (False, 0)])
def test_add_bos_token_of_the_configuration_wins_over_the_post_processor(adds_bos: bool, count: int) -> None:
    tokenizer = vocabularies.sentence_piece({"add_bos_token": adds_bos})
    assert tokenizer.encode_prompt("Hello").count(1) == count
    byte_level = vocabularies.byte_level({"add_bos_token": adds_bos, "bos_token": "<|start|>"})
    assert byte_level.encode_prompt("Hello").count(1) == count


def test_special_tokens_typed_in_a_text_are_those_tokens() -> None:
    tokenizer = vocabularies.byte_level()
    assert tokenizer.encode_prompt("a<|stop|>b").count(2) == 1


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        vocabularies.byte_level().encode_prompt("a\ud83d")


def test_only_tokenizer_json_is_required(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_write(tmp_path, vocabularies.byte_level()))
    assert tokenizer.encode_prompt("stop it") == vocabularies.byte_level().encode_prompt("stop it")
    assert tokenizer.bos_token_id is None


def test_a_missing_or_broken_tokenizer_is_refused_with_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_configuration_is_refused_with_the_files_name(tmp_path: Path) -> None:
    _write(tmp_path, vocabularies.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_tokens_that_only_the_configuration_adds_are_known(tmp_path: Path) -> None:
    size = vocabularies.byte_level().vocab_size
    entries = {
        str(size): {"content": "<think>", "special": False},
        str(size + 1): {"content": "<pad>", "special": True},
    }
    config = {"added_tokens_decoder": entries, "pad_token": {"content": "<pad>"}}
    tokenizer = Tokenizer.load(_write(tmp_path, vocabularies.byte_level(), config))
    assert tokenizer.encode_prompt("<think><pad>") == [size, size + 1]
    assert tokenizer.bytes.special_ids >= {size + 1}
    assert size not in tokenizer.bytes.special_ids
    assert tokenizer.named_tokens["pad_token"] == "<pad>"


def test_an_added_token_at_an_impossible_id_is_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"100000": {"content": "<far>", "special": True}}}
    _write(tmp_path, vocabularies.byte_level(), config)
    with pytest.raises(InvalidConfig, match="<far>"):
        Tokenizer.load(tmp_path)


def test_additional_special_tokens_are_special_and_absent_ones_are_not_invented(tmp_path: Path) -> None:
    config = {"additional_special_tokens": ["the", "<nowhere>"]}
    tokenizer = Tokenizer.load(_write(tmp_path, vocabularies.byte_level(), config))
    token_id = tokenizer._tokenizer.token_to_id("the")
    assert token_id in tokenizer.bytes.special_ids
    assert tokenizer._tokenizer.token_to_id("<nowhere>") is None


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    inner = vocabularies.byte_level()._tokenizer
    inner.enable_truncation(3)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode_prompt("x" * 50)) > 3
