"""What a prefill worker shows of itself: its cached blocks, its load, its health."""

from __future__ import annotations

import asyncio

from core.block_hash import NUM_PARTS
from core.jobs import SnapshotJob
from tests.doubles import FakeClock
from tests.integration.prefill_worker.conftest import MakeSite, prompt_ids
from tests.integration.told_loads import watched


async def test_watching_shows_the_cached_blocks_and_the_load(make_site: MakeSite) -> None:
    site = await make_site(status_period_s=0.05)
    await site.worker.prefill(site.job(prompt_ids(40)))
    await site.settle()
    events = site.worker.watch()
    first = await anext(events)
    page = await site.worker.snapshot(SnapshotJob(0, NUM_PARTS))
    hashes = set(page.hashes)
    assert first.digest is not None
    assert first.digest[0] == len(hashes) == 2
    assert (page.number, page.end_part, page.epoch) == (first.number, NUM_PARTS, site.worker.ref.epoch)
    await site.worker.prefill(site.job(prompt_ids(40, seed=1)))
    async with asyncio.timeout(5):
        async for event in events:
            hashes.update(change.block_hash for change in event.events if change.block_hash is not None)
            if event.status is not None and len(hashes) == 4:
                assert event.digest is not None
                assert event.digest[0] == 4
                assert event.status.prefill_tokens_per_s > 0
                break
    await events.aclose()
    assert site.worker.announcement().layout == site.runner.layout


async def test_a_job_is_in_the_load_from_its_arrival_also_while_a_step_takes_long(
    make_site: MakeSite,
) -> None:
    site = await make_site(status_period_s=0.05)
    site.gate.hold()
    first = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(40))))
    await site.gate.reached()
    events = site.worker.watch()
    told = (await anext(events)).status
    assert told is not None
    second = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(50, seed=1), request_id="other")))
    async with asyncio.timeout(5):
        while told.num_waiting_tokens < 50:
            told = (await anext(events)).status or told
    assert site.gate.num_steps == 0, "the step thread has said nothing"
    site.gate.release()
    await asyncio.gather(first, second)
    await events.aclose()
    await site.settle()


async def test_a_prompt_that_has_been_read_is_out_of_the_load_long_before_the_next_period(
    make_site: MakeSite,
) -> None:
    site = await make_site(status_period_s=600.0)
    async with watched(site.worker) as told:
        for seed in (1, 2):
            await site.until(lambda: bool(told) and told[-1] == (0, 0))
            told.clear()
            await site.worker.prefill(site.job(prompt_ids(40, seed=seed), request_id=f"read {seed}"))
            await site.until(lambda: any(sum(counts) for counts in told))
        await site.until(lambda: told[-1] == (0, 0))
    await site.settle()


async def test_health_ends_with_the_step_thread_or_with_progress(make_site: MakeSite) -> None:
    clock = FakeClock()
    site = await make_site(clock=clock, stall_s=5.0)
    assert site.worker.is_healthy()
    clock.advance(100.0)
    await site.until(site.worker.is_healthy)  # idle is healthy

    site.decode.door.clear()
    site.gate.hold()
    call = asyncio.create_task(site.worker.prefill(site.job(prompt_ids(20))))
    await site.gate.reached()
    clock.advance(4.9)
    assert site.worker.is_healthy()
    clock.advance(0.2)
    assert not site.worker.is_healthy(), "a step that does not end"

    site.gate.release()
    await site.until(site.worker.is_healthy)
    clock.advance(5.1)
    for _ in range(3):  # rounds of the step thread, each with its tick
        await site.worker.check()
    assert not site.worker.is_healthy(), "work without progress"

    site.decode.door.set()
    await call
    await site.settle()
    await site.until(site.worker.is_healthy)
    await site.worker.stop()
    assert not site.worker.is_healthy()
