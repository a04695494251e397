"""A worker that runs one step ahead streams what one that waits for each step does, log-probabilities too."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from core.errors import Cancelled
from core.jobs import CancelJob, GenerateJob, SampleStart
from engine.running_step import RunningStep
from engine.step import StepPlan
from engine.stream_step import UNKNOWN_TOKEN
from tests.integration.decode_worker.conftest import Answer, MakeSite, Site, prompt_ids

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "logprobs": 0},
    {"temperature": 0.9, "top_p": 0.9, "min_tokens": 9, "logit_bias": ((40, 1.0),)},
    {"temperature": 0.7, "stop_token_ids": tuple(range(0, 512, 9))},
    {"temperature": 1.0, "max_tokens": 3},
    {"temperature": 0.0, "prompt_logprobs": 1},
]
PENALTIES: dict[str, Any] = {
    "temperature": 0.9,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "logprobs": 1,
}


class Watched:
    """Counts the steps of a site that were started before the result of the one before was known."""

    def __init__(self, site: Site) -> None:
        self.num_steps = Counter[str]()
        start = site.runner.start

        def watch(plan: StepPlan) -> RunningStep:
            is_ahead = (plan.streams.token_ids == UNKNOWN_TOKEN).any()
            self.num_steps["ahead" if is_ahead else "known"] += 1
            self.num_steps["beside a chunk"] += bool(is_ahead and plan.chunks)
            return start(plan)

        site.runner.start = watch  # type: ignore[method-assign]


def jobs_of(site: Site, samplings: list[dict[str, Any]]) -> list[GenerateJob]:
    """Prompts of several lengths, some of which share a prefix; each fourth has 3 samples."""
    jobs = []
    for index, sampling in enumerate(samplings):
        ids = prompt_ids(30 + 5 * index, seed=index // 2)
        num_samples = 3 if index % 4 == 1 else 1
        values = {"max_tokens": 40, **sampling}
        jobs.append(site.job(site.request(ids, f"r{index}", num_samples, **values)))
    return jobs


def assert_same(found: dict[int, Answer], expected: dict[int, Answer]) -> None:
    for sample_index, answer in expected.items():
        other = found[sample_index]
        assert (other.token_ids, other.finish_reason) == (answer.token_ids, answer.finish_reason)
        pairs = ((other.logprobs, answer.logprobs), (other.prompt_logprobs, answer.prompt_logprobs))
        for ours, theirs in pairs:
            assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
            assert [entry.logprob for entry in ours] == pytest.approx(
                [entry.logprob for entry in theirs], abs=1e-3
            )


@pytest.mark.parametrize("num_kv_blocks", [128, 30], ids=["room for all", "a tiny pool"])
async def test_streams_that_come_and_go_are_those_of_a_worker_that_waits(
    make_site: MakeSite, num_kv_blocks: int
) -> None:
    waiting = await make_site(num_kv_blocks=128, overlap="off")
    ahead = await make_site(num_kv_blocks, overlap="on", max_num_seqs=6, prefill_chunk=7)
    watched = Watched(ahead)
    jobs = jobs_of(waiting, SAMPLINGS * 2)
    expected = [await waiting.answers(job) for job in jobs]
    # a newcomer arrives when an earlier one has ended, so that prompts are read beside running streams
    places = asyncio.Semaphore(3)

    async def answer(job: GenerateJob) -> dict[int, Answer]:
        async with places:
            return await ahead.answers(job)

    found = await asyncio.gather(*(answer(job) for job in jobs))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert watched.num_steps["ahead"] > watched.num_steps["known"] / 2
    assert watched.num_steps["beside a chunk"] > 0
    await ahead.settle()


async def test_a_tiny_pool_preempts_and_nothing_changes(make_site: MakeSite) -> None:
    waiting = await make_site(num_kv_blocks=128, overlap="off")
    tiny = await make_site(num_kv_blocks=24, overlap="on", max_num_seqs=4)
    watched = Watched(tiny)
    requests = [
        waiting.request(prompt_ids(60, seed), f"r{seed}", max_tokens=150, ignore_eos=True, temperature=0.8)
        for seed in range(4)
    ]
    expected = [await waiting.answers(waiting.job(request)) for request in requests]
    found = await asyncio.gather(*(tiny.answers(tiny.job(request)) for request in requests))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    await tiny.settle()
    assert tiny.value("baton_preemptions_total") > 0
    assert tiny.value("baton_generated_tokens_total") == 4 * 150
    assert watched.num_steps["ahead"] > 100


async def test_penalties_count_each_token_though_others_would_run_ahead(make_site: MakeSite) -> None:
    waiting, ahead = await make_site(overlap="off"), await make_site(overlap="on")
    watched = Watched(ahead)
    jobs = jobs_of(waiting, [PENALTIES, {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True}])
    expected = [await waiting.answers(job) for job in jobs]
    for one, other in zip(await asyncio.gather(*map(ahead.answers, jobs)), expected, strict=True):
        assert_same(one, other)
    assert watched.num_steps["ahead"] > 0
    await ahead.settle()


async def test_a_handed_over_prompt_goes_on_ahead(make_site: MakeSite) -> None:
    site = await make_site(overlap="on", num_kv_blocks=128)
    waiting = await make_site(overlap="off", num_kv_blocks=128)
    for num_tokens, num_samples in ((15, 1), (16, 1), (50, 3)):
        request = site.request(
            prompt_ids(num_tokens), f"r{num_tokens}", num_samples, temperature=0.8, max_tokens=30
        )
        expected = await waiting.answers(waiting.job(request))
        handoff = site.prefill.offer(request)
        await handoff.finish()
        starts = tuple(SampleStart(index, (token,)) for index, token in enumerate(handoff.first_tokens))
        found = await site.answers(site.job(request, samples=starts, ticket_id=handoff.ticket_id))
        for index, answer in expected.items():
            assert [handoff.first_tokens[index], *found[index].token_ids] == answer.token_ids
    assert site.num_ended("released") == 3
    await site.settle()


async def test_what_is_cancelled_leaves_the_others_as_they_are(make_site: MakeSite) -> None:
    waiting, ahead = await make_site(overlap="off"), await make_site(overlap="on")
    jobs = jobs_of(waiting, [{"temperature": 0.8, "max_tokens": 200, "ignore_eos": True}] * 3)
    expected = [await waiting.answers(job) for job in jobs]
    kept = asyncio.gather(ahead.answers(jobs[0]), ahead.answers(jobs[1]))
    seen: list[int] = []

    async def cancel_midway() -> None:
        async for event in ahead.worker.generate(jobs[2]):
            seen.extend(event.delta.token_ids)
            if len(seen) == 20:
                await ahead.worker.cancel(CancelJob(jobs[2].request.request_id))

    with pytest.raises(Cancelled):
        await cancel_midway()
    assert seen == expected[2][0].token_ids[: len(seen)]
    for one, other in zip(await kept, expected, strict=False):
        assert_same(one, other)
    await ahead.settle()
