"""Templates follow the conventions of Hugging Face, and a message can be continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import InvalidConfig, InvalidRequest
from router.chat_template import ChatTemplate
from tests.unit.router.vocabularies import CHATML

_USER = {"role": "user", "content": "hi"}


def _template(source: str = CHATML) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, "test.jinja")


def _render(source: str, content: str = "hi") -> str:
    return _template(source).render([{"role": "user", "content": content}], add_generation_prompt=True)


def test_messages_and_the_generation_prompt_are_rendered() -> None:
    text = _template().render([_USER], add_generation_prompt=True)
    assert text == "<|start|>user\nhi<|stop|>\n<|start|>assistant\n"


def test_templates_see_named_tokens_and_the_usual_helpers() -> None:
    assert _render("{{ bos_token }}{{ messages[0].content }}") == "<s>hi"
    assert _render("{{ messages[0] | tojson }}", "é<") == '{"role": "user", "content": "é<"}'
    assert len(_render("{{ strftime_now('%Y') }}")) == 4
    assert _render("{% for c in 'abc' %}{% if c == 'b' %}{% break %}{% endif %}{{ c }}{% endfor %}") == "a"
    assert _render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert _render("{% if tools %}tools{% else %}none{% endif %}") == "none"


def test_block_lines_leave_no_white_space() -> None:
    assert _render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_a_template_that_refuses_is_the_clients_error_with_its_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.details["param"] == "messages"


@pytest.mark.parametrize("source", ["{{ messages[5].content + 1 }}", "{{ 1 + 'a' }}", "{{ nothing() }}"])
def test_a_template_that_breaks_on_the_messages_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        _render(source)


def test_templates_cannot_reach_the_interpreter() -> None:
    with pytest.raises(InvalidRequest):
        _render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_a_syntax_error_is_told_at_start_with_file_and_line() -> None:
    with pytest.raises(InvalidConfig, match=r"test\.jinja.*line 2"):
        _template("fine\n{% if %}")


@pytest.mark.parametrize("prefix", ["The capital is", "The capital is ", "a <|stopp|> b", "  led"])
def test_a_continued_message_ends_where_its_text_ends(prefix: str) -> None:
    messages = [_USER, {"role": "assistant", "content": prefix}]
    text = _template().render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|start|>user\nhi<|stop|>\n<|start|>assistant\n{prefix}"


def test_an_earlier_turn_with_the_same_text_does_not_matter() -> None:
    same = {"role": "assistant", "content": "same"}
    text = _template().render([same, _USER, same], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|start|>user\nhi<|stop|>\n<|start|>assistant\nsame")


def test_a_trimming_template_trims_the_continued_message_too() -> None:
    template = _template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    text = template.render(
        [{"role": "assistant", "content": "so "}], add_generation_prompt=False, continue_final_message=True
    )
    assert text == "[so"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _template("{{ messages[0].content }}").render(
            [_USER, {"role": "assistant", "content": "x"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    assert caught.value.details["param"] == "continue_final_message"


def test_extra_variables_reach_the_template_but_not_the_reserved_names() -> None:
    template = _template("{{ enable_thinking }}")
    assert (
        template.render([_USER], add_generation_prompt=True, variables={"enable_thinking": False}) == "False"
    )
    for name in ("messages", "bos_token", "self"):
        with pytest.raises(InvalidRequest, match=name) as caught:
            template.render([_USER], add_generation_prompt=True, variables={name: "x"})
        assert caught.value.details["param"] == f"chat_template_kwargs.{name}"


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def text_from(folder: Path) -> str | None:
        template = ChatTemplate.from_folder(folder, {})
        return None if template is None else template.render([_USER], add_generation_prompt=True)

    assert text_from(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert text_from(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert text_from(tmp_path) == "two"
    config.write_text(json.dumps({"chat_template": [named[0], {"name": "rag", "template": "r"}]}))
    assert text_from(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("three")
    assert text_from(tmp_path) == "three"
