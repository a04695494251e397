"""A decode worker that prefills by itself gives the reference's tokens, whatever runs beside."""

from __future__ import annotations

import asyncio

import pytest
import torch

from core.errors import ContextTooLong, InvalidRequest, Overloaded
from core.jobs import SampleStart
from core.request import FinishReason
from tests.integration.decode_worker.conftest import Answer, MakeSite, prompt_ids
from tests.oracle import oracle_greedy, oracle_logits


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("token_budget", [16, 512])
async def test_tokens_are_those_of_the_reference(
    make_site: MakeSite, num_tokens: int, token_budget: int
) -> None:
    site = await make_site(token_budget=token_budget, max_num_seqs=8)
    ids = prompt_ids(num_tokens)
    answer = await site.answer(site.job(site.request(ids)))
    assert answer.token_ids == oracle_greedy(site.folder, ids, 12, eos=(2,))
    assert answer.num_cached_tokens == 0
    await site.settle()
    assert site.value("baton_generated_tokens_total") == len(answer.token_ids)
    assert site.value("baton_prompt_tokens_total") == num_tokens


async def test_a_cached_prompt_gives_the_same_tokens_and_reports_whole_blocks(make_site: MakeSite) -> None:
    site = await make_site()
    for num_tokens in (15, 16, 17, 32, 48):
        ids = prompt_ids(num_tokens, seed=num_tokens)
        cold = await site.answer(site.job(site.request(ids, f"cold{num_tokens}")))
        warm = await site.answer(site.job(site.request(ids, f"warm{num_tokens}")))
        assert warm.token_ids == cold.token_ids
        assert warm.num_cached_tokens == (num_tokens - 1) // 16 * 16


async def test_requests_at_once_do_not_mix(make_site: MakeSite) -> None:
    site = await make_site(prefill_chunk=16)
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((3, 70, 16, 33, 120, 8, 50, 1))]
    jobs = [site.job(site.request(ids, f"r{index}")) for index, ids in enumerate(prompts)]
    answers = await asyncio.gather(*(site.answer(job) for job in jobs))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle_greedy(site.folder, ids, 12, eos=(2,))
    await site.settle()


async def test_emitted_tokens_are_facts_and_the_stream_goes_on_after_them(make_site: MakeSite) -> None:
    site = await make_site(prefill_chunk=16)
    ids = prompt_ids(30)
    request = site.request(ids, temperature=0.9, top_p=0.9, repetition_penalty=1.2, max_tokens=20)
    whole = (await site.answer(site.job(request))).token_ids
    for num_emitted in (1, 2, 7, 19):
        job = site.job(request, emitted=tuple(whole[:num_emitted]), attempt=num_emitted)
        resumed = await site.answer(job)
        assert resumed.first_position == num_emitted
        assert resumed.token_ids == whole[num_emitted:]


async def test_emitted_tokens_that_end_the_answer_end_it_at_once(make_site: MakeSite) -> None:
    site = await make_site()
    request = site.request(prompt_ids(5), max_tokens=3, stop_token_ids=(77,))
    full = await site.answer(site.job(request, emitted=(5, 6, 8)))
    assert (full.token_ids, full.finish_reason) == ([], FinishReason.LENGTH)
    stopped = await site.answer(site.job(request, emitted=(5, 77), attempt=1))
    assert (stopped.token_ids, stopped.finish_reason) == ([], FinishReason.STOP)
    await site.settle()


