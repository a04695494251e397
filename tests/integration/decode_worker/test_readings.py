"""What a decode worker tells of its way to a token: queue and prefill, the wait for KV, causes of pauses."""

from __future__ import annotations

import asyncio

from core.jobs import GenerateEvent, GenerateJob, Reading
from core.telemetry import StallCause
from tests.integration.decode_worker.conftest import MakeSite, Site, prompt_ids


async def _events(site: Site, job: GenerateJob) -> list[GenerateEvent]:
    return [event async for event in site.worker.generate(job)]


def _readings(events: list[GenerateEvent]) -> dict[int, Reading]:
    return {index: event.reading for index, event in enumerate(events) if event.reading is not None}


async def test_a_prompt_read_here_tells_queue_and_prefill_once_within_the_time_it_took(
    make_site: MakeSite,
) -> None:
    site = await make_site(token_budget=16, max_num_seqs=8)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    events = site.worker.generate(site.job(site.request(prompt_ids(60))))
    first = await anext(events)
    took = loop.time() - begin
    rest = [event async for event in events]
    assert first.reading is not None
    assert first.reading.cause is None
    assert first.reading.wait_s == 0.0
    assert first.reading.compute_s > 0.0
    assert first.reading.queue_s + first.reading.compute_s <= took
    assert not _readings(rest)


async def test_what_waits_for_another_step_is_queue_and_not_prefill(make_site: MakeSite) -> None:
    site = await make_site()
    other = site.request(prompt_ids(40, seed=3), "other", max_tokens=100, ignore_eos=True)
    running = asyncio.create_task(site.answer(site.job(other)))
    site.gate.hold()
    await site.gate.reached()
    reading = asyncio.create_task(_events(site, site.job(site.request(prompt_ids(20)))))
    await asyncio.sleep(0.3)
    site.gate.release()
    told = _readings(await reading)[0]
    await running
    assert told.queue_s >= 0.3
    assert told.compute_s < told.queue_s


async def test_a_stream_whose_kv_came_tells_how_long_it_waited_for_it(make_site: MakeSite) -> None:
    site = await make_site(ticket_wait_s=30.0)
    request = site.request(prompt_ids(50))
    handoff = site.prefill.offer(request)
    await handoff.session.offered()
    job = site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
    reading = asyncio.create_task(_events(site, job))
    await site.until(lambda: site.value("baton_num_waiting") == 1)
    await asyncio.sleep(0.1)
    await handoff.finish()
    events = await reading
    told = _readings(events)
    assert told.keys() == {0}
    assert told[0].cause is None
    assert told[0].wait_s >= 0.1
    assert (told[0].queue_s, told[0].compute_s) == (0.0, 0.0)


async def test_a_stream_whose_kv_did_not_come_says_that_it_was_read_here(make_site: MakeSite) -> None:
    site = await make_site(ticket_wait_s=30.0)
    request = site.request(prompt_ids(50))
    handoff = site.prefill.offer(request)
    await handoff.session.offered()
    job = site.job(request, emitted=handoff.first_tokens, ticket_id=handoff.ticket_id)
    reading = asyncio.create_task(_events(site, job))
    await site.until(lambda: site.value("baton_num_waiting") == 1)
    await handoff.session.abort("prefill gave up")
    told = _readings(await reading)
    assert told.keys() == {0}
    assert told[0].cause is StallCause.LOCAL_PREFILL
    assert told[0].compute_s > 0.0


async def test_each_pause_by_preemption_is_told_with_the_token_that_ends_it(make_site: MakeSite) -> None:
    site = await make_site(num_kv_blocks=24, max_num_seqs=4)
    requests = [
        site.request(prompt_ids(60, seed), f"r{seed}", max_tokens=150, ignore_eos=True) for seed in range(4)
    ]
    site.gate.hold()
    streams = [asyncio.create_task(_events(site, site.job(request))) for request in requests]
    await site.gate.reached()
    site.gate.release()
    answers = await asyncio.gather(*streams)
    told = [_readings(events) for events in answers]
    assert all(readings[0].cause is None for readings in told)
    pauses = [reading for readings in told for index, reading in readings.items() if index > 0]
    assert pauses
    assert all(pause == Reading(cause=StallCause.PREEMPT) for pause in pauses)
    assert len(pauses) <= site.value("baton_preemptions_total")


async def test_a_listener_that_comes_again_hears_the_same(make_site: MakeSite) -> None:
    site = await make_site()
    job = site.job(site.request(prompt_ids(30)))
    first = await _events(site, job)
    assert await _events(site, job) == first
    assert _readings(first).keys() == {0}
