"""What a prefill job must be before it may wait."""

from __future__ import annotations

import dataclasses

import pytest

from core.errors import ContextTooLong, InvalidRequest
from core.jobs import SampleStart
from prefill_worker.prompt import new_prompt
from tests.unit.prefill_worker.prompts import make_job


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_and_one_that_just_fits_is_not() -> None:
    assert new_prompt(make_job((1,) * 9), max_context=10, vocab_size=5, now=0.0).is_sampled
    with pytest.raises(ContextTooLong) as caught:
        new_prompt(make_job((1,) * 10), max_context=10, vocab_size=5, now=0.0)
    assert caught.value.details["max_context"] == 10


def test_a_prompt_that_is_only_read_may_fill_the_whole_context() -> None:
    prompt = new_prompt(make_job((1,) * 10, max_tokens=0), max_context=10, vocab_size=5, now=0.0)
    assert not prompt.is_sampled
    assert not prompt.is_handed_over


@pytest.mark.parametrize("token_ids", [(), (1, -1), (1, 5)])
def test_prompts_that_the_model_cannot_read_are_refused_by_name(token_ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        new_prompt(make_job(token_ids), max_context=10, vocab_size=5, now=0.0)
    assert caught.value.details["param"] == "prompt"


def test_a_bias_on_a_token_that_does_not_exist_is_refused_before_it_reaches_another_row() -> None:
    job = make_job((1,))
    biased = dataclasses.replace(job.request.sampling, logit_bias=((5, 1.0),))
    job = dataclasses.replace(job, request=dataclasses.replace(job.request, sampling=biased))
    with pytest.raises(InvalidRequest) as caught:
        new_prompt(job, max_context=10, vocab_size=5, now=0.0)
    assert caught.value.details["param"] == "logit_bias"


@pytest.mark.parametrize(
    "samples",
    [(), (SampleStart(0), SampleStart(0)), (SampleStart(0, (1,)), SampleStart(1))],
    ids=["none", "twice", "several with tokens"],
)
def test_samples_that_cannot_be_read_together_are_refused(samples: tuple[SampleStart, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        new_prompt(make_job((1,), samples=samples), max_context=10, vocab_size=5, now=0.0)
    assert caught.value.details["param"] == "samples"


@pytest.mark.parametrize(
    ("max_tokens", "num_emitted", "is_handed_over"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (3, 2, False)],
)
def test_a_ticket_is_offered_only_if_a_second_token_can_follow(
    max_tokens: int, num_emitted: int, is_handed_over: bool
) -> None:
    samples = (SampleStart(0, (1,) * num_emitted),)
    prompt = new_prompt(make_job((1, 2), max_tokens=max_tokens, samples=samples), 10, 5, now=0.0)
    assert prompt.is_handed_over is is_handed_over


def test_no_ticket_is_offered_when_the_first_token_fills_the_context() -> None:
    assert not new_prompt(make_job((1,) * 9), max_context=10, vocab_size=5, now=0.0).is_handed_over
    assert new_prompt(make_job((1,) * 8), max_context=10, vocab_size=5, now=0.0).is_handed_over


def test_emitted_tokens_are_read_like_prompt_and_counted_as_output() -> None:
    prompt = new_prompt(make_job((1, 2, 3), samples=(SampleStart(0, (4, 4)),)), 10, 5, now=0.0)
    assert prompt.sequence.token_ids == [1, 2, 3, 4, 4]
    assert prompt.sequence.num_output_tokens == 2
    assert prompt.num_uncached_tokens == 5