async def test_samples_of_one_prompt_differ_and_each_is_what_it_is_alone(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    request = site.request(prompt_ids(37), num_samples=4, temperature=1.0, max_tokens=20, ignore_eos=True)
    together = await site.answers(site.job(request))
    assert len({tuple(answer.token_ids) for answer in together.values()}) == 4
    for index, answer in together.items():
        alone = await site.answer(site.job(request, samples=(SampleStart(index),), attempt=index + 1))
        assert answer.token_ids == alone.token_ids
    await site.settle()


async def test_samples_that_find_no_room_of_their_own_wait_and_are_the_same(make_site: MakeSite) -> None:
    wide, narrow = await make_site(), await make_site(num_kv_blocks=6)
    request = wide.request(prompt_ids(37), num_samples=4, temperature=1.0, max_tokens=30, ignore_eos=True)
    expected = await wide.answers(wide.job(request))
    found = await narrow.answers(narrow.job(request))
    assert {i: a.token_ids for i, a in found.items()} == {i: a.token_ids for i, a in expected.items()}
    assert narrow.value("baton_preemptions_total") > 0
    assert narrow.value("baton_generated_tokens_total") == 4 * 30
    await narrow.settle()


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 17])
async def test_exactly_max_tokens_come(make_site: MakeSite, max_tokens: int) -> None:
    site = await make_site()
    request = site.request(prompt_ids(20), max_tokens=max_tokens, ignore_eos=True, num_samples=2)
    for answer in (await site.answers(site.job(request))).values():
        assert len(answer.token_ids) == max_tokens
        assert answer.finish_reason is FinishReason.LENGTH
    await site.settle()


async def test_the_context_limit_ends_by_length_and_a_prompt_beyond_it_is_refused(
    make_site: MakeSite,
) -> None:
    site = await make_site(max_context=64)
    answer = await site.answer(site.job(site.request(prompt_ids(60), max_tokens=100, ignore_eos=True)))
    assert (len(answer.token_ids), answer.finish_reason) == (4, FinishReason.LENGTH)
    with pytest.raises(ContextTooLong):
        await site.answer(site.job(site.request(prompt_ids(64), "long")))
    await site.settle()


async def test_stop_ids_end_and_min_tokens_hold_them_back(make_site: MakeSite) -> None:
    site = await make_site()
    ids = prompt_ids(25)
    greedy = oracle_greedy(site.folder, ids, 12)
    stop = greedy[3]
    answer = await site.answer(site.job(site.request(ids, stop_token_ids=(stop,))))
    assert answer.token_ids == greedy[: greedy.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP
    held = await site.answer(site.job(site.request(ids, "held", stop_token_ids=(stop,), min_tokens=6)))
    assert stop not in held.token_ids[:6]
    assert len(held.token_ids) >= 6


async def test_forced_end_of_sequence_ends_at_the_first_token(make_site: MakeSite) -> None:
    site = await make_site()
    answer = await site.answer(site.job(site.request(prompt_ids(9), logit_bias=((2, 100.0),))))
    assert (answer.token_ids, answer.finish_reason) == ([2], FinishReason.STOP)


async def test_logprobs_are_the_references(make_site: MakeSite) -> None:
    site = await make_site()
    ids = prompt_ids(21)
    answer = await site.answer(site.job(site.request(ids, temperature=0.7, logprobs=3)))
    reference = torch.log_softmax(oracle_logits(site.folder, [*ids, *answer.token_ids]), dim=-1)
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for index, entry in enumerate(answer.logprobs):
        row = reference[len(ids) - 1 + index]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("prefill_chunk", [7, 64])
async def test_prompt_logprobs_come_once_and_are_the_references_even_for_a_cached_prompt(
    make_site: MakeSite, prefill_chunk: int
) -> None:
    site = await make_site(prefill_chunk=prefill_chunk, token_budget=prefill_chunk, max_num_seqs=4)
    ids = prompt_ids(40)
    await site.answer(site.job(site.request(ids, "first")))
    request = site.request(ids, prompt_logprobs=2, num_samples=2)
    answers = await site.answers(site.job(request))
    entries = answers[0].prompt_logprobs
    assert answers[1].prompt_logprobs == ()
    assert [entry.token_id for entry in entries] == list(ids[1:])
    reference = torch.log_softmax(oracle_logits(site.folder, ids), dim=-1)
    for index, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(reference[index][entry.token_id]), abs=1e-3)
    assert answers[0].num_cached_tokens == 0


