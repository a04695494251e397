"""Text of the bundled model: the same ids and prompts as Hugging Face's tokenizer, and text that streams
whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import FinishReason, TokenDelta
from engine.model.bundled import prepare_bundled_model
from router.served_model import ServedModel
from router.text import SampleText, TextSettings

FACTS: dict[str, list[int]] = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    " ".join(["hello"] * 8): [28120, *[33662] * 7],
    "DEFGHIJ": [33203, 23960, 57, 58],
    "😀": [10813, 242, 218],
    "🫠": [10813, 121, 250],
    "🦙": [10813, 116, 243],
    "龜": [180, 139, 246],
    "日本語": [23274, 115, 40993, 179, 120, 248],
    "12345": [33, 34, 35, 36, 37],
    "a    b": [81, 333, 278],
    "a\r\nb": [81, 201, 198, 82],
    "a\n\n\nb": [81, 1116, 198, 82],
    "def f(x):\n    return x\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 198],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_bundled_model()


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return ServedModel.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_the_folder_says_what_the_model_is(model: ServedModel) -> None:
    assert (model.vocab_size, model.max_context) == (49152, 8192)
    assert model.tokenizer.named_tokens["eos_token"] == "<|im_end|>"
    assert set(range(17)) == model.tokenizer.bytes.special_ids


@pytest.mark.parametrize("text", FACTS, ids=repr)
def test_known_texts_have_known_ids_and_come_back(model: ServedModel, text: str) -> None:
    assert model.tokenizer.encode_prompt(text) == FACTS[text]
    assert model.tokenizer.bytes.text(FACTS[text]) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_has_the_ids_of_hugging_faces_tokenizer(
    model: ServedModel, reference: Any, text: str
) -> None:
    ids = model.tokenizer.encode_prompt(text)
    assert ids == reference.encode(text)
    # not always `text`: the vocabulary has no token for some bytes
    assert model.tokenizer.bytes.text(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "hi")],
        [("system", "Be brief."), ("user", "hi")],
        [("user", "hi"), ("assistant", "Hello <|im_end|> there"), ("user", "ünï 😀\n\n")],
    ],
)
def test_chat_prompts_are_those_of_hugging_faces_template(
    model: ServedModel, reference: Any, messages: list[tuple[str, str]]
) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]
    assert model.chat_template is not None
    for is_prompt_added in (True, False):
        text = model.chat_template.render(chat, add_generation_prompt=is_prompt_added)
        assert text == reference.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=is_prompt_added
        )
        assert model.tokenizer.encode_rendered(text) == reference.encode(text, add_special_tokens=False)


def test_chat_lengths_are_the_known_ones(model: ServedModel) -> None:
    assert model.chat_template is not None
    hi = {"role": "user", "content": "hi"}
    brief = {"role": "system", "content": "Be brief."}
    for chat, length in (([hi], 31), ([brief, hi], 18)):
        text = model.chat_template.render(chat, add_generation_prompt=True)
        assert len(model.tokenizer.encode_rendered(text)) == length
    question = {"role": "user", "content": "What is the capital of France?"}
    prefix = {"role": "assistant", "content": "The capital of France is"}
    text = model.chat_template.render(
        [question, prefix], add_generation_prompt=False, continue_final_message=True
    )
    assert len(model.tokenizer.encode_rendered(text)) == 42


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49151), min_size=1, max_size=40), data=st.data())
def test_streamed_text_is_the_whole_text_up_to_the_first_stop(
    model: ServedModel, reference: Any, token_ids: list[int], data: st.DataObject
) -> None:
    visible = [token_id for token_id in token_ids if token_id >= 17]
    whole = reference.decode(visible, clean_up_tokenization_spaces=False)
    start = data.draw(st.integers(0, len(whole)))
    stop = whole[start : start + data.draw(st.integers(1, 5))] or "§never§"
    sample = SampleText(model.tokenizer.bytes, TextSettings(stops=(stop,)))
    shown = ""
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        piece = sample.feed(
            TokenDelta(0, position, (token_id,), (), FinishReason.LENGTH if is_last else None)
        )
        shown += piece.text
        assert "�" not in piece.text or "�" in whole
        if sample.finish_reason is not None:
            break
    found = whole.find(stop)
    assert shown == (whole if found < 0 else whole[:found])
