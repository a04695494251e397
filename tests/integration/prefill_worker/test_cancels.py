"""Prefills that nobody wants any more, and calls that come twice: nothing leaks, the others are right."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.errors import Cancelled, InvalidRequest, ReservationRefused, ServingError, TransferCorrupt
from core.ids import RequestId, new_ticket_id
from core.jobs import CancelJob, PrefillJob, PrefillResult
from tests.integration.prefill_worker.conftest import MakeSite, prompt_ids
from tests.oracle import oracle_greedy

LONG = 480


@pytest.mark.parametrize("by", ["call", "ticket", "request"])
async def test_a_cancel_mid_prefill_stops_computing_and_frees_both_sides(
    make_site: MakeSite, by: str
) -> None:
    site = await make_site(token_budget=4)
    job = site.job(prompt_ids(LONG))
    site.gate.hold(after=6)
    call = asyncio.create_task(site.worker.prefill(job))
    await asyncio.wait_for(site.decode.first_write.wait(), 5)
    await site.gate.reached()
    if by == "call":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        ticket_id = job.ticket_id if by == "ticket" else None
        await site.worker.cancel(CancelJob(job.request.request_id, ticket_id, "the client left"))
        with pytest.raises(Cancelled):
            await call
    arrival = site.decode.arrivals[job.ticket_id]
    await asyncio.wait_for(arrival.ended.wait(), 1)
    assert arrival.abort_reason is not None
    site.gate.release()
    await site.settle()
    assert site.gate.num_steps == 7, "the step that had begun was the last"
    assert site.value("baton_generated_tokens_total") == 0
    assert site.value("baton_sequences_finished_total", reason="cancelled") == 1
    assert site.num_ended("aborted") == 1
    assert len(arrival.blocks) == 1


async def test_a_cancel_before_the_first_step_never_offers(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=1, token_budget=1)
    site.gate.hold(after=1)
    first = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(40), request_id="first")))
    await site.gate.reached()
    waiting = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(20, 1), request_id="second")))
    await site.gate.step()
    assert site.value("baton_num_waiting") == 1
    waiting.cancel()
    await site.gate.step()
    assert site.value("baton_num_waiting") == 0
    assert not first.done()
    site.gate.release()
    await first
    await site.settle()
    assert len(site.decode.offers) == 1


async def test_a_cancel_that_overtakes_its_prefill_is_kept_for_it(make_site: MakeSite) -> None:
    site = await make_site()
    job = site.job(prompt_ids(20))
    await site.worker.cancel(CancelJob(job.request.request_id, job.ticket_id))
    with pytest.raises(Cancelled):
        await site.worker.prefill(job)
    await site.worker.cancel(CancelJob(RequestId("nobody")))
    await site.settle()


async def test_a_late_cancel_of_another_attempt_leaves_this_one_alone(make_site: MakeSite) -> None:
    site = await make_site(token_budget=4)
    job = site.job(prompt_ids(100))
    site.gate.hold(after=1)
    call = asyncio.create_task(site.worker.prefill(job))
    await site.gate.reached()
    await site.worker.cancel(CancelJob(job.request.request_id, new_ticket_id()))
    await site.gate.step()
    assert site.value("baton_num_running") == 1
    site.gate.release()
    assert len((await call).deltas) == 1


async def test_a_second_call_with_the_same_ticket_is_refused_and_the_first_goes_on(
    make_site: MakeSite,
) -> None:
    site = await make_site(token_budget=4)
    job = site.job(prompt_ids(100))
    site.gate.hold(after=1)
    first = asyncio.create_task(site.worker.prefill(job))
    await site.gate.reached()
    second = asyncio.create_task(site.worker.prefill(job))
    await site.gate.step()
    with pytest.raises(InvalidRequest):
        await second
    assert not first.done()
    site.gate.release()
    assert len((await first).deltas) == 1
    await site.settle()
    with pytest.raises(InvalidRequest):
        await site.worker.prefill(job)
    assert len(site.decode.offers) == 1


async def test_gauges_fall_to_zero_after_aborts_without_new_traffic(make_site: MakeSite) -> None:
    site = await make_site(max_num_seqs=2, token_budget=4)
    site.gate.hold()
    calls = [
        asyncio.create_task(site.worker.prefill(site.job(prompt_ids(200, seed), request_id=f"r{seed}")))
        for seed in range(6)
    ]
    await site.gate.reached()
    await site.gate.step()  # all others have come meanwhile
    assert site.value("baton_num_running") == 1
    assert site.value("baton_kv_utilization") > 0
    assert site.value("baton_num_waiting") == 5
    assert site.value("baton_num_waiting_tokens") == 5 * 200
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    site.gate.release()
    await site.settle()
    await site.until(lambda: site.value("baton_kv_utilization") == 0)
    for name in (
        "baton_num_running",
        "baton_num_waiting",
        "baton_num_waiting_tokens",
        "baton_kv_leak_difference",
    ):
        assert site.value(name) == 0, name
    exposition = (await site.worker.metrics()).decode()
    families = list(text_string_to_metric_families(exposition))
    assert all(family.documentation for family in families)
    assert not any("r1" in sample.labels.values() for family in families for sample in family.samples)
    result = await site.worker.prefill(site.job(prompt_ids(200, 9)))
    assert len(result.deltas) == 1


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_cancels_and_refusals_leaks_nothing_and_the_others_are_right(
    make_site: MakeSite, seed: int
) -> None:
    random = Random(seed)
    site = await make_site(num_kv_blocks=24, max_num_seqs=4, token_budget=random.choice((8, 24, 64)))
    fates = [random.choice(("keep", "keep", "drop", "cancel", "refuse", "corrupt")) for _ in range(40)]
    refused = {RequestId(f"r{index}") for index, fate in enumerate(fates) if fate == "refuse"}
    corrupt = {RequestId(f"r{index}") for index, fate in enumerate(fates) if fate == "corrupt"}
    site.decode.refusal, site.decode.refused = ReservationRefused("no room"), refused
    site.decode.commit_error, site.decode.corrupt = TransferCorrupt("damaged"), corrupt
    kept: dict[RequestId, tuple[PrefillJob, PrefillResult]] = {}

    async def one(index: int) -> None:
        ids = prompt_ids(random.randint(1, 150), index)
        job = site.job(ids, request_id=f"r{index}", ignore_eos=True)
        call = asyncio.create_task(site.worker.prefill(job))
        await asyncio.sleep(random.random() * 0.2)
        if fates[index] == "drop":
            call.cancel()
        elif fates[index] == "cancel":
            await site.worker.cancel(CancelJob(job.request.request_id, random.choice((None, job.ticket_id))))
        try:
            kept[job.request.request_id] = (job, await call)
        except (ServingError, asyncio.CancelledError):
            return

    async with asyncio.timeout(30):
        await asyncio.gather(*(one(index) for index in range(40)))
    await site.settle()
    # whoever was dropped or cancelled may have been answered before
    assert kept.keys() >= {RequestId(f"r{index}") for index, fate in enumerate(fates) if fate == "keep"}
    assert kept.keys() >= corrupt, "the first token does not wait for the transfer"
    assert not kept.keys() & refused
    for job, result in kept.values():
        ids = job.request.prompt_token_ids
        assert list(result.deltas[0].token_ids) == oracle_greedy(site.folder, ids, 1)