async def test_prompt_logprobs_without_output(make_site: MakeSite) -> None:
    site = await make_site()
    answer = await site.answer(site.job(site.request(prompt_ids(20), max_tokens=0, prompt_logprobs=0)))
    assert (len(answer.prompt_logprobs), answer.token_ids) == (19, [])


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 2}],
    ids=["greedy", "seeded", "penalties and logprobs"],
)
async def test_streams_preempted_in_a_tiny_pool_are_what_they_are_alone(
    make_site: MakeSite, sampling: dict[str, float]
) -> None:
    wide, tiny = await make_site(num_kv_blocks=128), await make_site(num_kv_blocks=24, max_num_seqs=4)
    prompts = [prompt_ids(60, seed) for seed in range(4)]
    requests = [
        wide.request(ids, f"r{index}", max_tokens=150, ignore_eos=True, **sampling)
        for index, ids in enumerate(prompts)
    ]
    alone = [await wide.answer(wide.job(request)) for request in requests]
    for attempt in range(2):
        tiny.gate.hold()
        streams = [asyncio.create_task(tiny.answer(tiny.job(item, attempt=attempt))) for item in requests]
        await tiny.gate.reached()
        tiny.gate.release()
        crowded = await asyncio.gather(*streams)
        assert [answer.token_ids for answer in crowded] == [answer.token_ids for answer in alone]
        for one, other in zip(crowded, alone, strict=True):
            assert [entry.logprob for entry in one.logprobs] == pytest.approx(
                [entry.logprob for entry in other.logprobs], abs=1e-3
            )
    await tiny.settle()
    assert tiny.value("baton_preemptions_total") > 0
    assert tiny.value("baton_generated_tokens_total") == 2 * 4 * 150
    assert tiny.value("baton_prompt_tokens_total") == 2 * 4 * 60
    assert tiny.value("baton_prefix_query_tokens_total") == 2 * 4 * 60
    assert tiny.value("baton_prefix_hit_tokens_total") <= 4 * 48


async def test_a_request_that_can_never_fit_is_refused_and_its_neighbour_completes(
    make_site: MakeSite,
) -> None:
    site = await make_site(num_kv_blocks=24)
    small = asyncio.create_task(site.answer(site.job(site.request(prompt_ids(20), "small", max_tokens=50))))
    with pytest.raises(ContextTooLong):
        await site.answer(site.job(site.request(prompt_ids(380), "huge", max_tokens=100)))
    await small
    await site.settle()


async def test_a_request_that_just_fits_completes(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=8)
    answer = await site.answer(site.job(site.request(prompt_ids(100), max_tokens=28, ignore_eos=True)))
    assert len(answer.token_ids) == 28
    await site.settle()


async def test_ill_formed_jobs_are_refused_by_field(make_site: MakeSite) -> None:
    site = await make_site()
    for request in (
        site.request(()),
        site.request((5, 512)),
        site.request((-1,)),
        site.request((5,), max_tokens=-1),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await site.answer(site.job(request))
        assert "param" in caught.value.details


async def test_beyond_the_queue_limit_newcomers_are_refused_at_once(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=1, max_waiting=2, token_budget=8)
    jobs = [
        site.job(site.request(prompt_ids(30, seed), f"r{seed}", max_tokens=40, ignore_eos=True))
        for seed in range(8)
    ]
    site.gate.hold()
    streams = [asyncio.create_task(site.answer(jobs[0]))]
    await site.gate.reached()
    streams += [asyncio.create_task(site.answer(job)) for job in jobs[1:]]
    await site.gate.step()
    site.gate.release()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(result, Answer) for result in results[:3])
    for error in results[3:]:
        assert isinstance(error, Overloaded)
        assert error.details["retry_after_s"]
    await site.settle()
