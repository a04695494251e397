"""What a prefill worker hands over: the reference's KV and first token, and only what decode lacks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from core.errors import ReservationRefused, TransferCorrupt
from core.request import FinishReason
from tests.integration.prefill_worker.conftest import MakeSite, oracle_kv, prompt_ids
from tests.oracle import oracle_greedy, oracle_logits


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 50, 96])
@pytest.mark.parametrize("token_budget", [16, 512])
async def test_the_pushed_kv_and_the_first_token_are_those_of_the_reference(
    make_site: MakeSite, num_tokens: int, token_budget: int
) -> None:
    site = await make_site(token_budget=token_budget)
    ids = prompt_ids(num_tokens)
    job = site.job(ids)
    result = await site.worker.prefill(job)
    assert [list(delta.token_ids) for delta in result.deltas] == [oracle_greedy(site.folder, ids, 1)]
    assert (result.deltas[0].position, result.deltas[0].finish_reason) == (0, None)
    arrival = site.decode.arrivals[job.ticket_id]
    await asyncio.wait_for(arrival.ended.wait(), 5)
    assert arrival.num_tokens == num_tokens
    np.testing.assert_allclose(arrival.kv(), oracle_kv(site.folder, ids), atol=1e-4)
    await site.settle()
    assert site.num_ended("committed") == 1


async def test_the_kv_arrives_over_grpc_as_it_was_computed(make_site: MakeSite) -> None:
    site = await make_site(is_grpc=True, token_budget=32)
    ids = prompt_ids(200)
    job = site.job(ids)
    result = await site.worker.prefill(job)
    assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
    arrival = site.decode.arrivals[job.ticket_id]
    await asyncio.wait_for(arrival.ended.wait(), 5)
    np.testing.assert_allclose(arrival.kv(), oracle_kv(site.folder, ids), atol=1e-4)
    await site.settle()


async def test_a_tail_block_does_not_carry_what_its_former_owner_left_there(make_site: MakeSite) -> None:
    site = await make_site()
    site.runner.cache.pool.tensor.fill_(7.0)  # another tenant's KV in every free block
    job = site.job(prompt_ids(19))
    await site.worker.prefill(job)
    await site.settle()
    arrival = site.decode.arrivals[job.ticket_id]
    tail = np.frombuffer(arrival.blocks[1], np.float32).reshape(arrival.ticket.layout.block_shape)
    assert not np.any(tail[:, :, :, 3:])
    assert np.all(np.any(tail[:, :, :, :3], axis=-1))


async def test_prompts_that_share_steps_do_not_mix(make_site: MakeSite) -> None:
    site = await make_site(token_budget=64)
    jobs = [
        site.job(prompt_ids(length, seed), request_id=f"r{seed}")
        for seed, length in enumerate((5, 40, 90, 17))
    ]
    results = await asyncio.gather(*(site.worker.prefill(job) for job in jobs))
    await site.settle()
    for job, result in zip(jobs, results, strict=True):
        ids = job.request.prompt_token_ids
        assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
        kv = site.decode.arrivals[job.ticket_id].kv()
        np.testing.assert_allclose(kv, oracle_kv(site.folder, ids), atol=1e-4)


async def test_a_known_prefix_is_neither_computed_nor_sent_again(make_site: MakeSite) -> None:
    site = await make_site()
    first = site.job(prompt_ids(50))
    await site.worker.prefill(first)
    await site.settle()
    second = site.job((*prompt_ids(50)[:40], *prompt_ids(30, seed=1)))
    result = await site.worker.prefill(second)
    await site.settle()
    assert result.num_cached_tokens == 32
    arrival = site.decode.arrivals[second.ticket_id]
    assert arrival.held == (0, 1)
    ids = second.request.prompt_token_ids
    np.testing.assert_allclose(arrival.kv(), oracle_kv(site.folder, ids), atol=1e-4)
    assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
    assert site.value("baton_prefix_query_tokens_total") == 50 + 70
    assert site.value("baton_prefix_hit_tokens_total") == 32


async def test_the_ticket_says_what_decode_has_to_reserve(make_site: MakeSite) -> None:
    site = await make_site()
    for max_tokens, num_growth in ((5, 5), (100, 16)):
        job = site.job(prompt_ids(40), max_tokens=max_tokens)
        await site.worker.prefill(job)
        ticket = site.decode.offers[-1]
        assert ticket.num_growth_tokens == num_growth
        assert (ticket.num_tokens, ticket.num_blocks, len(ticket.block_hashes)) == (40, 3, 2)
        assert (ticket.prefill, ticket.decode) == (site.worker.ref, site.decode_ref)
        assert (ticket.ticket_id, ticket.request_id) == (job.ticket_id, job.request.request_id)
        assert ticket.is_prefix_cache_read
    await site.settle()


async def test_blocks_travel_while_later_chunks_are_still_to_come(make_site: MakeSite) -> None:
    site = await make_site(token_budget=4)
    site.gate.hold(after=4)  # one full block
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(240))))
    await asyncio.wait_for(site.decode.first_write.wait(), 5)
    await site.gate.reached()
    assert not call.done()
    assert site.value("baton_num_running") == 1
    site.gate.release()
    await call
    await site.settle()


async def test_n_samples_cost_one_forward_and_one_ticket_and_differ(make_site: MakeSite) -> None:
    site = await make_site()
    ids = prompt_ids(40)
    sampling = {"temperature": 1.5, "seed": 11}
    job = site.job(ids, num_samples=4, **sampling)
    result = await site.worker.prefill(job)
    await site.settle()
    assert [delta.sample_index for delta in result.deltas] == [0, 1, 2, 3]
    tokens = [delta.token_ids for delta in result.deltas]
    assert len(set(tokens)) > 1
    assert [ticket.num_samples for ticket in site.decode.offers] == [4]
    assert site.value("baton_prompt_tokens_total") == 40
    assert site.value("baton_generated_tokens_total") == 4
    alone = await site.worker.prefill(site.job(ids, **sampling))
    assert alone.deltas[0].token_ids == tokens[0]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_nothing_is_offered_when_no_second_token_is_wanted(
    make_site: MakeSite, max_tokens: int
) -> None:
    site = await make_site()
    result = await site.worker.prefill(site.job(prompt_ids(20), max_tokens=max_tokens))
    assert len(result.deltas[0].token_ids) == max_tokens
    assert result.deltas[0].finish_reason is FinishReason.LENGTH
    await site.settle()
    assert site.decode.offers == []
    assert site.value("baton_generated_tokens_total") == max_tokens


async def test_without_a_decode_worker_the_first_token_comes_without_an_offer(make_site: MakeSite) -> None:
    site = await make_site()
    ids = prompt_ids(20)
    result = await site.worker.prefill(site.job(ids, is_handed_over=False))
    assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
    assert result.deltas[0].finish_reason is None
    await site.settle()
    assert site.decode.offers == []


async def test_a_first_token_that_ends_the_answer_aborts_the_ticket(make_site: MakeSite) -> None:
    site = await make_site()
    ids = prompt_ids(20)
    job = site.job(ids, stop_token_ids=tuple(oracle_greedy(site.folder, ids, 1)))
    result = await site.worker.prefill(job)
    assert result.deltas[0].finish_reason is FinishReason.STOP
    await site.settle()
    assert job.ticket_id in site.decode.tombstones
    assert site.num_ended("aborted") == 1
    assert site.value("baton_sequences_finished_total", reason="stop") == 1


async def test_the_ticket_lives_on_while_one_sample_does(make_site: MakeSite) -> None:
    site = await make_site()
    ids = prompt_ids(40)
    sampling = {"temperature": 1.5, "seed": 11}
    free = await site.worker.prefill(site.job(ids, num_samples=4, **sampling))
    stop = free.deltas[0].token_ids
    job = site.job(ids, num_samples=4, stop_token_ids=stop, **sampling)
    result = await site.worker.prefill(job)
    await site.settle()
    reasons = [delta.finish_reason for delta in result.deltas]
    assert reasons[0] is FinishReason.STOP
    assert None in reasons
    assert site.decode.arrivals[job.ticket_id].is_committed


async def test_a_resumed_request_goes_on_where_it_was(make_site: MakeSite) -> None:
    site = await make_site(token_budget=16)
    ids = prompt_ids(30)
    tokens = oracle_greedy(site.folder, ids, 8)
    job = site.job(ids, emitted=tuple(tokens[:5]))
    result = await site.worker.prefill(job)
    await site.settle()
    assert (result.deltas[0].position, list(result.deltas[0].token_ids)) == (5, tokens[5:6])
    arrival = site.decode.arrivals[job.ticket_id]
    assert arrival.num_tokens == 35
    np.testing.assert_allclose(arrival.kv(), oracle_kv(site.folder, (*ids, *tokens[:5])), atol=1e-4)
    assert len(arrival.ticket.block_hashes) == 2
    assert site.value("baton_generated_tokens_total") == 1


async def test_prompt_logprobs_are_those_of_the_reference_whatever_is_cached(make_site: MakeSite) -> None:
    site = await make_site(token_budget=16)
    ids = prompt_ids(50)
    await site.worker.prefill(site.job(ids))
    result = await site.worker.prefill(site.job(ids, prompt_logprobs=2, logprobs=0))
    assert result.num_cached_tokens == 0
    expected = torch.log_softmax(oracle_logits(site.folder, ids), dim=-1)
    assert [entry.token_id for entry in result.prompt_logprobs] == list(ids[1:])
    found = [entry.logprob for entry in result.prompt_logprobs]
    np.testing.assert_allclose(found, [expected[i, token] for i, token in enumerate(ids[1:])], atol=1e-3)
    assert all(len(entry.top) == 2 for entry in result.prompt_logprobs)
    (logprob,) = result.deltas[0].logprobs
    assert logprob.logprob == pytest.approx(float(expected[-1].max()), abs=1e-3)


async def test_the_first_token_waits_for_the_grant_and_not_for_the_transfer(make_site: MakeSite) -> None:
    site = await make_site()
    site.decode.door.clear()
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(20))))
    await site.until(lambda: site.value("baton_sequences_finished_total", reason="handed_over") == 1)
    await asyncio.sleep(0.05)
    assert not call.done()
    site.decode.door.set()
    await asyncio.wait_for(call, 5)
    await site.settle()


async def test_a_refused_offer_fails_the_call_at_once_and_what_was_computed_stays_cached(
    make_site: MakeSite,
) -> None:
    site = await make_site(token_budget=4)
    site.decode.refusal = ReservationRefused("no room", worker_id="d0")
    site.decode.door.clear()
    site.gate.hold(after=9)  # two full blocks and a part
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(480))))
    await site.gate.reached()
    assert len(site.runner.cache.allocator.prefix_cache) == 2
    site.decode.door.set()
    with pytest.raises(ReservationRefused) as caught:
        await call
    assert caught.value.details["worker_id"] == "d0"
    site.gate.release()
    await site.settle()
    assert site.gate.num_steps == 10, "the step that had begun was the last"
    assert site.value("baton_sequences_finished_total", reason="cancelled") == 1, "computing stopped"
    assert site.value("baton_generated_tokens_total") == 0
    site.decode.refusal = None
    result = await site.worker.prefill(site.job(prompt_ids(480)))
    assert result.num_cached_tokens == 32
    await site.settle()


async def test_a_commit_that_fails_after_the_reply_frees_the_lease_and_is_counted(
    make_site: MakeSite,
) -> None:
    site = await make_site()
    site.decode.commit_error = TransferCorrupt("not what was claimed")
    job = site.job(prompt_ids(40))
    result = await site.worker.prefill(job)
    assert len(result.deltas[0].token_ids) == 1
    await site.settle()
    assert not site.decode.arrivals[job.ticket_id].is_committed
    assert job.ticket_id in site.decode.tombstones
    assert (site.num_ended("committed"), site.num_ended("aborted")) == (0, 1)


async def test_leases_of_slow_tickets_hold_back_new_prompts_and_all_come_through(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=8)
    jobs = [site.job(prompt_ids(60, seed), request_id=f"r{seed}") for seed in range(6)]
    results = await asyncio.gather(*(site.worker.prefill(job) for job in jobs))
    await site.settle()
    for job, result in zip(jobs, results, strict=True):
        ids = job.request.prompt_token_ids
        assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
        np.testing.assert_allclose(
            site.decode.arrivals[job.ticket_id].kv(), oracle_kv(site.folder, ids), atol=1e-4
        )


async def test_a_prompt_whose_ticket_is_still_open_is_not_read_again(make_site: MakeSite) -> None:
    """As when decode was lost before the commit, and the request is placed once more."""
    site = await make_site()
    site.decode.door.clear()
    first = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(100))))
    await site.until(lambda: site.value("baton_sequences_finished_total", reason="handed_over") == 1)
    again = await site.worker.prefill(site.job(prompt_ids(100), is_handed_over=False))
    assert again.num_cached_tokens == 96
    assert not first.done()
    site.decode.door.set()
    assert (await first).deltas[0].token_ids == again.deltas[0].token_ids
    emitted = again.deltas[0].token_ids
    resumed = await site.worker.prefill(site.job(prompt_ids(100), emitted=emitted))
    assert resumed.num_cached_tokens == 96
    await site.settle()
