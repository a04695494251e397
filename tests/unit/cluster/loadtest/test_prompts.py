"""Prompts have their length, share what they shall, and turns stand on the turns before."""

from __future__ import annotations

from typing import Any

from cluster.loadtest.plan import Part, Turn
from cluster.loadtest.prompts import Composer, merged
from cluster.loadtest.settings import Api, Target
from cluster.loadtest.vocabulary import Vocabulary

WORDS = tuple(f"w{number}" for number in range(50))
FIRST, SECOND = Turn((Part("prefix 0", 8), Part("a", 5)), 3), Turn((Part("b", 4),), 2)


def composer(overhead: int = 1, seed: int = 0, **target: Any) -> Composer:
    return Composer(Target(**target), "m", Vocabulary(WORDS, overhead), seed)


def test_a_prompt_is_as_long_as_planned() -> None:
    ask = composer().conversation().ask(FIRST)
    assert len(ask.body["prompt"].split()) == 13 == ask.planned_prompt_tokens
    assert (ask.body["max_tokens"], ask.planned_output_tokens) == (3, 3)


def test_the_chat_template_takes_its_part_of_the_length() -> None:
    ask = composer(overhead=11, api=Api.CHAT).conversation().ask(FIRST)
    (message,) = ask.body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 1 + 2
    assert ask.planned_prompt_tokens == 13
    longest = composer(overhead=31, api=Api.CHAT).conversation().ask(FIRST)
    assert longest.planned_prompt_tokens == 31, "no prompt is shorter than what stands around it"


def test_equal_keys_are_equal_words_and_other_seeds_other_words() -> None:
    one, two = composer(), composer()
    other = Turn((Part("prefix 0", 8), Part("c", 5)), 3)
    first, second = (
        made.conversation().ask(turn).body["prompt"].split() for made, turn in ((one, FIRST), (two, other))
    )
    assert first[:9] == second[:9]
    assert first[9:] != second[9:]
    assert composer(seed=1).conversation().ask(FIRST).body["prompt"].split()[:9] != first[:9]


def test_a_shorter_part_is_the_beginning_of_the_longer() -> None:
    short = composer().text(Turn((Part("k", 5),), 1)).split()
    assert composer().text(Turn((Part("k", 9),), 1)).split()[:5] == short


def test_a_later_turn_stands_on_the_answer() -> None:
    for api, prompt in ((Api.COMPLETIONS, None), (Api.CHAT, "messages")):
        talk = composer(api=api).conversation()
        first = talk.ask(FIRST)
        talk.add_reply("an answer")
        second = talk.ask(SECOND)
        assert second.planned_prompt_tokens == 0, "the answer's length in tokens is not known here"
        if prompt is None:
            before = first.body["prompt"]
            assert second.body["prompt"].startswith(f"{before} an answer ")
        else:
            roles = [message["role"] for message in second.body["messages"]]
            assert roles == ["user", "assistant", "user"]
            assert second.body["messages"][1]["content"] == "an answer"


def test_more_fields_win_and_null_takes_one_away() -> None:
    ask = composer(extra_body='{"ignore_eos": null, "top_k": 1, "temperature": 1}').conversation().ask(FIRST)
    assert "ignore_eos" not in ask.body
    assert (ask.body["top_k"], ask.body["temperature"]) == (1, 1)
    assert merged({"a": None}, {}) == {"a": None}
