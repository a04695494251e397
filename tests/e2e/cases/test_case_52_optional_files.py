"""Case 52: optional files may be missing, templates come from any of their places, BOS is written once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.e2e import profiles, prompts
from tests.e2e.checks import refused_both
from tests.e2e.client import CHAT, as_messages
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def toy(fleet: Fleet, name: str) -> Path:
    return fleet.models.toy(f"case-52-{name}")


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def set_template(folder: Path, template: Any) -> None:
    """In tokenizer_config.json, or nowhere."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    oracle.edit_config(folder, "tokenizer_config.json", chat_template=template)


def test_without_any_optional_file_completions_work_and_chat_says_what_is_missing(fleet: Fleet) -> None:
    folder = toy(fleet, "bare")
    for name in (
        *("generation_config.json", "special_tokens_map.json", "tokenizer_config.json"),
        "chat_template.jinja",
    ):
        (folder / name).unlink(missing_ok=True)
    with fleet.once(profiles.SPLIT, folder) as system:
        answer = system.client.complete(
            "The capital of France is", max_tokens=4, temperature=0, ignore_eos=True
        )
        assert answer.num_prompt_tokens == 5
        assert answer.num_tokens == 4
        refused_both(system.client, CHAT, {"messages": as_messages("hi")})
        error = system.client.post(CHAT, {"messages": as_messages("hi")}).json()["error"]
        assert "template" in error["message"]


def test_without_a_chat_template_alone_the_server_starts(fleet: Fleet) -> None:
    folder = toy(fleet, "no-template")
    set_template(folder, oracle.ABSENT)
    with fleet.once(profiles.SPLIT, folder) as system:
        assert system.client.complete("hi", max_tokens=2, temperature=0, ignore_eos=True).num_tokens == 2
        refused_both(system.client, CHAT, {"messages": as_messages("hi")})


@pytest.mark.parametrize("place", ["file of its own", "several by name"])
def test_a_template_is_found_in_each_of_its_places(fleet: Fleet, place: str) -> None:
    folder = toy(fleet, place.replace(" ", "-"))
    original = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    if original is None:
        original = (folder / "chat_template.jinja").read_text()
    if place == "file of its own":
        set_template(folder, oracle.ABSENT)
        (folder / "chat_template.jinja").write_text(original)
    else:
        others = [{"name": "tool_use", "template": PLAIN_TEMPLATE}]
        set_template(folder, [*others, {"name": "default", "template": original}])
    with fleet.once(profiles.SPLIT, folder) as system:
        assert system.client.chat("hi", max_tokens=1).num_prompt_tokens == prompts.HI_CHAT_TOKENS


def test_a_template_with_a_syntax_error_is_refused_at_start_by_name(fleet: Fleet) -> None:
    folder = toy(fleet, "broken-template")
    set_template(folder, oracle.ABSENT)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    assert "template" in fleet.refuses(profiles.SPLIT, folder)


def test_without_a_tokenizer_the_start_is_refused_with_the_files_name(fleet: Fleet) -> None:
    folder = toy(fleet, "no-tokenizer")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in fleet.refuses(profiles.SPLIT, folder)


def test_a_bos_that_tokenizer_and_template_both_write_is_counted_once(fleet: Fleet) -> None:
    folder = toy(fleet, "double-bos")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [prompts.IM_START], "tokens": ["<|im_start|>"]}
        },
    }
    write_json(path, tokenizer)
    oracle.edit_config(folder, "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=True)
    set_template(folder, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with fleet.once(profiles.SPLIT, folder) as system:
        client = system.client
        text = "The capital of France is"
        assert client.chat(text, max_tokens=1).num_prompt_tokens == 1 + 5, "exactly one BOS"
        assert client.complete(text, max_tokens=1).num_prompt_tokens == 1 + 5, "the tokenizer adds its own"
