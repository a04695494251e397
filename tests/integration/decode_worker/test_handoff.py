"""A stream that goes on from transferred KV is the stream of one box; without the KV it is the same, only
later.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.errors import ReservationRefused, TicketExpired, WorkerDraining
from core.handoff import HandoffTicket
from core.ids import new_ticket_id
from core.jobs import CancelJob, SampleStart
from tests.doubles import settle
from tests.integration.decode_worker.conftest import MakeSite, Site, prompt_ids
from tests.oracle import oracle_greedy


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 50, 96])
async def test_a_transferred_prompt_gives_the_references_tokens_without_being_read_again(
    make_site: MakeSite, num_tokens: int
) -> None:
    site = await make_site()
    ids = prompt_ids(num_tokens)
    request = site.request(ids)
    handoff = site.prefill.offer(request)
    assert await handoff.session.offered() == ()
    await handoff.finish()
    job = site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
    answer = await site.answer(job)
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(site.folder, ids, 12, eos=(2,))
    assert answer.first_position == 1
    assert site.num_received_bytes() == handoff.ticket.num_blocks * site.runner.layout.block_bytes
    assert site.value("baton_prompt_tokens_total") == 0
    assert site.value("baton_generated_tokens_total") == len(answer.token_ids)
    await site.settle()
    assert site.num_ended("released") == 1


async def test_a_second_turn_sends_only_what_is_missing(make_site: MakeSite) -> None:
    site = await make_site()
    first = site.request(prompt_ids(40), "first")
    handoff = site.prefill.offer(first)
    await handoff.finish()
    reply = (
        await site.answer(site.job(first, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id))
    ).token_ids
    before = site.num_received_bytes()
    turn = site.request(
        (*first.prompt_token_ids, *handoff.first_tokens, *reply, *prompt_ids(20, seed=3)), "second"
    )
    second = site.prefill.offer(turn)
    held = await second.session.offered()
    assert held == tuple(range((40 + len(reply)) // 16)), "generated tokens are cached as well"
    await second.finish()
    answer = await site.answer(site.job(turn, emitted=second.first_tokens, ticket_id=second.ticket_id))
    assert [*second.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, turn.prompt_token_ids, 12, eos=(2,)
    )
    num_missing = second.ticket.num_blocks - len(held)
    assert site.num_received_bytes() - before == num_missing * site.runner.layout.block_bytes


async def test_a_prompt_held_in_full_is_handed_over_without_a_byte(make_site: MakeSite) -> None:
    site = await make_site()
    first = site.request(prompt_ids(48), "first")
    await site.answer(site.job(first))
    request = replace(first, request_id="second")
    handoff = site.prefill.offer(request)
    assert await handoff.session.offered() == (0, 1, 2)
    await handoff.finish()
    answer = await site.answer(site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id))
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, prompt_ids(48), 12, eos=(2,)
    )
    assert site.num_received_bytes() == 0


@pytest.mark.parametrize("num_tokens", [32, 37])
async def test_samples_share_one_ticket_and_are_what_they_are_alone(
    make_site: MakeSite, num_tokens: int
) -> None:
    site = await make_site(num_kv_blocks=128)
    request = site.request(
        prompt_ids(num_tokens), num_samples=3, temperature=1.0, max_tokens=25, ignore_eos=True
    )
    expected = await site.answers(site.job(request, attempt=7))
    handoff = site.prefill.offer(replace(request, is_prefix_cache_read=False))
    await handoff.finish()
    starts = tuple(SampleStart(index, (token,)) for index, token in enumerate(handoff.first_tokens))
    answers = await site.answers(site.job(request, samples=starts, ticket_id=handoff.ticket_id))
    for index, answer in answers.items():
        assert [handoff.first_tokens[index], *answer.token_ids] == expected[index].token_ids
    await site.settle()


async def test_samples_that_ended_at_the_first_token_do_not_come(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=128)
    request = site.request(prompt_ids(21), num_samples=3, temperature=1.0, max_tokens=10, ignore_eos=True)
    handoff = site.prefill.offer(request)
    await handoff.finish()
    job = site.job(request, samples=(SampleStart(2, handoff.first_tokens[2:]),), ticket_id=handoff.ticket_id)
    answer = await site.answer(job)
    assert len(answer.token_ids) == 9
    await site.settle()


async def test_a_resumed_request_is_handed_over_with_its_emitted_tokens(make_site: MakeSite) -> None:
    site = await make_site()
    request = site.request(prompt_ids(30), temperature=0.9, max_tokens=20, ignore_eos=True)
    whole = (await site.answer(site.job(request, attempt=9))).token_ids
    handoff = site.prefill.offer(request, emitted=tuple(whole[:5]))
    await handoff.finish()
    emitted = (*whole[:5], *handoff.first_tokens)
    answer = await site.answer(site.job(request, emitted=emitted, ticket_id=handoff.ticket_id))
    assert [*emitted, *answer.token_ids] == whole


@pytest.mark.parametrize("before", ["the commit", "the offer"])
async def test_a_generate_that_comes_before_the_commit_or_the_offer_waits_for_it(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    site: Site = await make_site(ticket_wait_s=30.0)
    offer, door = site.worker.offer, asyncio.Event()

    async def offer_late(ticket: HandoffTicket, time_left_s: float) -> tuple[int, ...]:
        await door.wait()
        return await offer(ticket, time_left_s)

    monkeypatch.setattr(site.worker, "offer", offer_late)
    request = site.request(prompt_ids(50))
    handoff = site.prefill.offer(request)
    if before == "the commit":
        door.set()
        await handoff.session.offered()
    job = site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
    generating = asyncio.create_task(site.answer(job))
    await site.until(lambda: site.value("baton_num_waiting") == 1)
    await asyncio.sleep(0.15)
    assert not generating.done()
    door.set()
    await handoff.finish()
    answer = await generating
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, prompt_ids(50), 12, eos=(2,)
    )
    assert site.value("baton_prompt_tokens_total") == 0, "it waited instead of prefilling"


async def test_a_ticket_aborted_while_a_generate_waits_is_replaced_by_local_prefill_at_once(
    make_site: MakeSite,
) -> None:
    site = await make_site(ticket_wait_s=30.0)
    request = site.request(prompt_ids(50))
    handoff = site.prefill.offer(request)
    await handoff.session.offered()
    job = site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
    generating = asyncio.create_task(site.answer(job))
    await site.until(lambda: site.value("baton_num_waiting") == 1)
    await handoff.session.abort("prefill gave up")
    answer = await asyncio.wait_for(generating, 5)
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, prompt_ids(50), 12, eos=(2,)
    )
    assert site.value("baton_prompt_tokens_total") == 50
    await site.settle()


async def test_a_ticket_that_never_comes_is_waited_for_and_then_refused(make_site: MakeSite) -> None:
    site = await make_site(ticket_wait_s=0.2)
    request = site.request(prompt_ids(20))
    ticket_id = new_ticket_id()
    answer = await site.answer(site.job(request, ticket_id=ticket_id))
    assert answer.token_ids == oracle_greedy(site.folder, prompt_ids(20), 12, eos=(2,))
    late = site.prefill.offer(replace(request, request_id="late"))
    late_ticket = replace(late.ticket, ticket_id=ticket_id)
    with pytest.raises(TicketExpired):
        await site.worker.offer(late_ticket, 10.0)
    await late.session.abort("not needed")
    await site.settle()


async def test_a_silent_transfer_is_given_up_and_its_late_commit_refused(make_site: MakeSite) -> None:
    site = await make_site(ticket_wait_s=0.2)
    request = site.request(prompt_ids(50))
    handoff = site.prefill.offer(request)
    await handoff.session.offered()
    job = site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
    answer = await site.answer(job)
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, prompt_ids(50), 12, eos=(2,)
    )
    with pytest.raises(TicketExpired):
        await handoff.finish()
    await site.settle()
    assert site.num_ended("aborted") == 1


async def test_kv_of_another_prompt_is_never_attended_to(make_site: MakeSite) -> None:
    site = await make_site()
    wrong = site.request(prompt_ids(50, seed=1))
    handoff = site.prefill.offer(wrong)
    await handoff.finish()
    right = site.request(prompt_ids(50))
    answer = await site.answer(site.job(right, emitted=(7,), ticket_id=handoff.ticket_id))
    expected = await site.answer(site.job(right, emitted=(7,), attempt=1))
    assert answer.token_ids == expected.token_ids
    assert site.num_ended("aborted") == 1
    await site.settle()


async def test_a_ticket_that_covers_all_tokens_leaves_one_to_compute(make_site: MakeSite) -> None:
    site = await make_site()
    request = site.request(prompt_ids(48))
    handoff = site.prefill.offer(request)
    await handoff.finish()
    answer = await site.answer(site.job(request, ticket_id=handoff.ticket_id))
    assert answer.token_ids == oracle_greedy(site.folder, prompt_ids(48), 12, eos=(2,))
    assert answer.num_cached_tokens == 32
    await site.settle()


async def test_an_unclaimed_commit_expires_and_serves_as_a_cached_prefix(make_site: MakeSite) -> None:
    site = await make_site(commit_claim_s=0.1)
    request = site.request(prompt_ids(50))
    handoff = site.prefill.offer(request)
    await handoff.finish()
    await site.until(lambda: site.num_ended("expired") == 1)
    await site.settle()
    answer = await site.answer(site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id))
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, prompt_ids(50), 12, eos=(2,)
    )
    assert answer.num_cached_tokens == 48


async def test_transferred_sequences_that_are_preempted_are_computed_again(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=24, max_num_seqs=4)
    requests = [
        site.request(prompt_ids(60, seed), f"r{seed}", temperature=0.8, max_tokens=150, ignore_eos=True)
        for seed in range(4)
    ]
    wide = await make_site(num_kv_blocks=128)
    alone = [(await wide.answer(wide.job(request))).token_ids for request in requests]
    handoffs = [site.prefill.offer(request, num_growth_tokens=4) for request in requests]
    await asyncio.gather(*(handoff.finish() for handoff in handoffs))
    jobs = [
        site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
        for request, handoff in zip(requests, handoffs, strict=True)
    ]
    site.gate.hold()
    streams = [asyncio.create_task(site.answer(job)) for job in jobs]
    await site.gate.reached()
    site.gate.release()
    answers = await asyncio.gather(*streams)
    assert [[*h.first_tokens, *a.token_ids] for h, a in zip(handoffs, answers, strict=True)] == alone
    assert site.value("baton_preemptions_total") > 0
    assert site.value("baton_generated_tokens_total") == 4 * 149
    assert site.value("baton_prefix_hit_tokens_total") == 0
    await site.settle()


async def test_an_offer_beyond_the_pool_is_refused_at_once_and_what_runs_goes_on(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=10)
    site.gate.hold(after=1)
    running = asyncio.create_task(
        site.answer(site.job(site.request(prompt_ids(60), max_tokens=60, ignore_eos=True)))
    )
    await site.gate.reached()
    handoff = site.prefill.offer(site.request(prompt_ids(120, seed=1), "big"))
    await site.gate.step()
    with pytest.raises(ReservationRefused):
        await handoff.session.offered()
    assert not running.done()
    site.gate.release()
    assert len((await running).token_ids) == 60
    await site.settle()


async def test_a_cancel_that_overtakes_the_offer_refuses_it(make_site: MakeSite) -> None:
    site = await make_site()
    request = site.request(prompt_ids(20))
    handoff = site.prefill.offer(request)
    await site.worker.cancel(CancelJob(request.request_id, new_ticket_id()))
    await handoff.session.offered()
    late = replace(handoff.ticket, ticket_id=new_ticket_id())
    await site.worker.cancel(CancelJob(request.request_id, late.ticket_id))
    with pytest.raises(TicketExpired):
        await site.worker.offer(late, 10.0)
    await site.worker.cancel(CancelJob(request.request_id, handoff.ticket_id))
    await site.settle()


async def test_a_draining_worker_refuses_offers_and_still_serves_tickets_it_holds(
    make_site: MakeSite,
) -> None:
    site = await make_site()
    request = site.request(prompt_ids(20))
    handoff = site.prefill.offer(request)
    await handoff.session.offered()
    draining = asyncio.create_task(site.worker.drain(30.0))
    await settle()
    other = site.prefill.offer(site.request(prompt_ids(20, seed=1), "other"))
    with pytest.raises(WorkerDraining):
        await other.session.offered()
    with pytest.raises(WorkerDraining):
        await site.answer(site.job(site.request(prompt_ids(5), "new")))
    await handoff.finish()
    answer = await site.answer(site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id))
    assert [*handoff.first_tokens, *answer.token_ids] == oracle_greedy(
        site.folder, prompt_ids(20), 12, eos=(2,)
    )
    await asyncio.wait_for(draining, 5)
