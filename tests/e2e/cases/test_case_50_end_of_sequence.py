"""Case 50: every end-of-sequence id ends an answer; a checkpoint's sampling defaults apply as documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.e2e import profiles, prompts
from tests.e2e.answers import Answer
from tests.e2e.client import Client
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.side_by_side

ENDS = (prompts.END_OF_TEXT, prompts.IM_END)
DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}


def copy(
    fleet: Fleet, name: str, config_eos: Any, generation: dict[str, Any] | None, tokenizer_eos: str
) -> Path:
    """A toy whose three sources of end ids say what the arguments say."""
    folder = fleet.models.toy(f"case-50-{name}")
    oracle.edit_config(folder, eos_token_id=config_eos)
    oracle.edit_config(folder, "tokenizer_config.json", eos_token=tokenizer_eos)
    if (folder / "special_tokens_map.json").exists():
        oracle.edit_config(folder, "special_tokens_map.json", eos_token=tokenizer_eos)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def forced(client: Client, token_id: int, **extra: Any) -> list[Answer]:
    """The same forced token in chat and completions, streamed and not."""
    body: dict[str, Any] = {"logit_bias": {str(token_id): 100}, "temperature": 0, "max_tokens": 5, **extra}
    return [
        client.complete("hi", **body),
        client.chat("hi", **body),
        client.stream_completion("hi", **body),
        client.stream_chat("hi", **body),
    ]


def check_ends(client: Client, token_id: int) -> None:
    ended = forced(client, token_id)
    for answer in ended:
        assert answer.text == ""
        assert answer.finish_reason == "stop"
    assert len({answer.num_tokens for answer in ended}) == 1, "the end token is counted the same everywhere"
    for answer in forced(client, token_id, ignore_eos=True):
        assert answer.num_tokens == 5
        assert answer.finish_reason == "length"
        assert answer.text == ""
    for answer in forced(client, token_id, min_tokens=3):
        assert answer.num_tokens in (3, 4)
        assert answer.finish_reason == "stop"


def check_does_not_end(client: Client, token_id: int) -> None:
    for answer in forced(client, token_id):
        assert answer.num_tokens == 5
        assert answer.finish_reason == "length"


def check_all_masked(client: Client) -> None:
    """`min_tokens` masks all ends at once: the second best may not slip through when the best is masked."""
    body: dict[str, Any] = {"logit_bias": {"0": 100, "2": 99}, "temperature": 0, "max_tokens": 8}
    for answer in (client.chat("hi", **body, min_tokens=6), client.complete("hi", **body, min_tokens=6)):
        assert answer.finish_reason == "stop"
        assert answer.num_tokens in (6, 7)
        assert answer.text != ""


@pytest.mark.parametrize(
    ("name", "config_eos", "generation", "tokenizer_eos", "ends"),
    [
        ("list-in-generation", 2, {"eos_token_id": [0, 2]}, "<|im_end|>", ENDS),
        ("config-and-tokenizer", 0, None, "<|im_end|>", ENDS),
        ("one-only", [2], None, "<|im_end|>", (prompts.IM_END,)),
    ],
)
def test_every_id_that_any_file_names_ends_the_answer(
    fleet: Fleet,
    name: str,
    config_eos: Any,
    generation: dict[str, Any] | None,
    tokenizer_eos: str,
    ends: tuple[int, ...],
) -> None:
    folder = copy(fleet, name, config_eos, generation, tokenizer_eos)
    with fleet.once(profiles.SPLIT, folder) as system:
        for token_id in ENDS:
            if token_id in ends:
                check_ends(system.client, token_id)
            else:
                check_does_not_end(system.client, token_id)
        if ends == ENDS:
            check_all_masked(system.client)
        shown = forced(system.client, ends[-1], ignore_eos=True, skip_special_tokens=False)
        text = fleet.models.vocabulary.text(ends[-1])
        assert [answer.text for answer in shown] == [text * 5] * 4


def test_defaults_of_the_checkpoint_apply_and_explicit_values_win(fleet: Fleet) -> None:
    folder = copy(fleet, "defaults", 2, {"eos_token_id": 2, **DEFAULTS}, "<|im_end|>")
    plain = fleet.system(profiles.SPLIT, "toy").client
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
    with fleet.once(profiles.SPLIT, folder) as system:
        client = system.client
        neutral: dict[str, Any] = {"temperature": 0, "top_p": 1, "repetition_penalty": 1}
        assert client.complete(**body, **neutral).text == plain.complete(**body, **neutral).text
        for seed in range(3):
            assert (
                client.complete(**body, seed=seed).text == plain.complete(**body, seed=seed, **DEFAULTS).text
            )
        penalised = client.complete(**body, temperature=0).text
        assert penalised == plain.complete(**body, temperature=0, repetition_penalty=1.3).text


def test_a_chat_ends_by_itself_without_a_visible_end_marker(fleet: Fleet) -> None:
    client = fleet.system(profiles.SPLIT).client
    for answer in (
        client.chat("Say hi", max_tokens=300, temperature=0),
        client.stream_chat("Say hi", max_tokens=300, temperature=0),
    ):
        assert answer.finish_reason == "stop"
        assert "<|im_end|>" not in answer.text
        assert answer.text
