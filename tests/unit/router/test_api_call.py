"""How much of a prompt is read to find out that it is too long."""

from __future__ import annotations

import pytest

from core.errors import ContextTooLong
from router.api_call import ApiCall, completion_call
from router.completion_schema import CompletionBody
from router.config import RouterConfig
from router.schema import parse
from router.served_model import ServedModel
from router.token_bytes import TokenBytes
from router.tokenizer import Tokenizer
from tests.unit.router import vocabularies

_MAX_CONTEXT = 512


def _call(tokenizer: Tokenizer, prompt: str | list[int], **fields: object) -> ApiCall:
    model = ServedModel("toy", tokenizer, None, tokenizer.vocab_size, _MAX_CONTEXT)
    body = parse(CompletionBody, {"model": "toy", "prompt": prompt, **fields})
    return completion_call(body, model, RouterConfig(), _MAX_CONTEXT)


@pytest.mark.parametrize(("unit", "max_read"), [("a", 10_000), (" ", 80_000), ("a b  ", 10_000)])
def test_a_text_far_too_long_is_refused_by_a_part_of_it_however_dense_it_is(
    unit: str, max_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = vocabularies.wide_spaces()
    read: list[int] = []
    encode = tokenizer.encode_prompt

    def counting(text: str) -> list[int]:
        read.append(len(text))
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode_prompt", counting)
    with pytest.raises(ContextTooLong, match="at least"):
        _call(tokenizer, unit * 1_000_000)
    assert sum(read) < max_read


@pytest.mark.parametrize("num_tokens", [300, 500, 511, 512])
@pytest.mark.parametrize("tail", ["", " ", "   ", "a"])
def test_a_text_of_long_tokens_that_fits_is_not_refused(num_tokens: int, tail: str) -> None:
    tokenizer = vocabularies.wide_spaces()
    text = " " * (64 * num_tokens) + tail
    (prompt,) = _call(tokenizer, text).prompts
    assert list(prompt.token_ids) == tokenizer.encode_prompt(text)


def test_token_ids_far_too_many_are_refused_by_their_number_alone() -> None:
    with pytest.raises(ContextTooLong, match="513") as caught:
        _call(vocabularies.wide_spaces(), [10**6] * 513)
    assert caught.value.details["num_prompt_tokens"] == 513


def test_token_ids_become_text_only_for_an_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = vocabularies.byte_level()
    texts: list[tuple[int, ...]] = []
    to_text = TokenBytes.text

    def counting(self: TokenBytes, token_ids: tuple[int, ...]) -> str:
        texts.append(token_ids)
        return to_text(self, token_ids)

    monkeypatch.setattr(TokenBytes, "text", counting)
    assert _call(tokenizer, [50, 51]).prompts[0].text == ""
    assert texts == []
    assert _call(tokenizer, [50, 51], echo=True).prompts[0].text != ""
    assert texts == [(50, 51)]
