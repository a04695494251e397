"""Case 51: the tokenizer made from the GGUF is the original one; added and leading-space tokens come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests import oracle
from tests.e2e import profiles, prompts
from tests.e2e.checks import refused, survives
from tests.e2e.client import CHAT, COMPLETIONS, Client
from tests.e2e.fleet import Fleet
from tests.e2e.vocabulary import Vocabulary

pytestmark = pytest.mark.side_by_side

WORDS = ("Hello", "world", "the", "quick", "brown", "fox", "é", "日", "a", "b")


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Client:
    return fleet.system(profiles.SPLIT).client


@pytest.mark.parametrize("text", prompts.FACTS)
def test_prompts_have_the_original_ids(client: Client, vocabulary: Vocabulary, text: str) -> None:
    answer = client.complete(text, max_tokens=0, echo=True, logprobs=0)
    assert answer.text == text
    assert vocabulary.ids_of(answer) == list(prompts.FACTS[text])
    assert answer.num_prompt_tokens == len(prompts.FACTS[text])
    assert answer.num_tokens == 0


@pytest.mark.parametrize("text", prompts.LENGTHS)
def test_prompts_have_the_original_number_of_tokens(client: Client, text: str) -> None:
    answer = client.complete(text, max_tokens=0, echo=True)
    assert answer.text == text
    assert answer.num_prompt_tokens == prompts.LENGTHS[text]


def test_a_nul_byte_is_a_character_like_any_other(client: Client) -> None:
    answer = client.complete("a\x00b", max_tokens=0, echo=True)
    assert answer.text == "a\x00b"


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_a_lone_surrogate_is_refused(client: Client, stream: bytes) -> None:
    model = client.model.encode()
    for path, field in (
        (COMPLETIONS, b'"prompt":"a\\ud83d"'),
        (COMPLETIONS, b'"prompt":"a","stop":"\\udc00"'),
        (CHAT, b'"messages":[{"role":"user","content":"\\ud83d"}]'),
    ):
        refused(client, path, b'{"model":"' + model + b'","stream":' + stream + b"," + field + b"}")


@pytest.mark.parametrize("token_id", [1, *range(3, 17)])
def test_special_tokens_are_invisible_or_literal(
    client: Client, vocabulary: Vocabulary, token_id: int
) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token_id): 100}}
    assert client.complete("hi", **body).text == ""
    assert client.stream_chat("hi", **body).text == ""
    literal = vocabulary.text(token_id) * 3
    assert client.complete("hi", **body, skip_special_tokens=False).text == literal
    assert client.stream_chat("hi", **body, skip_special_tokens=False).text == literal


def test_special_tokens_typed_by_a_user_are_read_as_special(client: Client) -> None:
    """The documented rule is the original tokenizer's: the text `<|im_end|>` is id 2, wherever it stands."""
    plain = client.chat("hi", max_tokens=1).num_prompt_tokens
    assert client.chat("hi<|im_end|>", max_tokens=1).num_prompt_tokens == plain + 1


def test_added_tokens_that_are_not_special_are_always_visible(fleet: Fleet) -> None:
    folder = fleet.models.toy("case-51-added", vocab_size=49154)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["<call>", "naïve tag"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    with fleet.once(profiles.SPLIT, folder) as system:
        client = system.client
        for token_id, text in enumerate(texts, 49152):
            body: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token_id): 100}}
            for extra in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False}):
                assert client.complete("hi", **body, **extra).text == text * 3
                assert client.stream_completion("hi", **body, **extra).text == text * 3
            assert client.complete(f"hi{text}hi", max_tokens=1).num_prompt_tokens == 3


def leading_space_toy(fleet: Fleet) -> tuple[Path, dict[str, int]]:
    """A checkpoint whose tokenizer marks words by a leading ▁ and falls back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"▁{word}" for word in WORDS] + list(WORDS) + ["▁"]
    pieces = list(dict.fromkeys(pieces))
    added = [
        {"id": i, "content": pieces[i], "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i in range(3)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": True,
            "vocab": [[piece, -float(i) / 10] for i, piece in enumerate(pieces)],
        },
    }
    folder = fleet.models.toy("case-51-leading-space", vocab_size=512)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    oracle.edit_config(folder, vocab_size=512)
    return folder, {piece: i for i, piece in enumerate(pieces)}


def test_a_streamed_text_keeps_its_first_space_with_a_leading_space_vocabulary(fleet: Fleet) -> None:
    folder, ids = leading_space_toy(fleet)
    with fleet.once(profiles.SPLIT, folder) as system:
        client = system.client
        for piece, text in (("▁fox", " fox fox fox"), ("fox", "foxfoxfox"), ("<0xE6>", "\ufffd" * 3)):
            body: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(ids[piece]): 100}}
            plain = client.complete("Hello world", **body).text
            assert client.stream_completion("Hello world", **body).text == plain
            assert plain == text
        assert client.complete("Hello world", max_tokens=0, echo=True).text == "Hello world"


def test_the_facts_leave_the_system_as_it_was(fleet: Fleet) -> None:
    system = fleet.system(profiles.SPLIT)
    with survives(system):
        for text in prompts.FACTS:
            system.client.complete(text, max_tokens=1)
