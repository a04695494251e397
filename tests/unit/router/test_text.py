"""The text of a sample: nothing leaks, nothing is lost, and streaming does not change it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import FinishReason, TokenDelta, TokenLogprob
from router import stops
from router.stops import _fallback as fallback_of
from router.text import SampleText, TextDelta, TextSettings
from tests.unit.router import vocabularies

_TOKENIZER = vocabularies.byte_level()
_EOS = 2
_ids = st.lists(st.integers(3, _TOKENIZER.vocab_size - 1), min_size=1, max_size=30)


def _logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5)


def _deltas(
    token_ids: Sequence[int], sizes: Sequence[int], finish: FinishReason = FinishReason.LENGTH
) -> list[TokenDelta]:
    found, position, turn = [], 0, 0
    while position < len(token_ids):
        part = tuple(token_ids[position : position + sizes[turn % len(sizes)]])
        is_last = position + len(part) >= len(token_ids)
        logprobs = tuple(map(_logprob, part))
        found.append(TokenDelta(0, position, part, logprobs, finish if is_last else None))
        position += len(part)
        turn += 1
    return found


def _read(settings: TextSettings, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
    sample = SampleText(_TOKENIZER.bytes, settings)
    pieces = []
    for delta in deltas:
        if sample.finish_reason is None:
            pieces.append(sample.feed(delta))
    return pieces


def _joined(pieces: Sequence[TextDelta]) -> tuple[str, list[int], FinishReason | None]:
    entries = [entry.logprob.token_id for piece in pieces for entry in piece.logprobs]
    return "".join(piece.text for piece in pieces), entries, pieces[-1].finish_reason


def _whole(token_ids: Sequence[int]) -> str:
    return b"".join(map(_TOKENIZER.bytes.of, token_ids)).decode("utf-8", "replace")


@given(_ids, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_streamed_equals_whole_and_a_stop_string_never_leaks(
    token_ids: list[int], sizes: list[int], data: st.DataObject
) -> None:
    text = _whole(token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 6))] or "x"
    settings = TextSettings(stops=(stop, "never ever"))
    streamed = _read(settings, _deltas(token_ids, sizes))
    unstreamed = _read(settings, _deltas(token_ids, [len(token_ids)]))
    assert _joined(streamed) == _joined(unstreamed)
    shown, _, reason = _joined(streamed)
    cut = text.find(stop)
    if cut < 0:
        assert shown == text
        assert reason is FinishReason.LENGTH
    else:
        assert shown == text[:cut]
        assert reason is FinishReason.STOP


@given(_ids, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_without_a_stop_each_token_has_its_logprob_once_and_bytes_join_to_the_text(
    token_ids: list[int], sizes: list[int]
) -> None:
    text, entries, _ = _joined(_read(TextSettings(stops=("zzzzzz",)), _deltas(token_ids, sizes)))
    assert entries == list(token_ids)
    assert _whole(entries) == text


def test_offsets_are_the_characters_before_each_token() -> None:
    token_ids = _TOKENIZER.encode_rendered("stop 😀 it all")
    pieces = _read(TextSettings(), _deltas(token_ids, [1]))
    entries = [entry for piece in pieces for entry in piece.logprobs]
    for index, entry in enumerate(entries):
        before = _TOKENIZER.bytes.text(token_ids[:index]).rstrip("�")
        assert entry.offset == len(before)


def test_text_held_back_for_a_match_that_never_completes_comes_before_the_end() -> None:
    token_ids = _TOKENIZER.encode_rendered("the st")
    text, entries, reason = _joined(_read(TextSettings(stops=("stop",)), _deltas(token_ids, [1])))
    assert text == "the st"
    assert entries == token_ids
    assert reason is FinishReason.LENGTH


def test_the_token_that_ends_the_sample_is_counted_and_not_shown() -> None:
    token_ids = [*_TOKENIZER.encode_rendered("all"), _EOS]
    settings = TextSettings(is_special_skipped=False)
    sample = SampleText(_TOKENIZER.bytes, settings)
    piece = sample.feed(_deltas(token_ids, [9], FinishReason.STOP)[0])
    assert piece.text == "all"
    assert piece.token_ids == tuple(token_ids)
    assert sample.num_tokens == len(token_ids)
    assert [entry.logprob.token_id for entry in piece.logprobs] == token_ids[:-1]


def test_special_tokens_are_skipped_or_written_out_as_asked_without_invented_spaces() -> None:
    token_ids = [*_TOKENIZER.encode_rendered("a"), 1, 1, *_TOKENIZER.encode_rendered("b")]
    skipped, entries, _ = _joined(_read(TextSettings(), _deltas(token_ids, [1])))
    shown, _, _ = _joined(_read(TextSettings(is_special_skipped=False), _deltas(token_ids, [1])))
    assert skipped == "ab"
    assert 1 not in entries
    assert shown == "a<|start|><|start|>b"


def test_a_stop_string_that_completes_before_min_tokens_does_not_end_the_answer() -> None:
    token_ids = list(map(_TOKENIZER._tokenizer.token_to_id, "abcabc"))
    settings = TextSettings(stops=("abc",), min_tokens=4)
    text, _, reason = _joined(_read(settings, _deltas(token_ids, [1])))
    assert text == "abc"
    assert reason is FinishReason.STOP
    late = TextSettings(stops=("abc",), min_tokens=3)
    assert _joined(_read(late, _deltas(token_ids, [1])))[0] == ""


def test_the_stop_string_is_shown_where_it_is_asked_for() -> None:
    token_ids = _TOKENIZER.encode_rendered("the end of it")
    settings = TextSettings(stops=("end",), is_stop_included=True)
    text, _, reason = _joined(_read(settings, _deltas(token_ids, [1])))
    assert text == "the end"
    assert reason is FinishReason.STOP


def test_a_stop_string_wins_over_the_length_reached_by_the_same_token() -> None:
    token_ids = _TOKENIZER.encode_rendered("the end")
    pieces = _read(TextSettings(stops=("end",)), _deltas(token_ids, [1]))
    assert _joined(pieces)[0] == "the "
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_half_a_character_at_the_end_is_replaced() -> None:
    token_ids = _TOKENIZER.encode_rendered("🦙")[:1]
    assert _joined(_read(TextSettings(), _deltas(token_ids, [1])))[0] == "�"


def test_what_stop_strings_cost_is_paid_once_for_all_samples_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def counting(stop: str) -> list[int]:
        made.append(stop)
        return fallback_of(stop)

    monkeypatch.setattr(stops, "_fallback", counting)
    settings = TextSettings(stops=("the end", "cd" * 500))
    samples = [SampleText(_TOKENIZER.bytes, settings, index) for index in range(50)]
    assert made == list(settings.stops)
    # and each sample has a state of its own
    first, second = (
        [TokenDelta(index, 0, tuple(_TOKENIZER.encode_prompt(text))) for text in texts]
        for index, texts in enumerate((("x the", " end"), ("y the", " rise")))
    )
    assert [samples[0].feed(delta).text for delta in first] == ["x ", ""]
    assert samples[0].finish_reason is FinishReason.STOP
    assert "".join(samples[1].feed(delta).text for delta in second) == "y the rise"
